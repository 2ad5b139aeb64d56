"""A checkpoint folder: config.json, the headers of its shards, its index.

`read_folder` reads a damaged folder as far as it goes and records the damage. `require_whole` refuses it.
"""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onptq.checkpoint.fused import Slice, slices
from onptq.errors import OnPTQError
from onptq.models.family import text_config, thinker_config

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = {".bin", ".pth"}
SETTINGS = {".json", ".jinja", ".model", ".txt"}  # of model, tokenizer and processor
HEADER_LIMIT = 100_000_000  # safetensors' own
LONGEST_NAME = 200  # of a file; file systems take 255 bytes
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DENSE = ("F32", "F16", "BF16")  # what weights to be quantized may be stored as
BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "U32": 32,
    "U64": 64,
    "C64": 64,
}
# The last component of a tensor's name, in every supported format.
_PARAMETERS = (
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_global_scale", "input_global_scale", "input_scale", "input_zero_point", "output_scale"),
    *("qweight", "qzeros", "scales", "g_idx", "SCB", "weight_format", "k_scale", "v_scale", "weight", "bias"),
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its shard's header describes it."""

    file: Path
    dtype: str  # safetensors' own name: BF16, F32, ...
    shape: tuple[int, ...]
    part: Slice | None = None  # where it is part of a tensor that holds all experts of a layer

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Shard:
    """One safetensors file. The header of a truncated one still says what it should hold."""

    file: Path
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    expected_bytes: int = 0
    actual_bytes: int = 0
    unreadable: str | None = None

    @property
    def whole(self) -> bool:
        return self.unreadable is None and self.actual_bytes == self.expected_bytes

    @property
    def missing(self) -> bool:
        return self.unreadable == "missing"


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint folder. Of a tensor that is stored twice, `stored` has the one that the index names."""

    folder: Path
    config: dict[str, Any]
    shards: tuple[Shard, ...]  # all of them, whether the index names them or not
    weight_map: Mapping[str, str] | None  # of the index; None without one
    index_error: str | None = None

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by name; the linears of experts that share one are there one by one."""
        hidden = text_config(self.config).get("hidden_size")
        tensors: dict[str, StoredTensor] = {}
        for name, tensor in self.stored.items():
            parts = {
                linear: StoredTensor(tensor.file, tensor.dtype, shape, part)
                for linear, shape, part in slices(name, tensor.shape, hidden)
            }
            tensors |= parts or {name: tensor}
        return tensors

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """The tensors as the shards name them."""
        tensors: dict[str, StoredTensor] = {}
        for shard in self.shards:
            for name, tensor in shard.tensors.items():
                if name not in tensors or shard.file.name == (self.weight_map or {}).get(name):
                    tensors[name] = tensor
        return tensors

    @cached_property
    def readable(self) -> dict[str, StoredTensor]:
        """The tensors in whole shards, whose values can be read."""
        whole = {shard.file for shard in self.shards if shard.whole}
        return {name: tensor for name, tensor in self.tensors.items() if tensor.file in whole}

    @cached_property
    def modules(self) -> dict[str, dict[str, StoredTensor]]:
        """Tensors by module, then by parameter: {"model.layers.0.mlp.up_proj": {"weight": ...}}."""
        grouped: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        for name, tensor in self.tensors.items():
            module, parameter = split_name(name)
            grouped[module][parameter] = tensor
        return dict(grouped)

    @cached_property
    def doubles(self) -> dict[str, tuple[str, ...]]:
        """Tensors that more than one shard holds -> the names of these shards."""
        holders: dict[str, list[str]] = defaultdict(list)
        for shard in self.shards:
            for name in shard.tensors:
                holders[name].append(shard.file.name)
        return {name: tuple(files) for name, files in holders.items() if len(files) > 1}

    @property
    def stale_single(self) -> bool:
        """Whether model.safetensors lies beside an index that does not name it: transformers reads it, servers do not."""
        named = set((self.weight_map or {}).values())
        return self.weight_map is not None and SINGLE not in named and any(s.file.name == SINGLE for s in self.shards)

    @property
    def weight_bytes(self) -> int:
        return sum(shard.actual_bytes for shard in self.shards)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The first quantization_config that a loader sees."""
        return next(iter(self.quantizations.values()), None)

    @property
    def quantizations(self) -> dict[str, Mapping[str, Any]]:
        """Every place of config.json with a quantization_config: "" for the top, "thinker_config", "text_config"."""
        places = {
            "": self.config,
            "thinker_config": self.config.get("thinker_config"),
            "text_config": thinker_config(self.config).get("text_config"),
        }
        return {
            place: part["quantization_config"]
            for place, part in places.items()
            if isinstance(part, Mapping) and isinstance(part.get("quantization_config"), Mapping)
        }

    def json(self, name: str) -> dict[str, Any]:
        """A companion file's content; empty where it is missing or no JSON object."""
        try:
            return read_json(self.folder / name)
        except OnPTQError:
            return {}

    def has(self, *names: str) -> bool:
        return any((self.folder / name).is_file() for name in names)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors one at a time, each shard opened once."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.tensors[name].file].append(name)
        for file, wanted in by_file.items():
            try:
                with safe_open(file, framework="pt") as shard:
                    for name in wanted:
                        part = self.tensors[name].part
                        yield name, shard.get_tensor(name) if part is None else part.read(shard)
            except (SafetensorError, OSError) as error:
                raise _unreadable(file, str(error)) from error

    def require_dense(self) -> Self:
        """Refuse a quantized checkpoint."""
        if self.quantization is not None:
            method = self.quantization.get("quant_method", "unknown")
            raise OnPTQError(
                f"{self.folder} is already quantized ({method}); expected a dense checkpoint (fp32, fp16 or bf16)"
            )
        return self

    def require_whole(self) -> Self:
        """The checkpoint with the shards that readers take: those of the index, or model.safetensors. Refuse a damaged one."""
        if self.index_error is not None:
            raise OnPTQError(f"{self.folder / INDEX} {self.index_error}")
        if self.stale_single:
            raise OnPTQError(
                f"{self.folder} has {SINGLE} beside {INDEX}, which does not name it: transformers reads the one, servers "
                "the other; delete the stale one"
            )
        named = {SINGLE} if self.weight_map is None else set(self.weight_map.values())
        whole = replace(self, shards=tuple(shard for shard in self.shards if shard.file.name in named))
        if not whole.shards:
            present = sorted(path.name for path in self.folder.iterdir() if path.suffix in {*PICKLED, ".safetensors"})
            raise OnPTQError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}; expected a checkpoint in safetensors (pickled weights "
                f"are not read), got {', '.join(present) or 'no weights'}"
            )
        for shard in whole.shards:
            if not shard.whole:
                raise _unreadable(
                    shard.file, shard.unreadable or f"its header describes {shard.expected_bytes:,} bytes"
                )
        if whole.doubles:
            name, files = next(iter(whole.doubles.items()))
            raise OnPTQError(f"{self.folder}: tensor {name} is stored twice, in {' and '.join(files)}")
        for name, file in (self.weight_map or {}).items():
            if name not in whole.stored or whole.stored[name].file.name != file:
                raise OnPTQError(
                    f"{self.folder / INDEX} says that {file} holds {name}, but it does not; download the checkpoint again"
                )
        return whole


