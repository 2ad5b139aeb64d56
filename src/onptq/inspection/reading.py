"""A checkpoint folder read as it stands: a damaged one is read as far as it goes, and what stopped it is kept."""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError
from onptq.export.checkpoint import INDEX, SINGLE, SourceCheckpoint, StoredTensor, read_json
from onptq.models.family import thinker_config

HEADER_LIMIT = 100_000_000  # as safetensors has it
# Of a stored number; everything else (bool, int8, the kinds of float8) is a byte.
BITS = {"F4": 4, "I16": 16, "U16": 16, "F16": 16, "BF16": 16} | {
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
# What follows a module's own name in the names of its tensors, for all formats that are told apart.
_PARAMETERS = (
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_global_scale", "input_global_scale", "input_scale", "input_zero_point", "output_scale"),
    *("qweight", "qzeros", "scales", "g_idx", "SCB", "weight_format", "k_scale", "v_scale", "weight", "bias"),
)


@dataclass(frozen=True)
class Shard:
    """One safetensors file. Of a truncated one the header still says what it should hold."""

    file: Path
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    expected_bytes: int = 0
    actual_bytes: int = 0
    unreadable: str | None = None

    @property
    def whole(self) -> bool:
        return self.unreadable is None and self.actual_bytes == self.expected_bytes


@dataclass(frozen=True)
class Reading:
    """What lies in a checkpoint folder. `tensors` are those that a reader finds: the index decides between doubles."""

    folder: Path
    config: dict[str, Any]
    shards: tuple[Shard, ...]  # all of them, whether the index names them or not
    weight_map: Mapping[str, str] | None  # of the index; None without one
    index_error: str | None = None

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for shard in self.shards:
            for name, tensor in shard.tensors.items():
                chosen = (self.weight_map or {}).get(name)
                if name not in found or shard.file.name == chosen:
                    found[name] = tensor
        return found

    @cached_property
    def modules(self) -> dict[str, dict[str, StoredTensor]]:
        """Tensors by the module they belong to, then by what they are to it: {"model.layers.0.mlp.up_proj": {"weight": ...}}."""
        grouped: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        for name, tensor in self.tensors.items():
            module, parameter = split_name(name)
            grouped[module][parameter] = tensor
        return dict(grouped)

    @cached_property
    def doubles(self) -> dict[str, tuple[str, ...]]:
        """Tensors that more than one shard holds, and which."""
        holders: dict[str, list[str]] = defaultdict(list)
        for shard in self.shards:
            for name in shard.tensors:
                holders[name].append(shard.file.name)
        return {name: tuple(files) for name, files in holders.items() if len(files) > 1}

    @property
    def checkpoint(self) -> SourceCheckpoint:
        """For reading values, which only whole shards give."""
        whole = {shard.file for shard in self.shards if shard.whole}
        readable = {name: tensor for name, tensor in self.tensors.items() if tensor.file in whole}
        return SourceCheckpoint(self.folder, self.config, readable)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The first quantization_config that any loader would see."""
        return next(iter(self.quantizations.values()), None)

    @property
    def quantizations(self) -> dict[str, Mapping[str, Any]]:
        """Every place of config.json with a quantization_config: "" for the top, "thinker_config", "text_config"."""
        thinker = thinker_config(self.config)
        places = {
            "": self.config,
            "thinker_config": self.config.get("thinker_config"),
            "text_config": thinker.get("text_config"),
        }
        return {
            place: part["quantization_config"]
            for place, part in places.items()
            if isinstance(part, Mapping) and isinstance(part.get("quantization_config"), Mapping)
        }

    def json(self, name: str) -> dict[str, Any]:
        """A companion file's content; empty where it is missing or no JSON object."""
        try:
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def has(self, *names: str) -> bool:
        return any((self.folder / name).is_file() for name in names)


def read_folder(folder: Path) -> Reading:
    if not folder.is_dir():
        raise OnPTQError(f"{folder} is no folder; expected a checkpoint folder with config.json")
    config = read_json(folder / "config.json")
    _check_sections(config, folder / "config.json")
    weight_map, error = _read_index(folder / INDEX)
    named = {Path(name).name for name in (weight_map or {}).values()}
    files = sorted({*folder.glob("*.safetensors"), *(folder / name for name in named)})
    if weight_map is None and (folder / SINGLE).is_file():
        # Without an index every reader takes this one file.
        files = [folder / SINGLE]
    return Reading(folder, config, tuple(_read_shard(file) for file in files), weight_map, error)


def nbytes(tensor: StoredTensor) -> int:
    return math.ceil(tensor.numel * BITS.get(tensor.dtype, 8) / 8)


def split_name(name: str) -> tuple[str, str]:
    """ "a.b.weight_scale" -> ("a.b", "weight_scale"); bitsandbytes' "a.b.weight.absmax" -> ("a.b", "weight.absmax")."""
    head, marker, state = name.rpartition(".weight.")
    if marker and (state.startswith(("absmax", "quant_", "nested_"))):
        return head, f"weight.{state}"
    module, _, parameter = name.rpartition(".")
    return (module, parameter) if parameter in _PARAMETERS else (name, "")


def _check_sections(config: Mapping[str, Any], path: Path) -> None:
    for key in ("thinker_config", "text_config", "quantization_config"):
        section = config.get(key)
        if section is not None and not isinstance(section, dict):
            raise OnPTQError(f"{path}: {key} must be a JSON object, got {type(section).__name__}")
        if section:
            _check_sections(section, path)


def _read_index(path: Path) -> tuple[Mapping[str, str] | None, str | None]:
    if not path.is_file():
        return None, None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        return {}, f"{type(error).__name__}: {error}"
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return {}, "weight_map must map tensor names to file names"
    return weight_map, None


def _read_shard(file: Path) -> Shard:
    """By hand, because safetensors itself opens no truncated file, and its header is what tells the loss."""
    if not file.is_file():
        return Shard(file, unreadable="missing")
    actual = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(HEADER_LIMIT, actual):
                raise ValueError(f"a header of {length:,} bytes in a file of {actual:,}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(file, str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()
        }
        data = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        return Shard(file, actual_bytes=actual, unreadable=f"no safetensors header: {error}")
    return Shard(file, tensors, 8 + length + data, actual)
