"""Decoding, one token of every row at a time.

On a GPU a step is recorded as a CUDA graph and replayed: the host launches one graph instead of a thousand kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onptq.engine.prefixes import Prefix
from onptq.engine.sampling import Sampling
from onptq.models.decoder import SlotCache, Tokens
from onptq.models.encoding import PromptBatch
from onptq.models.language_model import LanguageModel

WARM_UP = 2  # steps before a recording: kernels are compiled and loaded in them
MIN_REPLAYS = 8  # steps that a recording must serve to gain anything


class Decoding:
    """y_t = argmax z(s_t) for a batch, or y_t as `sampling` draws it. All that changes from step to step is in tensors of its
    own."""

    def __init__(
        self,
        policy: LanguageModel,
        batch: PromptBatch,
        prefix: Prefix,
        limit: int,
        sampling: Sampling | None = None,
    ) -> None:
        size, device = len(batch.prompts), policy.device
        self.policy, self.written, self._width = policy, 1, batch.width
        self._replays = replays(policy, limit)
        self._sampling = sampling
        self._numbers = None if sampling is None else sampling.numbers(batch, limit)
        self._said = None if sampling is None else sampling.said(batch, policy.vocabulary)
        self._fed = torch.zeros(1, dtype=torch.long, device=device)  # which of the tokens is fed next
        self.tokens = torch.zeros(size, limit, dtype=torch.long, device=device)  # y_1..y_limit
        self.tokens[:, 0] = self._chosen(policy.logits(prefix.last))
        self._slot = torch.full((1,), batch.width, device=device)  # and where its keys go
        self._positions = batch.response_positions(1).clone()
        slots = prefix.cache.slots
        self._seen = torch.zeros(size, 1, 1, slots, dtype=torch.bool, device=device)
        self._seen[:, 0, 0, : batch.width] = batch.real
        self._cache = SlotCache(prefix.cache, self._slot) if self._replays else prefix.cache
        self._go: Callable[[], None] = self._step

    def step(self) -> None:
        """Decode one more token of every row."""
        if self._replays and self.written == 1 + WARM_UP:
            self._go = _recorded(self._step)
        self._go()
        self.written += 1

    def _step(self) -> None:
        policy = self.policy
        token = self.tokens.index_select(1, self._fed)
        self._seen.index_fill_(3, self._slot, True)
        seen = self._seen if self._replays else self._seen[..., : self._width + self.written]
        hidden = policy.run(Tokens(policy.embed(token), self._positions, seen), self._cache)[:, 0]
        for counter in (self._fed, self._slot, self._positions):
            counter += 1
        self.tokens.index_copy_(1, self._fed, self._chosen(policy.logits(hidden))[:, None])

    def _chosen(self, logits: Tensor) -> Tensor:
        """The next token of every row."""
        if self._sampling is None or self._numbers is None:
            return logits.argmax(-1)
        if self._said is not None:
            logits = self._sampling.penalized(logits, self._said)
        chosen = self._sampling.draw(logits, self._numbers.index_select(1, self._fed)[:, 0])
        if self._said is not None:
            self._said.scatter_(1, chosen[:, None], True)
        return chosen


def replays(policy: LanguageModel, limit: int) -> bool:
    """Whether steps are recorded: a replayed step reads all slots, any other only those that are written. Blocks that are
    sharded become whole by what the processes agree upon, and experts are chosen anew in every step: no GPU can replay
    that."""
    routed = policy.structure.routed
    return policy.device.type == "cuda" and limit > WARM_UP + MIN_REPLAYS and policy.sharded is None and not routed


def _recorded(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph: recording runs nothing, every replay is one step.

    `step` itself where it cannot be recorded, for want of memory or because the model waits for a number of the GPU."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        return step
    return graph.replay
