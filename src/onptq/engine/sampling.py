"""Tokens drawn at random, so that neither the batch nor a restart changes what is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onptq.errors import OnPTQError
from onptq.models.encoding import PromptBatch


@dataclass(frozen=True)
class Sampling:
    """Sampling as a model's generation config has it, and the seed of its random numbers."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, settings: Mapping[str, Any], seed: int) -> Sampling:
        """The fields of a generation config; where one is missing, nothing is cut off."""
        given = {name: settings.get(name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
        for name, value in given.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
                raise OnPTQError(f"generation_config.json: {name} is {value!r}; expected a number of at least 0")
        if given["repetition_penalty"] == 0:
            raise OnPTQError("generation_config.json: repetition_penalty is 0; expected a number above 0")
        return cls(**{name: value for name, value in given.items() if value is not None}, seed=seed)

    def numbers(self, batch: PromptBatch, count: int) -> Tensor:
        """`count` numbers from 0 to 1 for every prompt, [B, count]; they depend on its ordinal and the seed alone."""
        rows = [np.random.default_rng((self.seed, prompt.ordinal)).random(count) for prompt in batch.prompts]
        return torch.from_numpy(np.stack(rows)).to(batch.embeds.device, torch.float32)

    def said(self, batch: PromptBatch, vocabulary: int) -> Tensor | None:
        """Which tokens each prompt holds, [B, V] bool; None where repetition costs nothing."""
        if self.repetition_penalty == 1:
            return None
        said = torch.zeros(len(batch.prompts), vocabulary, dtype=torch.bool, device=batch.embeds.device)
        for row, prompt in zip(said, batch.prompts, strict=True):
            row[prompt.ids.to(row.device)] = True
        return said

    def penalized(self, logits: Tensor, said: Tensor) -> Tensor:
        """The logits [B, V], those of tokens that prompt or response hold divided by the penalty, or multiplied if negative."""
        logits, penalty = logits.float(), self.repetition_penalty
        return torch.where(said, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def draw(self, logits: Tensor, number: Tensor) -> Tensor:
        """A token of each row, [B], from logits [B, V] and a number from 0 to 1 for each row.

        As transformers does it: of the `top_k` likeliest tokens the fewest whose probabilities add up to `top_p`. The number
        says how far to go through those, likeliest first.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        size = min(self.top_k or logits.shape[-1], logits.shape[-1])
        best, tokens = logits.float().topk(size, dim=-1)
        share = (best / self.temperature).softmax(-1)
        before = share.cumsum(-1) - share
        reached = share.masked_fill(before >= self.top_p, 0).cumsum(-1)
        place = (reached <= number[:, None] * reached[:, -1:]).sum(-1, keepdim=True).clamp(max=size - 1)
        return tokens.gather(1, place)[:, 0]
