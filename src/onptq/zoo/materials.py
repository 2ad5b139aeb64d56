"""What a model of the zoo is calibrated with and measured on where the user gives nothing else, drawn while a bar shows it."""

from __future__ import annotations

from onptq.data.prompts import Prompt
from onptq.evaluate.items import Item
from onptq.progress import Reporter
from onptq.recipe import DataConfig
from onptq.zoo.suite import items, prompts, tasks_of

ITEMS = 400  # of all tasks together: four arms answer them in about half a minute


def draw_prompts(family: str, data: DataConfig, reporter: Reporter) -> tuple[list[Prompt], list[Prompt]]:
    """Captions to calibrate with and captions held out, each from its own split, as many as `data` says."""
    with reporter.phase("Draw prompts", total=data.prompts + data.holdout, unit="prompts") as bar:
        calibration = prompts(family, "calibration", data.prompts)
        bar.advance(len(calibration))
        holdout = prompts(family, "held-out", data.holdout)
        bar.advance(len(holdout))
    return calibration, holdout


def draw_items(family: str, per_task: int | None, reporter: Reporter) -> list[Item]:
    """The first `per_task` test items of every task that the family can be given; None: ITEMS shared out among them."""
    tasks, drawn = tasks_of(family), []
    count = ITEMS // len(tasks) if per_task is None else per_task
    with reporter.phase("Draw items", total=len(tasks) * count, unit="items") as bar:
        for task in tasks:
            for item in items(family, task, "test", count):
                drawn.append(item)
                bar.advance()
    return drawn
