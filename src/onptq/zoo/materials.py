"""Prompts and items for models of the zoo, drawn while a bar shows it; items of registered tasks for any model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.tasks import Item
from onptq.progress import Reporter
from onptq.recipe import DataConfig
from onptq.registry import FAMILIES, TASKS
from onptq.zoo import suite
from onptq.zoo.instructions import instructions

NO_TASKS = "none"
ITEMS = 400  # of all tasks together: four models answer them in about half a minute
WHOLE_SPLIT = 0  # items per task: as many as the task's test split has


def draw_calibration(
    family: str, data: DataConfig, reporter: Reporter, kind: str = "mix"
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to calibrate with and prompts held out, each from its own split, as many as `data` says."""
    with reporter.phase("Draw prompts", total=data.prompts + data.holdout, unit="prompts") as bar:
        calibration = _prompts(family, "calibration", data.prompts, kind)
        bar.advance(len(calibration))
        holdout = _prompts(family, "held-out", data.holdout, kind)
        bar.advance(len(holdout))
    return calibration, holdout


def draw_prompts(
    family: str, split: str, count: int, reporter: Reporter, first: int = 0, kind: str = "mix"
) -> list[Prompt]:
    """Prompts on which behaviour is compared; none where nothing is embedded for the family."""
    if not count or not has_prompts(family):
        return []
    with reporter.phase("Draw prompts", total=count, unit="prompts") as bar:
        drawn = _prompts(family, split, first + count, kind)[first:]
        bar.advance(count)
    return drawn


def has_prompts(family: str) -> bool:
    """Whether prompts are embedded for a family: scenes and speech, or written instructions."""
    return family in suite.SIDES or (family in FAMILIES and FAMILIES[family].modalities == {"text"})


def _prompts(family: str, split: str, count: int, kind: str) -> list[Prompt]:
    return suite.prompts(family, split, count, kind) if family in suite.SIDES else instructions(split, count)


def draw_items(family: str, tasks: str | None, per_task: int | None, split: str, reporter: Reporter) -> list[Item]:
    """`per_task` items of every task; None shares out ITEMS among them.

    `tasks` are names with commas between them, `none`, or None for all embedded ones that the family can be given.
    """
    if tasks == NO_TASKS or (tasks is None and family not in suite.SIDES):
        return []
    embedded = suite.tasks_of(family) if family in suite.SIDES else []
    chosen = embedded if tasks is None else list(dict.fromkeys(task.strip() for task in tasks.split(",")))
    valid = [*embedded, *TASKS]
    for task in chosen:
        if task not in valid:
            names = ", ".join(valid)
            raise OnPTQError(f"--tasks: unknown task {task!r} for {family}; expected {NO_TASKS}, or of {names}")
    share = max(1, ITEMS // len(chosen)) if per_task is None else per_task
    counts = {
        task: suite.TASKS[task].test_items if share == WHOLE_SPLIT and task in embedded else share for task in chosen
    }
    drawn = []
    with reporter.phase("Draw items", total=sum(counts.values()), unit="items") as bar:
        for task, count in counts.items():
            for item in _items(family, task, split, count, embedded):
                drawn.append(item)
                bar.advance()
    return drawn


def _items(family: str, task: str, split: str, count: int, embedded: list[str]) -> Iterable[Item]:
    if task in embedded:
        return suite.items(family, task, split, count)
    return islice(TASKS[task](family, split, count), count or None)
