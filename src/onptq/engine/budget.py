"""Memory budgets: what is cached between steps, and how much goes through the model at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from onptq.quantizer.modules import Keep

T = TypeVar("T")
Held = Keep | Literal["nothing"]  # of Q's weights


@dataclass(frozen=True)
class Budgets:
    """Bytes for prefixes and dense targets cached between steps (None: unlimited), and what is held of Q's weights: floats,
    integers that are multiplied as they are, codes that become floats in every forward, or nothing, so that they are computed
    from D's and theta in every forward."""

    prefixes: int | None = None
    targets: int | None = None
    keep: Held = "floats"


class BatchBudget:
    """How many tokens or prompts (`unit`) go through the model at once; halved for good where that does not fit.

    The first halving is reported by `warn`, each one stored by `keep`."""

    def __init__(
        self,
        size: int,
        unit: str,
        *,
        warn: Callable[[str], None] = lambda message: None,
        keep: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.size, self.unit, self._warn, self._keep, self._warned = size, unit, warn, keep, False

    def fit(self, work: Callable[[int], T]) -> T:
        """`work(size)`, started again with half the size as often as that does not fit."""
        while True:
            try:
                return work(self.size)
            except torch.OutOfMemoryError:
                if self.size <= 1:
                    raise
            self.halve()  # not where the error is handled: it holds on to every tensor of what failed

    def halve(self) -> None:
        before, self.size = self.size, max(1, self.size // 2)
        if not self._warned:
            self._warn(
                f"{before:,} {self.unit} at once do not fit into memory: going on with {self.size:,}, and with fewer where "
                "that is still too much. The result is the same, the run slower"
            )
            self._warned = True
        self._keep(self.size)
        give_back_memory()


def give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
