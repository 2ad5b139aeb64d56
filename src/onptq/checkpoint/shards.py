"""safetensors files written tensor by tensor: the host holds one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

import torch
from torch import Tensor

from onptq.checkpoint.folder import DTYPES, INDEX, SINGLE
from onptq.errors import OnPTQError
from onptq.files import sync

MAX_SHARD_BYTES = 5 * 10**9
ALIGNMENT = 8  # of the first tensor and, by what is held back, of all: readers map tensors where they lie
METADATA = {"__metadata__": {"format": "pt"}}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ENTRY = len('"":{"dtype":"F8_E4M3","shape":[],"data_offsets":[,]},') + 64 + 2 * 14  # any shape, any offsets


def header_room(names: Iterable[str]) -> int:
    """Bytes that the header of a shard with all these tensors takes at most."""
    content = sum(len(json.dumps(name)) + _ENTRY for name in names) + len(json.dumps(METADATA))
    return -(-content // ALIGNMENT) * ALIGNMENT


class Shard:
    """One file of a checkpoint, under a name that no reader knows.

    The header stands in front of the data and is complete last. Bytes are reserved for it and filled up with blanks, which
    the format allows.
    """

    def __init__(self, stage: Path, position: int, room: int) -> None:
        self.path, self.room = partial(stage, position), room
        self.bytes = 0
        self._offset = 0
        self._entries: dict[str, dict[str, object]] = {}
        self._odd: dict[str, Tensor] = {}  # sizes that would push the next tensor off its alignment: last, widest first
        self._file: IO[bytes] | None = None  # opened with its first tensor

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def add(self, name: str, tensor: Tensor) -> None:
        self.bytes += tensor.nbytes
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.nbytes % ALIGNMENT:
            self._odd[name] = tensor.clone()
        else:
            self._write(name, tensor)

    def finish(self) -> None:
        """Write what is left and the header, and wait until all is on disk."""
        for name, tensor in sorted(self._odd.items(), key=lambda item: -item[1].itemsize):
            self._write(name, tensor)
        header = json.dumps(METADATA | self._entries, separators=(",", ":")).encode()
        if len(header) > self.room:
            raise OnPTQError(f"the header of a shard takes {len(header):,} bytes, {self.room:,} were left for it")
        with self._opened() as file:
            file.seek(0)
            file.write(self.room.to_bytes(8, "little") + header.ljust(self.room))
        self._file = None
        sync(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be flushed is given up with the rest
                self._file.close()

    def _write(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in NAMES:
            raise OnPTQError(
                f"{name} is {tensor.dtype}, which cannot be written; expected one of {', '.join(NAMES.values())}"
            )
        file = self._opened()
        end = self._offset + tensor.nbytes
        self._entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._offset, end],
        }
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._offset = end

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = self.path.open("wb")
            self._file.seek(8 + self.room)
        return self._file


class ShardWriter:
    """Append every tensor to the current shard, and begin another when the next one would not fit."""

    def __init__(self, stage: Path, room: int, limit: int = MAX_SHARD_BYTES) -> None:
        self.stage, self.room, self.limit = stage, room, limit
        self._shards = [Shard(stage, 0, room)]

    def add(self, name: str, tensor: Tensor) -> None:
        current = self._shards[-1]
        if current.bytes and current.bytes + tensor.nbytes > self.limit:
            current.finish()
            self._shards.append(current := Shard(self.stage, len(self._shards), self.room))
        current.add(name, tensor)

    def close(self) -> None:
        """Give the shards their final names, and write the index."""
        self._shards[-1].finish()
        name_shards(self.stage, [shard.names for shard in self._shards], sum(shard.bytes for shard in self._shards))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._shards[-1].__exit__(*error)


def partial(stage: Path, position: int) -> Path:
    return stage / f"shard-{position}.partial"


def name_shards(stage: Path, shards: Sequence[Sequence[str]], total_bytes: int) -> None:
    """Give shards with these tensors their final names, which hold their number, and write the index."""
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE]
    for position, name in enumerate(names):
        partial(stage, position).rename(stage / name)
    if count > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (stage / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
