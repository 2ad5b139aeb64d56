"""Tasks: items to answer, and how an answer is graded."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError

Scoring = Literal["accuracy", "facts", "word errors"]


@dataclass(frozen=True)
class Grade:
    """`points` out of `total`: 1 of 1 for a right answer, right facts of those claimed, wrong words of those spoken."""

    points: float
    total: float = 1.0


class Scored(Protocol):
    """Of an item what statistics need: they are the same for items of other tools."""

    @property
    def id(self) -> str: ...

    @property
    def task(self) -> str: ...

    @property
    def measure(self) -> Scoring: ...


@dataclass(frozen=True)
class Item:
    """A prompt with the grader of its answers; a task's score is the points of its items over their totals."""

    id: str  # unique in its suite, e.g. choice/test/17: the identity that pairs the answers of two models
    task: str
    prompt: Prompt
    reference: str  # an answer that earns everything
    grade: Callable[[str], Grade]
    max_tokens: int
    measure: Scoring = "accuracy"
    kind: str = ""  # finer than the task, e.g. count

    @property
    def described(self) -> Prompt:
        """Its prompt under its own id, with the task, the reference answer and how answers are graded."""
        extra = {"task": self.task, "reference": self.reference, "measure": self.measure}
        return replace(self.prompt, id=self.id, extra=extra)


def exact(reference: str) -> Callable[[str], Grade]:
    """Right when equal but for case, spaces around it and a final full stop."""
    expected = _plain(reference)
    return lambda answer: Grade(float(_plain(answer) == expected))


def items_digest(items: Iterable[Item]) -> str:
    """SHA-256 over questions and expected answers, in order."""
    digest = hashlib.sha256()
    for item in items:
        fields = [item.id, item.task, manifest_digest([item.prompt]), item.reference, item.max_tokens, item.measure]
        digest.update(json.dumps(fields).encode() + b"\n")
    return digest.hexdigest()


def check_items(items: Sequence[Item]) -> None:
    """Refuse items without a unique id, by which answers are paired, and tasks that are scored in two ways."""
    if not items:
        raise OnPTQError("there are no items to evaluate; expected at least one")
    twice = [name for name, count in Counter(item.id for item in items).items() if count > 1]
    if twice:
        raise OnPTQError(f"{len(twice)} item ids are there more than once, e.g. {twice[0]!r}; expected unique ids")
    scoring: dict[str, str] = {}
    for item in items:
        if scoring.setdefault(item.task, item.measure) != item.measure:
            raise OnPTQError(
                f"item {item.id!r} of task {item.task!r} is measured by {item.measure}, others of that task by "
                f"{scoring[item.task]}; expected one measure per task"
            )


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").strip().casefold()
