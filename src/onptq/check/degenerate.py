"""A quantized model whose answers have come apart is noticed before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from onptq.bank import Trajectory
from onptq.check.trial import Answer, endless
from onptq.errors import OnPTQError

ON_DEGENERATE = ("fail", "warn")
FAULTY = 0.5  # share of the answers above which a model is not written
ADVICE = (
    "More bits or smaller groups (--scheme), another --init, or --set calibrate.keep=best with held-out prompts may help; "
    "--on-degenerate warn writes the checkpoint all the same"
)


class Case(NamedTuple):
    """One prompt under both models: what is wrong with their answers, if anything."""

    name: str
    dense: str | None
    quantized: str | None


def check_on_degenerate(value: str) -> None:
    if value not in ON_DEGENERATE:
        raise OnPTQError(f"--on-degenerate is {value!r}; expected {' or '.join(ON_DEGENERATE)}")


def of_questions(dense: Sequence[Answer], quantized: Sequence[Answer]) -> Iterator[Case]:
    """The built-in questions. Logits that are not finite are an error at once, unless the dense model's are not either."""
    for theirs, ours in zip(dense, quantized, strict=True):
        if theirs.finite and not ours.finite:
            raise OnPTQError(f"the quantized model gives {ours.fault} to the question about {ours.modality}. {ADVICE}")
        yield Case(f"the question about {ours.modality}", theirs.fault, ours.fault)


def of_held_out(dense: Sequence[Trajectory], quantized: Sequence[Trajectory], eos: Collection[int]) -> Iterator[Case]:
    """The responses to held-out prompts."""
    theirs = {one.prompt: one.tokens for one in dense}
    for one in quantized:
        yield Case(f"held-out prompt {one.prompt}", _fault(theirs[one.prompt], eos), _fault(one.tokens, eos))


def degenerate(cases: Sequence[Case]) -> str | None:
    """What is wrong with a model most of whose answers are faulty where the dense model's are not; None of any other."""
    sound = [case for case in cases if case.dense is None]
    faulty = [case for case in sound if case.quantized is not None]
    if len(faulty) <= FAULTY * len(sound):
        return None
    name, _, fault = faulty[0]
    return (
        f"{len(faulty)} of {len(sound)} answers are broken where the dense model's are not; to {name} the quantized model "
        f"gives {fault}"
    )


def _fault(tokens: Sequence[int], eos: Collection[int]) -> str | None:
    """What is wrong with a response, whose last token may be the one that ended it."""
    said = [token for token in tokens if token not in eos]
    if not said:
        return "an empty answer"
    return f"one token over and over, of id {said[-1]}" if endless(said) else None
