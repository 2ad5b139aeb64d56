"""Prefilled prompts, cached between the steps of a round.

Prompts are split into the same batches in every step and every process, so a prefix that was dropped and computed again
is bit for bit the old one. Only a batch that does not fit into memory is split anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from onptq.engine.budget import BatchBudget, give_back_memory
from onptq.engine.prompts import EncodedPrompts
from onptq.errors import OnPTQError
from onptq.models.decoder import KVCache, Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.language_model import LanguageModel, Side
from onptq.ranks import ALONE, Ranks

T = TypeVar("T")


class _Key(NamedTuple):
    batch: int
    side: Side
    generation: tuple[int, int] | None  # of Q; None for D, which never changes


@dataclass
class Prefix:
    """The prompts of one batch under one side: keys and values, and the residual stream that predicts y_1."""

    cache: KVCache
    last: Tensor  # [B, d]
    response: Tensor | None = None  # [B, T] the response tokens whose keys follow the prompt's in the cache

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.last.nbytes


class Batches(Sequence[PromptBatch]):
    """Prompts of like length together, at most `batch_tokens` padded slots a batch. A batch is put together on
    access, and only the last one is cached."""

    def __init__(self, prompts: EncodedPrompts, batch_tokens: int, max_tokens: int) -> None:
        self._prompts, self._max_tokens = prompts, max_tokens
        self._order = list(zip(prompts.lengths, prompts.origins, prompts.ordinals, strict=True))  # copies side by side
        self._places = self._partition(range(len(prompts)), batch_tokens)
        self._last: tuple[int, PromptBatch] | None = None

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> PromptBatch:  # type: ignore[override]
        if self._last is None or self._last[0] != index:
            self._last = None  # its memory is free before the next one is put together
            self._last = index, PromptBatch.of(self._prompts.together(self._places[index]))
        return self._last[1]

    @property
    def sizes(self) -> list[int]:
        """The number of prompts of every batch."""
        return [len(places) for places in self._places]

    def split(self, index: int, batch_tokens: int) -> None:
        """Put the prompts from batch `index` on into batches of another size."""
        places = [place for places in self._places[index:] for place in places]
        self._places[index:] = self._partition(places, batch_tokens)
        self._last = None

    def _partition(self, places: Iterable[int], batch_tokens: int) -> list[list[int]]:
        groups: list[list[int]] = []
        for place in sorted(places, key=self._order.__getitem__):
            if groups and (len(groups[-1]) + 1) * (self._order[place][0] + self._max_tokens) <= batch_tokens:
                groups[-1].append(place)
            else:
                groups.append([place])
        return groups


class Prefixes:
    """Batches of prompts and their prefixes under D (cached for the whole run) and Q (cached until Q changes)."""

    def __init__(
        self,
        policy: LanguageModel,
        prompts: Sequence[EncodedPrompt],
        *,
        max_tokens: int,
        batch_tokens: int | BatchBudget = 16384,
        budget: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.policy, self.max_tokens, self.budget, self.ranks = policy, max_tokens, budget, ranks
        self.batch_budget = (
            batch_tokens if isinstance(batch_tokens, BatchBudget) else BatchBudget(batch_tokens, "tokens")
        )
        self.prompts = EncodedPrompts.of(prompts)
        self.batches = Batches(self.prompts, self.batch_budget.size, max_tokens)
        self._cached: dict[_Key, Prefix] = {}

    def map_batches(self, work: Callable[[int], T], *others: Prefixes) -> Iterator[T]:
        """`work(index)` of every batch. Each rank takes one of the next batches, and all ranks get all results, which are
        plain data where there are several.

        A batch that does not fit into memory is split, with all after it and, in the same way, those of `others`."""
        index = 0
        while index < len(self.batches):
            mine, results, fits = index + self.ranks.rank, [], True
            try:
                if mine < len(self.batches):
                    results = [work(mine)]
            except torch.OutOfMemoryError:
                fits = False
            gathered = self.ranks.gather((fits, results))
            results = []
            too_large = [index + rank for rank, (fitted, _) in enumerate(gathered) if not fitted]
            if not too_large:
                for _, each in gathered:
                    yield from each
                index += self.ranks.size
            else:
                self._shrink(too_large[0])
                for prefixes in (self, *others):
                    prefixes._split(index, self.batch_budget.size)
                give_back_memory()

    def batch_like(self, other: Prefixes) -> None:
        """Bring both, which hold the same prompts, into the same batches, also where either had to be split."""
        if self.batches.sizes != other.batches.sizes:
            for prefixes in (self, other):
                prefixes._split(0, min(self.batch_budget.size, other.batch_budget.size))

    def _shrink(self, index: int) -> None:
        batch = self.batches[index]
        if len(batch.prompts) > 1:
            if len(batch.prompts) * (batch.width + self.max_tokens) <= self.batch_budget.size:
                self.batch_budget.halve()  # else it was halved already
        elif self.budget != 0:
            self.budget = 0  # alone it may fit where nothing else is cached
        else:
            raise OnPTQError(
                f"a prompt of {batch.width} tokens and a response of {self.max_tokens} do not fit into memory even "
                "alone; expected a shorter prompt, smaller images, a shorter response or a device with more memory"
            )

    def _split(self, index: int, batch_tokens: int) -> None:
        self._cached.clear()
        self.batches.split(index, batch_tokens)

    def forget(self, side: Side) -> None:
        """Free the memory of one side's prefixes.

        Results do not depend on it: prefixes of an earlier Q are never used."""
        self._cached = {key: prefix for key, prefix in self._cached.items() if key.side != side}

    def _key(self, index: int, side: Side) -> _Key:
        return _Key(index, side, self.policy.generation if side == "Q" else None)

    def _evict_stale(self) -> None:
        current = self.policy.generation
        self._cached = {key: prefix for key, prefix in self._cached.items() if key.generation in (None, current)}

    @torch.no_grad()
    def prompt(self, index: int, side: Side) -> Prefix:
        """The batch's prompts in the cache, ready for response token 1."""
        key = self._key(index, side)
        prefix = self._cached.get(key)
        if prefix is None:
            self._evict_stale()
            prefix = self._prefill(self.batches[index], side)
            cached = sum(other.nbytes for other in self._cached.values())
            if self.budget is None or cached + prefix.nbytes <= self.budget:
                self._cached[key] = prefix
        prefix.cache.rewind(self.batches[index].width)
        prefix.response = None
        return prefix

    @torch.no_grad()
    def teacher_force(self, index: int, side: Side, response: Tensor) -> tuple[Prefix, Tensor]:
        """The residual stream [B, T, d] that predicts each token of `response` [B, T], by one teacher-forced forward.

        Leaves tokens 1..T-1 in the cache: no state's prefix holds y_T.
        """
        prefix, batch = self.prompt(index, side), self.batches[index]
        count = response.shape[1] - 1
        hidden = prefix.last[:, None]
        if count:
            real = torch.cat((batch.real, batch.real.new_ones(len(batch.prompts), count)), dim=1)
            tokens = Tokens(
                self.policy.embed(response[:, :count]), batch.response_positions(count), causal_mask(real, batch.width)
            )
            with self.policy.speaking(side):
                hidden = torch.cat((hidden, self.policy.run(tokens, prefix.cache)), dim=1)
        prefix.response = response
        return prefix, hidden

    def at_response(self, index: int, side: Side, response: Tensor) -> Prefix:
        """The prefix with `response` in its cache; computed only if it is not what the cache holds already."""
        prefix = self._cached.get(self._key(index, side))
        if prefix is not None and prefix.response is not None and torch.equal(prefix.response, response):
            return prefix
        return self.teacher_force(index, side, response)[0]

    def _prefill(self, batch: PromptBatch, side: Side) -> Prefix:
        """Copies of a prompt share its tensors and stand side by side: one of them goes through the model for all."""
        prompts: list[EncodedPrompt] = []
        rows: list[int] = []
        for prompt in batch.prompts:
            if not prompts or prompt.embeds is not prompts[-1].embeds:
                prompts.append(prompt)
            rows.append(len(prompts) - 1)
        single = batch if len(prompts) == len(rows) else PromptBatch.of(prompts)
        cache = self.policy.cache(len(prompts), batch.width + self.max_tokens)
        with self.policy.speaking(side):
            if self.policy.structure.recurrent:
                last = self._prefill_by_length(prompts, cache)
            else:
                hidden = self.policy.run(whole_prompts(single), cache)
                ends = torch.tensor([prompt.length - 1 for prompt in prompts], device=hidden.device)
                last = hidden[torch.arange(len(ends), device=hidden.device), ends].clone()
        if single is not batch:
            copies = torch.tensor(rows, device=last.device)
            cache.take(copies)
            last = last[copies]
        cache.remember()
        return Prefix(cache, last)

    def _prefill_by_length(self, prompts: Sequence[EncodedPrompt], cache: KVCache) -> Tensor:
        """The last rows of the residual stream. Prompts of one length at a time: padding would change a block's state."""
        last = prompts[0].embeds.new_empty(len(prompts), self.policy.structure.width)
        by_length: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            by_length.setdefault(prompt.length, []).append(row)
        for length, rows in by_length.items():
            part, at = self.policy.cache(len(rows), length), torch.tensor(rows, device=last.device)
            last[at] = self.policy.run(whole_prompts(PromptBatch.of([prompts[row] for row in rows])), part)[:, -1]
            cache.put(at, part)
        cache.advance(max(by_length))
        return last


def whole_prompts(batch: PromptBatch) -> Tokens:
    """The input of the decoder for whole prompts."""
    return Tokens(batch.embeds, batch.positions, prompt_mask(batch.real), batch.deepstack, batch.runs)


def prompt_mask(real: Tensor) -> Tensor | None:
    """The mask of whole prompts. None on a GPU, where plain causal attention is faster: padding is on the right, so no
    token sees any."""
    return None if real.is_cuda else causal_mask(real, 0)


def causal_mask(real: Tensor, first: int) -> Tensor:
    """[B, 1, S, K]: queries are the slots from `first` on, keys are all slots; causal, and only real keys."""
    slots = torch.arange(real.shape[1], device=real.device)
    return (slots[first:, None] >= slots)[None, None] & real[:, None, None, :]