def read_folder(folder: Path) -> Checkpoint:
    """Read config.json, the index and the header of every shard. Only config.json must be in order."""
    _check_regular(folder)
    config = read_json(folder / CONFIG)
    _check_sections(config, folder / CONFIG)
    weight_map, error = _read_index(folder / INDEX)
    files = {*folder.glob("*.safetensors"), *(folder / name for name in (weight_map or {}).values())}
    if weight_map is None and (folder / SINGLE).is_file():
        files = {folder / SINGLE}  # without an index every reader takes this one file
    return Checkpoint(folder, config, tuple(_read_shard(file) for file in sorted(files)), weight_map, error)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OnPTQError(
            f"{path} is missing; expected a checkpoint folder with config.json and safetensors weights"
        ) from None
    except OSError as error:
        raise OnPTQError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise OnPTQError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise OnPTQError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def split_name(name: str) -> tuple[str, str]:
    """ "a.b.weight_scale" -> ("a.b", "weight_scale"); bitsandbytes' "a.b.weight.absmax" -> ("a.b", "weight.absmax")."""
    head, marker, state = name.rpartition(".weight.")
    if marker and (state.startswith(("absmax", "quant_", "nested_"))):
        return head, f"weight.{state}"
    module, _, parameter = name.rpartition(".")
    return (module, parameter) if parameter in _PARAMETERS else (name, "")


