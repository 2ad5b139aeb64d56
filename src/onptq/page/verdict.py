"""What became of the answers: in a sentence, and of graded ones as a table of who was right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onptq.evaluate.metrics import PROMPTS
from onptq.evaluate.statistics import Column, Interval, Measure, Part, Resampler
from onptq.page.contract import Answer, Cell, Change, Figure, Flips, Question, Response

Judged = Sequence[bool | None]
WORDS: Mapping[Change, tuple[str, str, str]] = {  # the gravest first
    "content": ("says", "say", "something else"),
    "clear": ("changes", "change", "clearly"),
    "reworded": ("parts", "part", "at a near tie"),
}


def verdict(responses: Sequence[Response | None], flips: Flips | None, resampler: Resampler) -> str:
    """Two sentences at most: on the answers to prompts, and on graded ones. Brackets are intervals of the counts."""
    sentences = []
    if known := [one for one in responses if one is not None]:
        sentences.append(_on_prompts(known, resampler))
    if flips is not None and (total := _total(flips)):
        wrong, right = _counted(flips.right_wrong, total), _counted(flips.wrong_right, total)
        sentences.append(f"Of {total} graded answers {wrong} turned wrong and {right} turned right.")
    return " ".join(sentences) or "Nothing was answered."


def _on_prompts(responses: Sequence[Response], resampler: Resampler) -> str:
    total = len(responses)

    def count(*changes: Change) -> str:
        counted = np.array([one.change in changes for one in responses])
        interval = resampler.estimate(Measure((Part(PROMPTS, counted.astype(np.float64), np.ones(total)),)))
        return f"{int(counted.sum())}{_bracket(interval, total, int(counted.sum()))}"

    changed = count("content", "clear", "reworded")
    if changed == "0":
        return f"All {total} answers are worded as before."
    counts = {change: count(change) for change in WORDS}
    there = [(number, *WORDS[change]) for change, number in counts.items() if number != "0"]
    parts = [f"{number} {_one(number, one, more)} {what}" for number, one, more, what in there]
    if len(there) == 1:
        [(number, one, more, what)] = there
        parts = [f"{_one(number, f'it {one}', f'all {more}')} {what}"]
    return f"Of {total} answers {changed} {_one(changed, 'is', 'are')} worded differently: {', '.join(parts)}."


def _one(count: str, one: str, more: str) -> str:
    """The verb behind a count."""
    return one if count.split()[0] == "1" else more


def flips_of(items: Sequence[Question], candidate: Sequence[Answer | None], resampler: Resampler) -> Flips | None:
    """The graded items by who was right; None where no answer is simply right or wrong. Tasks are resampled apart."""
    dense: Judged = [item.dense.right for item in items]
    other: Judged = [None if one is None else one.right for one in candidate]
    judged = [place for place, pair in enumerate(zip(dense, other, strict=True)) if None not in pair]
    if not judged:
        return None
    tasks = [items[place].task for place in judged]
    was, now = (np.array([bool(rights[place]) for place in judged]) for rights in (dense, other))

    def cell(holds: Column) -> Cell:
        interval = resampler.estimate(_share(holds, tasks))
        mine = [place for place, held in zip(judged, holds.tolist(), strict=True) if held]
        return Cell(len(mine), Figure(interval.value, interval.low, interval.high), mine)

    return Flips(cell(was & now), cell(was & ~now), cell(~was & now), cell(~was & ~now))


def _share(holds: Column, tasks: Sequence[str]) -> Measure:
    """The items of which something holds, in percent of all."""
    parts = []
    for task in dict.fromkeys(tasks):
        mine = holds[[one == task for one in tasks]].astype(np.float64)
        parts.append(Part(task, mine, np.ones(len(mine))))
    return Measure(tuple(parts), 100)


def _total(flips: Flips) -> int:
    return sum(cell.count for cell in (flips.right_right, flips.right_wrong, flips.wrong_right, flips.wrong_wrong))


def _counted(cell: Cell, total: int) -> str:
    percent = Interval(cell.percent.value, cell.percent.low, cell.percent.high)
    return f"{cell.count}{_bracket(percent, total / 100, cell.count)}"


def _bracket(interval: Interval, scale: float, count: int) -> str:
    """The interval of a count; of none there is none, as resampling never draws what was not seen."""
    if interval.low is None or interval.high is None or not count:
        return ""
    return f" [{round(interval.low * scale)}, {round(interval.high * scale)}]"
