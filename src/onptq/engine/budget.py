"""Memory budgets: what is cached between steps, and how much goes through the model at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from onptq.engine.memory import free_memory
from onptq.quantizer.modules import Keep
from onptq.quantizer.policy import Policy
from onptq.recipe import Recipe

T = TypeVar("T")
Held = Keep | Literal["nothing"]  # of Q's weights
WHOLE = 2  # blocks that a process has whole at a time, where they are sharded: what is gathered, and its copy
SHARE_OF_FREE = 0.5  # of the device's free memory, for prefixes and targets together


@dataclass(frozen=True)
class Budgets:
    """Bytes for encoded prompts, and for prefixes and dense targets cached between steps (None: unlimited), and what is held of
    Q's weights: floats, integers that are multiplied as they are, codes that become floats in every forward, or nothing, so
    that they are computed from D's and theta in every forward."""

    prefixes: int | None = None
    targets: int | None = None
    keep: Held = "floats"
    prompts: int | None = None

    @classmethod
    def within(cls, free: int, floats: int, codes: int, recipe: Recipe, on_gpu: bool) -> Budgets:
        """A quarter of the `free` bytes each for prefixes, for targets and, before these, for prompts. Q's weights, which take
        so many bytes as `floats` and as `codes`, stay as integers, floats or codes where these fit beside that."""
        cache = recipe.compute.cache_gib
        each = cached_bytes(free, cache)
        return cls(each, each, keep_of_q(free, cache, floats, codes, recipe, on_gpu), each)

    @classmethod
    def of_shards(cls, free: int, recipe: Recipe) -> Budgets:
        """The same of a sharded model, which holds nothing of Q's weights: every process would have to hold it all."""
        each = cached_bytes(max(0, free), recipe.compute.cache_gib)
        return cls(each, each, "nothing", each)

    @classmethod
    def of(cls, policy: Policy, recipe: Recipe) -> Budgets:
        """The budgets of a policy that is loaded and not yet used, from what its device has free now."""
        parameters = [parameter for block in policy.structure.blocks for parameter in block.module.parameters()]
        floats, codes = sum(one.nbytes for one in parameters), sum(one.numel() for one in parameters)
        free, on_gpu = free_memory(policy.device), policy.device.type == "cuda"
        if policy.sharded is None:
            return cls.within(free, floats, codes, recipe, on_gpu)
        return cls.of_shards(free - WHOLE * floats // policy.blocks, recipe)


def cached_bytes(free: int, cache_gib: float | None) -> int:
    """The budget of one kind of what is cached: half of the recipe's, or of a share of the `free` bytes."""
    return (int(SHARE_OF_FREE * free) if cache_gib is None else int(cache_gib * 2**30)) // 2


def keep_of_q(free: int, cache_gib: float | None, floats: int, codes: int, recipe: Recipe, on_gpu: bool) -> Held:
    """The form in which Q's weights are held, by their bytes as floats and as codes. Settled codes are theta's own."""
    codes_fit = recipe.settles or codes < SHARE_OF_FREE * free
    if codes_fit and on_gpu and recipe.multiplies_integers:
        return "integers"
    if cache_gib is None and floats < SHARE_OF_FREE * free / 2:
        return "floats"
    return "codes" if codes_fit else "nothing"


class BatchBudget:
    """The number of tokens or prompts (`unit`) that go through the model at once; halved for good where that does not fit.

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
