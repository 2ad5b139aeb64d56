"""Scores per task, their average, and correctness flips against the dense model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onptq.errors import OnPTQError
from onptq.evaluate.answers import Answer
from onptq.evaluate.tasks import Scored, Scoring


@dataclass(frozen=True)
class TaskScore:
    """Points over totals: the share of right answers or right facts, or the word error rate, where less is better."""

    measure: Scoring
    items: int
    points: float
    total: float

    @property
    def percent(self) -> float | None:
        return 100 * self.points / self.total if self.total else None

    @property
    def less_is_better(self) -> bool:
        return self.measure == "word errors"


@dataclass(frozen=True)
class Flips:
    """Items whose correctness differs from the dense model's, of those that are either right or wrong."""

    items: int
    right_to_wrong: int
    wrong_to_right: int

    @property
    def percent(self) -> float | None:
        """Flip Rate: the sum of both transition rates, while the change of accuracy is their difference."""
        return 100 * (self.right_to_wrong + self.wrong_to_right) / self.items if self.items else None

    def __add__(self, other: Flips) -> Flips:
        return Flips(
            self.items + other.items,
            self.right_to_wrong + other.right_to_wrong,
            self.wrong_to_right + other.wrong_to_right,
        )


@dataclass(frozen=True)
class Scores:
    """One model on all tasks."""

    tasks: Mapping[str, TaskScore]

    @property
    def average(self) -> float | None:
        """Unweighted mean over the tasks where more is better."""
        percents = [score.percent for score in self.tasks.values() if not score.less_is_better]
        shares = [percent for percent in percents if percent is not None]
        return sum(shares) / len(shares) if shares else None

    def to_dict(self) -> dict[str, Any]:
        tasks = {name: {"percent": score.percent} | asdict(score) for name, score in self.tasks.items()}
        return {"average_percent": self.average, "tasks": tasks}


@dataclass(frozen=True)
class Change:
    """The differences of one model's answers from the dense model's, item by item."""

    flips: Mapping[str, Flips]  # by task, of the tasks whose answers are right or wrong
    changed: Mapping[str, float]  # by task, the share of answers with another text
    changed_in_all: float

    @property
    def total(self) -> Flips:
        return sum(self.flips.values(), Flips(0, 0, 0))

    def to_dict(self) -> dict[str, Any]:
        return {
            "flips": _flips(self.total) | {"tasks": {name: _flips(flips) for name, flips in self.flips.items()}},
            "changed_percent": 100 * self.changed_in_all,
            "changed_percent_tasks": {name: 100 * share for name, share in self.changed.items()},
        }


def score(items: Sequence[Scored], answers: Sequence[Answer]) -> Scores:
    tasks: dict[str, TaskScore] = {}
    for item, given in paired(items, answers):
        so_far = tasks.get(item.task, TaskScore(item.measure, 0, 0.0, 0.0))
        tasks[item.task] = TaskScore(
            item.measure, so_far.items + 1, so_far.points + given.points, so_far.total + given.total
        )
    return Scores(tasks)


def compare_answers(items: Sequence[Scored], dense: Sequence[Answer], quantized: Sequence[Answer]) -> Change:
    """Every answer paired by the item's identity with the dense model's."""
    flips: dict[str, Flips] = {}
    moved: dict[str, list[bool]] = {}
    pairs = zip(paired(items, dense), paired(items, quantized), strict=True)
    for (item, before), (_, after) in pairs:
        moved.setdefault(item.task, []).append(before.text != after.text)
        if item.measure == "accuracy":
            was, now = is_right(before), is_right(after)
            flips[item.task] = flips.get(item.task, Flips(0, 0, 0)) + Flips(
                1, int(was and not now), int(now and not was)
            )
    share = {task: sum(each) / len(each) for task, each in moved.items()}
    return Change(flips, share, sum(map(sum, moved.values())) / len(items))


def is_right(given: Answer) -> bool:
    return given.points == given.total


def _flips(flips: Flips) -> dict[str, Any]:
    return {"percent": flips.percent} | asdict(flips)


def paired(items: Sequence[Scored], answers: Sequence[Answer]) -> list[tuple[Scored, Answer]]:
    by_id = {given.item: given for given in answers}
    missing = [item.id for item in items if item.id not in by_id]
    if missing or len(by_id) != len(items):
        example = f", e.g. none to {missing[0]!r}" if missing else ""
        raise OnPTQError(f"{len(by_id)} answers to {len(items)} items{example}; expected one answer to each")
    return [(item, by_id[item.id]) for item in items]
