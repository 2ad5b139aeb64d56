"""What memory has room for: what is kept between steps, and how much is done at once, halved for good where that is too much,
told once, remembered."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

T = TypeVar("T")
Keep = Literal["floats", "integers", "codes", "nothing"]


@dataclass(frozen=True)
class Budgets:
    """Bytes that may hold prefixes and dense targets between steps; None: as many as there are. And what is kept of Q's weights:
    floats, integers that are multiplied as they are, codes that become floats in every forward, or nothing, so that weights are
    made of D's and theta in every forward."""

    prefixes: int | None = None
    targets: int | None = None
    keep: Keep = "floats"


class Room:
    """So many tokens, prompts or whatever `unit` says go through the model together."""

    def __init__(
        self,
        size: int,
        unit: str,
        *,
        tell: Callable[[str], None] = lambda words: None,
        keep: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.size, self.unit, self._tell, self._keep, self._told = size, unit, tell, keep, False

    def fit(self, work: Callable[[int], T]) -> T:
        """`work` with the present size or, as often as that is too much, with half of it. `work` begins anew each time."""
        while True:
            try:
                return work(self.size)
            except torch.OutOfMemoryError:
                if self.size <= 1:
                    raise
            self.halve()  # not where the error is handled: it holds on to every tensor of what failed

    def halve(self) -> None:
        before, self.size = self.size, max(1, self.size // 2)
        if not self._told:
            self._tell(
                f"{before:,} {self.unit} at once do not fit into memory: going on with {self.size:,}, and with fewer where "
                "that is still too much. The result is the same, the run slower"
            )
            self._told = True
        self._keep(self.size)
        give_back_memory()


def free_memory(device: torch.device) -> int:
    """Bytes that the device still has, or that this process may still take of it."""
    if device.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))


def give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
