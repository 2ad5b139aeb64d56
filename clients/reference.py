"""The same prompts and tokens in transformers, and the server's differences from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from questions import Question, Reply, ScoredTokens
from server import ServerError
from torch import Tensor

from onptq.check.trial import teacher_forced
from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import Source, open_checkpoint
from onptq.models.processing import ModelInputs, PromptProcessor

MEDIA_INPUTS = ("pixel_values", "input_features")


@dataclass(frozen=True)
class Compared:
    """A question, its answer, and the server's differences from transformers at its tokens."""

    kind: str
    expected: str
    answer: str
    states: int
    difference: float  # the largest between two log-probabilities of the same token
    blank_difference: float | None  # the same with a blank image or silence in transformers; None for text
    agreement: float  # share of states with the same most likely token


class Reference:
    """A checkpoint in transformers, in float32 whatever the server computes in."""

    def __init__(self, folder: Path) -> None:
        self.source: Source = open_checkpoint(str(folder))
        self.processor = PromptProcessor.from_folder(folder, self.source.family, self.source.config)
        self.model: Any = load_model(self.source, torch.float32)

    def compare(self, question: Question, reply: Reply) -> Compared:
        inputs = self.processor(question.prompt)
        if tuple(inputs.input_ids[0].tolist()) != reply.free.prompt:
            raise ServerError(
                f"the server's prompt of the {question.kind} question has other tokens than transformers'"
            )
        scored = (reply.free, reply.forced)
        logprobs = [self._logprobs(inputs, one) for one in scored]
        blank_difference = None
        if any(name in inputs.tensors for name in MEDIA_INPUTS):
            blank_difference = largest_difference(scored, [self._logprobs(blank(inputs), one) for one in scored])
        return Compared(
            question.kind,
            question.expected,
            reply.answer,
            sum(len(one.tokens) for one in scored),
            largest_difference(scored, logprobs),
            blank_difference,
            same_choices(scored, logprobs),
        )

    def _logprobs(self, inputs: ModelInputs, scored: ScoredTokens) -> Tensor:
        """Log-probabilities [tokens, V] at the states that predict the tokens."""
        logits = teacher_forced(self.model, inputs, scored.tokens)
        return logits[-len(scored.tokens) - 1 : -1].float().log_softmax(-1)


def blank(inputs: ModelInputs) -> ModelInputs:
    hidden = {name: torch.zeros_like(inputs.tensors[name]) for name in MEDIA_INPUTS if name in inputs.tensors}
    return replace(inputs, tensors={**inputs.tensors, **hidden})


def largest_difference(scored: Sequence[ScoredTokens], logprobs: Sequence[Tensor]) -> float:
    """The largest difference of a log-probability; infinite where any is not finite."""
    worst = 0.0
    for one, rows in zip(scored, logprobs, strict=True):
        own = rows.gather(-1, torch.tensor(one.tokens)[:, None])[:, 0].double()
        difference = (own - torch.tensor(one.logprobs, dtype=torch.float64)).abs()
        worst = max(worst, difference.nan_to_num(nan=float("inf")).max().item())
    return worst


def same_choices(scored: Sequence[ScoredTokens], logprobs: Sequence[Tensor]) -> float:
    same = [rows.argmax(-1) == torch.tensor(one.choices) for one, rows in zip(scored, logprobs, strict=True)]
    return torch.cat(same).double().mean().item()