def _check_regular(folder: Path) -> None:
    """Refuse pipes and devices where transformers looks for settings: to open one may take for ever."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix in SETTINGS and path.exists() and not (path.is_file() or path.is_dir()):
            raise OnPTQError(f"{path} is not a regular file; expected one, or none")


def _check_sections(config: Mapping[str, Any], path: Path) -> None:
    for key in ("thinker_config", "text_config", "vision_config", "audio_config", "quantization_config"):
        section = config.get(key)
        if section is not None and not isinstance(section, dict):
            raise OnPTQError(f"{path}: {key} must be a JSON object, got {type(section).__name__}")
        if section:
            _check_sections(section, path)


def _read_index(path: Path) -> tuple[Mapping[str, str] | None, str | None]:
    if not path.is_file():
        return None, None
    try:
        weight_map = read_json(path).get("weight_map")
    except OnPTQError as error:
        return {}, f"is unreadable ({error})"
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return {}, "is unreadable (weight_map must map tensor names to file names)"
    elsewhere = sorted({file for file in weight_map.values() if Path(file).name != file or len(file) > LONGEST_NAME})
    if elsewhere or not weight_map:
        return {}, f"must name files beside it, got {', '.join(name[:100] for name in elsewhere[:3]) or 'nothing'}"
    return weight_map, None


def _read_shard(file: Path) -> Shard:
    """By hand: safetensors opens no truncated file, and only its header tells what is lost."""
    if not file.exists():
        return Shard(file, unreadable="missing")
    if not file.is_file():
        return Shard(file, unreadable="not a regular file")
    actual = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(HEADER_LIMIT, actual):
                raise ValueError(f"a header of {length:,} bytes in a file of {actual:,}")
            header = json.loads(stream.read(length))
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata that are not text")
        tensors = {name: _tensor(file, entry) for name, entry in header.items()}
        data = _check_offsets(header, tensors)
    except OSError as error:
        return Shard(file, actual_bytes=actual, unreadable=str(error.strerror))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        return Shard(file, actual_bytes=actual, unreadable=f"no safetensors header: {error}")
    return Shard(file, tensors, 8 + length + data, actual)


def _tensor(file: Path, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, shape = entry["dtype"], entry["shape"]
    if dtype not in BITS:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape!r}")
    return StoredTensor(file, dtype, tuple(shape))


def _check_offsets(header: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> int:
    """The bytes of all tensors, which must lie side by side from byte 0 on, without gaps and overlaps."""
    end = 0
    for start, stop, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
        if start != end or stop - start != tensors[name].nbytes:
            raise ValueError(f"{name} lies at bytes {start} to {stop}, expected {end} to {end + tensors[name].nbytes}")
        end = stop
    return end


def _unreadable(file: Path, reason: str) -> OnPTQError:
    size = f"{file.stat().st_size:,} bytes" if file.exists() else "missing"
    return OnPTQError(f"cannot read {file} ({size}): {reason}; a truncated download? Fetch the shard again")
