"""How well a dense model does on the embedded tasks and on real material."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onptq.evaluate.answers import Answer, Questions, answer
from onptq.evaluate.items import Item
from onptq.evaluate.scores import TaskScore, score
from onptq.models.loading import find_source
from onptq.models.processing import PromptProcessor
from onptq.policy import load_policy
from onptq.progress import QuietReporter, Reporter
from onptq.zoo.suite import items, tasks_of


@dataclass(frozen=True)
class Report:
    """Scores of a model by task, and by kind of question where a task has several."""

    tasks: dict[str, TaskScore]
    kinds: dict[str, dict[str, TaskScore]]
    notes: tuple[str, ...] = ()  # what could not be asked


def examine(
    model: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    count: int | None = None,
    split: str = "test",
    real: bool = False,
    reporter: Reporter | None = None,
) -> Report:
    """Ask a dense model `count` items of every task, or the whole test split; `real`: pictures and speech not drawn by us."""
    reporter = reporter or QuietReporter()
    source = find_source(model)
    family = source.family.name
    policy = load_policy(source, "W16A16")
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    groups = {task: list(items(family, task, split, count)) for task in ([] if real else tasks or tasks_of(family))}
    notes: tuple[str, ...] = ()
    if real:
        groups, notes = _real(family, count)
    scores, kinds = {}, {}
    for task, asked in groups.items():
        with reporter.phase(f"Encode {task}", total=len(asked), unit="items") as bar:
            questions = Questions(policy, processor, asked, advance=bar.advance)
        with reporter.phase(f"Answer {task}", total=len(asked), unit="items") as bar:
            given = answer(questions, "D", bar.advance)
        scores[task] = score(asked, given).tasks[task]
        kinds[task] = _by_kind(asked, given)
    return Report(scores, kinds, notes)


def _real(family: str, count: int | None) -> tuple[dict[str, list[Item]], tuple[str, ...]]:
    from onptq.zoo.real import real_items

    found, missing = real_items(family, count)
    groups: dict[str, list[Item]] = {}
    for item in found:
        groups.setdefault(item.task, []).append(item)
    return groups, tuple(missing)


def _by_kind(asked: Sequence[Item], given: Sequence[Answer]) -> dict[str, TaskScore]:
    by_id = {one.item: one for one in given}
    kinds: dict[str, list[Item]] = {}
    for item in asked:
        kinds.setdefault(item.kind, []).append(item)
    if len(kinds) < 2:
        return {}
    return {
        kind: score(some, [by_id[item.id] for item in some]).tasks[some[0].task] for kind, some in sorted(kinds.items())
    }
