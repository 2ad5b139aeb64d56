"""The source checkpoint folder: its config, its tensors by name, and where among them the decoder is."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onptq.errors import OnPTQError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LINEARS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)

_QUERY = re.compile(r"((?:.*\.)?)layers\.(\d+)\.self_attn\.q_proj\.weight")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its shard's header describes it; nothing is read until it is asked for."""

    file: Path
    dtype: str  # safetensors' own name: BF16, F32, ...
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class SourceCheckpoint:
    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def weight_bytes(self) -> int:
        return sum(file.stat().st_size for file in {tensor.file for tensor in self.tensors.values()})

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors one at a time, each shard opened once."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.tensors[name].file].append(name)
        for file, wanted in by_file.items():
            try:
                with safe_open(file, framework="pt") as shard:
                    for name in wanted:
                        yield name, shard.get_tensor(name)
            except (SafetensorError, FileNotFoundError) as error:
                raise _unreadable(file, error) from error


@dataclass(frozen=True)
class Decoder:
    """The language model inside a checkpoint: `prefix` + `layers.{i}.self_attn.q_proj` and so on."""

    prefix: str
    layers: int

    @property
    def linears(self) -> tuple[str, ...]:
        """Names relative to the decoder, in layer order."""
        return tuple(f"layers.{layer}.{name}" for layer in range(self.layers) for name in LINEARS)


def open_source(folder: Path) -> SourceCheckpoint:
    """A dense checkpoint, to be rewritten."""
    config = read_json(folder / "config.json")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise OnPTQError(f"{folder} is already quantized ({method}); expected a dense checkpoint (fp32, fp16 or bf16)")
    return open_any(folder)


def open_any(folder: Path) -> SourceCheckpoint:
    """A checkpoint, quantized or not: whole shards, every tensor once, and where the index says."""
    config = read_json(folder / "config.json")
    tensors: dict[str, StoredTensor] = {}
    for file in _shards(folder):
        for name, tensor in _read_header(file):
            if name in tensors:
                raise OnPTQError(
                    f"{folder}: tensor {name} is stored twice, in {tensors[name].file.name} and {file.name}"
                )
            tensors[name] = tensor
    _check_index(folder, tensors)
    return SourceCheckpoint(folder, config, tensors)


def find_decoder(names: Collection[str], excluded: Sequence[str]) -> Decoder:
    """The one stack of layers that holds all seven linears and lies in no tower and no other model.

    Works on the tensor names of a checkpoint and on the parameter names of a model alike; `excluded` are `re:` patterns
    or name prefixes.
    """
    names = names if isinstance(names, (set, frozenset, dict)) else set(names)
    stacks: dict[str, set[int]] = defaultdict(set)
    for name in names:
        match = _QUERY.fullmatch(name)
        if match and not any(matches(name, pattern) for pattern in excluded):
            stacks[match[1]].add(int(match[2]))
    complete = {prefix: layers for prefix, layers in stacks.items() if _is_decoder(names, prefix, layers)}
    if len(complete) != 1:
        found = ", ".join(f"{prefix}layers.*" for prefix in sorted(complete or stacks)) or "none"
        what = "more than one language model" if complete else "no language model"
        raise OnPTQError(
            f"{what} found among the tensors: expected exactly one stack of layers 0..n whose every layer has "
            f"{', '.join(LINEARS)}; candidates: {found}"
        )
    prefix, layers = complete.popitem()
    return Decoder(prefix, len(layers))


def matches(name: str, pattern: str) -> bool:
    """As compressed-tensors matches its ignore list; a plain pattern also covers everything below it."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return name == pattern or name.startswith(pattern.rstrip(".") + ".")


def _is_decoder(names: Collection[str], prefix: str, layers: set[int]) -> bool:
    expected = (f"{prefix}layers.{layer}.{name}.weight" for layer in layers for name in LINEARS)
    return layers == set(range(len(layers))) and all(name in names for name in expected)


def _shards(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        files = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        if not files or any(Path(file).name != file for file in files):
            raise OnPTQError(f"{folder / INDEX}: weight_map must name files beside it, got {files or 'nothing'}")
        return [folder / file for file in files]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    present = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pth", ".safetensors"})
    raise OnPTQError(
        f"{folder} has neither {SINGLE} nor {INDEX}; expected a safetensors checkpoint, found {present or 'no weights'}"
    )


def _read_header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                view = shard.get_slice(name)
                yield name, StoredTensor(file, view.get_dtype(), tuple(view.get_shape()))
    except (SafetensorError, FileNotFoundError) as error:
        raise _unreadable(file, error) from error


def _check_index(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    if not (folder / INDEX).is_file():
        return
    for name, file in read_json(folder / INDEX)["weight_map"].items():
        if name not in tensors or tensors[name].file.name != file:
            raise OnPTQError(
                f"{folder / INDEX} says that {file} holds {name}, but it does not; download the checkpoint again"
            )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OnPTQError(
            f"{path} is missing; expected a checkpoint folder with config.json and safetensors weights"
        ) from None
    except ValueError as error:
        raise OnPTQError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise OnPTQError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _unreadable(file: Path, error: Exception) -> OnPTQError:
    size = f"{file.stat().st_size:,} bytes" if file.exists() else "missing"
    return OnPTQError(f"cannot read {file} ({size}): {error}; a truncated download? Fetch the shard again")
