"""The same tokens and the same picture in transformers, and how far the server is from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from questions import Heard, Question, Reply
from server import ServerError
from torch import Tensor

from onptq.check.reload import load
from onptq.check.trial import teacher_forced
from onptq.checkpoint.load import open_checkpoint
from onptq.checkpoint.source import Source
from onptq.models.processing import ModelInputs, PromptProcessor

SENSES = ("pixel_values", "input_features")


@dataclass(frozen=True)
class Compared:
    """A question, its answer, and the server against transformers at every token of it."""

    kind: str
    expected: str
    answer: str
    states: int
    difference: float  # the largest between two logprobs of the same token
    blind: float | None  # the same, had transformers been given a blank picture or silence; None for text
    agreement: float  # share of states with the same most likely token


class Reference:
    """A checkpoint in transformers, in float32 whatever the server computes in: of two roundings, one is enough."""

    def __init__(self, folder: Path) -> None:
        self.source: Source = open_checkpoint(str(folder))
        self.processor = PromptProcessor.from_folder(folder, self.source.family, self.source.config)
        self.model: Any = load(folder, self.source.family, torch.float32, "cpu", strict=False)

    def compare(self, question: Question, reply: Reply) -> Compared:
        inputs = self.processor(question.prompt)
        if tuple(inputs.input_ids[0].tolist()) != reply.free.prompt:
            raise ServerError(
                f"the server's prompt of the {question.kind} question has other tokens than transformers'"
            )
        heard = (reply.free, reply.forced)
        seen = [self._logprobs(inputs, one) for one in heard]
        blind = None
        if any(name in inputs.tensors for name in SENSES):
            blind = largest_difference(heard, [self._logprobs(blank(inputs), one) for one in heard])
        return Compared(
            question.kind,
            question.expected,
            reply.answer,
            sum(len(one.tokens) for one in heard),
            largest_difference(heard, seen),
            blind,
            same_choices(heard, seen),
        )

    def _logprobs(self, inputs: ModelInputs, heard: Heard) -> Tensor:
        """Log-probabilities [tokens, V] at the states that predict the tokens."""
        logits = teacher_forced(self.model, inputs, heard.tokens)
        return logits[-len(heard.tokens) - 1 : -1].float().log_softmax(-1)


def blank(inputs: ModelInputs) -> ModelInputs:
    hidden = {name: torch.zeros_like(inputs.tensors[name]) for name in SENSES if name in inputs.tensors}
    return replace(inputs, tensors={**inputs.tensors, **hidden})


def largest_difference(heard: Sequence[Heard], logprobs: Sequence[Tensor]) -> float:
    """Infinite where anything is not finite."""
    worst = 0.0
    for one, rows in zip(heard, logprobs, strict=True):
        own = rows.gather(-1, torch.tensor(one.tokens)[:, None])[:, 0].double()
        difference = (own - torch.tensor(one.logprobs, dtype=torch.float64)).abs()
        worst = max(worst, difference.nan_to_num(nan=float("inf")).max().item())
    return worst


def same_choices(heard: Sequence[Heard], logprobs: Sequence[Tensor]) -> float:
    same = [rows.argmax(-1) == torch.tensor(one.choices) for one, rows in zip(heard, logprobs, strict=True)]
    return torch.cat(same).double().mean().item()
