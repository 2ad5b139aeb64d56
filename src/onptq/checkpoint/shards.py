"""safetensors files written tensor by tensor: the host holds one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

import torch
from torch import Tensor

from onptq.checkpoint.folder import DTYPES, INDEX, SINGLE
from onptq.errors import OnPTQError

MAX_SHARD_BYTES = 5 * 10**9
ALIGNMENT = 8  # of the first tensor and, by what is held back, of all: readers map tensors where they lie
METADATA = {"__metadata__": {"format": "pt"}}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ENTRY = len('"":{"dtype":"F8_E4M3","shape":[],"data_offsets":[,]},') + 64 + 2 * 14  # any shape, any offsets


def header_room(names: Iterable[str]) -> int:
    """Bytes that the header of a shard with all these tensors takes at most."""
    content = sum(len(json.dumps(name)) + _ENTRY for name in names) + len(json.dumps(METADATA))
    return -(-content // ALIGNMENT) * ALIGNMENT


class ShardWriter:
    """Append every tensor to the current shard, and begin another when the next one would not fit.

    A header stands in front of the data and is complete last. Bytes are reserved for it and filled up with blanks,
    which the format allows.
    """

    def __init__(self, stage: Path, room: int, limit: int = MAX_SHARD_BYTES) -> None:
        self.stage, self.room, self.limit = stage, room, limit
        self.shards: list[list[str]] = []
        self.total_bytes = 0
        self._file: IO[bytes] | None = None  # opened with the shard's first tensor
        self._begin()

    def add(self, name: str, tensor: Tensor) -> None:
        if self._shard_bytes and self._shard_bytes + tensor.nbytes > self.limit:
            self._finish()
            self._begin()
        self._shard_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.nbytes % ALIGNMENT:
            self._odd[name] = tensor.clone()
        else:
            self._write(name, tensor)

    def close(self) -> None:
        """Give the shards their final names, which hold their number, and write the index."""
        self._finish()
        count = len(self.shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE]
        for position, name in enumerate(names):
            self._path(position).rename(self.stage / name)
        if count > 1:
            weight_map = {tensor: name for name, shard in zip(names, self.shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self.stage / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be flushed is given up with the rest
                self._file.close()

    def _begin(self) -> None:
        self._entries: dict[str, dict[str, object]] = {}
        self._odd: dict[str, Tensor] = {}  # sizes that would push the next tensor off its alignment: last, widest first
        self._shard_bytes, self._offset = 0, 0

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

    def _finish(self) -> None:
        for name, tensor in sorted(self._odd.items(), key=lambda item: -item[1].itemsize):
            self._write(name, tensor)
        header = json.dumps(METADATA | self._entries, separators=(",", ":")).encode()
        if len(header) > self.room:
            raise OnPTQError(f"the header of a shard takes {len(header):,} bytes, {self.room:,} were left for it")
        with self._opened() as file:
            file.seek(0)
            file.write(self.room.to_bytes(8, "little") + header.ljust(self.room))
        self._file = None
        self.shards.append(list(self._entries))

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = self._path(len(self.shards)).open("wb")
            self._file.seek(8 + self.room)
        return self._file

    def _path(self, position: int) -> Path:
        return self.stage / f"shard-{position}.partial"
