"""Score a dense model on the embedded tasks, or on real material: `python -m tools.zoo.exam MODEL`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.errors import OnPTQError
from onptq.evaluate.answers import Answer, EncodedItems, answer
from onptq.evaluate.scores import TaskScore, score
from onptq.evaluate.tasks import Item
from onptq.models.processing import PromptProcessor
from onptq.progress import QuietReporter, Reporter, RichReporter
from onptq.zoo.splits import SPLITS
from onptq.zoo.suite import items, tasks_of
from tools.zoo.commands import run_command
from tools.zoo.real import real_items
from tools.zoo.train.card import add_scores


@dataclass(frozen=True)
class Report:
    """Scores of a model by task, and by kind of question where a task has several."""

    tasks: dict[str, TaskScore]
    kinds: dict[str, dict[str, TaskScore]]
    notes: tuple[str, ...] = ()  # about absent material


def examine(
    model: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    count: int | None = None,
    split: str = "test",
    real: bool = False,
    reporter: Reporter | None = None,
) -> Report:
    """Score a dense model on `count` items of every task, or the whole split; with `real`, on real images and
    speech."""
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
    for task, group in groups.items():
        with reporter.phase(f"Encode {task}", total=len(group), unit="items") as bar:
            questions = EncodedItems(policy, processor, group, advance=bar.advance)
        with reporter.phase(f"Answer {task}", total=len(group), unit="items") as bar:
            given = answer(questions, "D", bar.advance)
        scores[task] = score(group, given).tasks[task]
        kinds[task] = _by_kind(group, given)
    return Report(scores, kinds, notes)


def _real(family: str, count: int | None) -> tuple[dict[str, list[Item]], tuple[str, ...]]:
    material, missing = real_items(family, count)
    groups: dict[str, list[Item]] = {}
    for item in material:
        groups.setdefault(item.task, []).append(item)
    return groups, tuple(missing)


def _by_kind(items: Sequence[Item], given: Sequence[Answer]) -> dict[str, TaskScore]:
    by_id = {one.item: one for one in given}
    kinds: dict[str, list[Item]] = {}
    for item in items:
        kinds.setdefault(item.kind, []).append(item)
    if len(kinds) < 2:
        return {}
    return {
        kind: score(some, [by_id[item.id] for item in some]).tasks[some[0].task] for kind, some in sorted(kinds.items())
    }


def main(
    model: Annotated[str, typer.Argument(help="A name that `onptq zoo list` shows, or the folder of such a model.")],
    tasks: Annotated[list[str] | None, typer.Option("--task", help="Only this task; repeatable.")] = None,
    count: Annotated[
        int | None, typer.Option("--items", min=1, help="Items per task; the whole split unless given.")
    ] = None,
    split: Annotated[str, typer.Option(help=f"{', '.join(SPLITS[:-1])} or {SPLITS[-1]}.")] = "test",
    real: Annotated[
        bool, typer.Option("--real", help="Score on recorded speech and described images instead, if installed.")
    ] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Write the scores into the model card of the folder MODEL.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Score the dense MODEL on the embedded tasks."""
    if card and not Path(model).is_dir():
        raise OnPTQError(f"--card: {model!r} is not a folder; expected the folder of a trained model")
    reporter = QuietReporter() if as_json else RichReporter()
    report = examine(model, tasks=tasks, count=count, split=split, real=real, reporter=reporter)
    for note in report.notes:
        typer.echo(note, err=True)
    if card:
        add_scores(Path(model), report.tasks)
    if as_json:
        typer.echo(
            json.dumps({task: {"percent": result.percent} | asdict(result) for task, result in report.tasks.items()})
        )
    else:
        _print_report(report)


def _print_report(report: Report) -> None:
    table = Table("task", "measure", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("items", "%"):
        table.add_column(column, justify="right")
    for task, result in report.tasks.items():
        table.add_row(task, result.measure, str(result.items), f"{result.percent:.1f}")
        for kind, part in report.kinds[task].items():
            table.add_row(f"  {kind}", "", str(part.items), f"{part.percent:.1f}", style="dim")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    run_command(main)
