"""Finished blocks of a method: each block's part of theta is stored once it is fitted, and read back after a kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from onptq.methods.guards import require_finite_theta
from onptq.methods.layerwise import Stream
from onptq.models.structure import Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, pair_key
from onptq.run import Run

FOLDER = "init"  # of a run, until theta^(0) is whole


class BlockStore(Protocol):
    """Parts of theta by block index, written whole or not at all."""

    def read(self, block: int) -> Theta | None:
        """The part of a finished block; None where the block is not finished."""

    def write(self, block: int, part: Theta) -> None: ...

    def within(self, stage: str) -> BlockStore:
        """The store of an earlier stage of the same method."""


class RunStore:
    """The finished blocks of a run's base method, as files `init/BLOCK.safetensors`."""

    def __init__(
        self, run: Run, device: torch.device, folder: str = FOLDER, *, codes: torch.device | None = None
    ) -> None:
        """`codes` is the device of settled codes, if it is another one."""
        self._run, self._device, self._folder, self._codes = run, device, folder, codes

    @property
    def folder(self) -> Path:
        return self._run.file(self._folder)

    @property
    def finished(self) -> int:
        """The number of finished blocks."""
        return len(list(self.folder.glob("[0-9]*.safetensors")))

    def read(self, block: int) -> Theta | None:
        name = self._name(block)
        if not self._run.has(name):
            return None
        return self._run.read(name, lambda path: Theta.load(path, self._device, self._codes))

    def write(self, block: int, part: Theta) -> None:
        with self._run.writing(self._name(block)) as path:
            part.save(path)

    def within(self, stage: str) -> RunStore:
        return RunStore(self._run, self._device, f"{self._folder}/{stage}", codes=self._codes)

    def _name(self, block: int) -> str:
        return f"{self._folder}/{block}.safetensors"


def block_part(theta: Theta, block: Block) -> Theta:
    """The part of theta that belongs to one block. It shares its tensors with theta."""
    paths = [block.path(name) for name in block.linears]
    smoothing = {pair_key(block, pair): theta.smoothing[pair_key(block, pair)] for pair in block.producers}
    return Theta(smoothing, {path: theta.linears[path] for path in paths})


def restore(store: BlockStore | None, theta: Theta, block: Block) -> bool:
    """Put a finished block's part into theta, in place; False where the block has to be fitted."""
    part = None if store is None else store.read(block.index)
    if part is None:
        return False
    theta.smoothing.update(part.smoothing)
    theta.linears.update(part.linears)
    return True


def restore_all(store: BlockStore | None, theta: Theta, blocks: Sequence[Block]) -> bool:
    """Put every block's part into theta, in place; False, with theta as it was, where a block is not finished."""
    restored = theta.clone()
    if not all(restore(store, restored, block) for block in blocks):
        return False
    theta.smoothing, theta.linears = restored.smoothing, restored.linears
    return True


def keep(store: BlockStore | None, theta: Theta, block: Block) -> None:
    """Store the part of a block that has just been fitted, which is finite."""
    part = block_part(theta, block)
    require_finite_theta(part)
    if store is not None:
        store.write(block.index, part)


def fitted_blocks(
    policy: Policy, theta: Theta, streams: Sequence[Stream], store: BlockStore | None, advance: Callable[[int], None]
) -> Iterator[Block]:
    """The blocks that are not finished, in their order, for the caller to fit. Behind each block, its part of theta is stored
    and the streams go on."""
    for block in policy.gathered_blocks():
        if not restore(store, theta, block):
            yield block
            keep(store, theta, block)
            advance(1)
        for stream in streams:
            stream.advance(block)
