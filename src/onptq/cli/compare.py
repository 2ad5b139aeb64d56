"""`onptq compare`: a dense model and its quantized candidates, on the same items and prompts, with paired statistics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onptq.cli.quantize import NAMED, ZOO, make_reporter, resolve_recipe, use_one_thread
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.data.prompts import Prompt
    from onptq.evaluate.candidates import Candidate
    from onptq.evaluate.items import Item
    from onptq.evaluate.report import ReportTable
    from onptq.progress import Reporter
    from onptq.recipe import DataConfig

PROMPTS = 64
NO_TASKS = "none"
SPLITS = ("test", "held-out")


def compare(
    dense: Annotated[str, typer.Argument(help="The dense model: a folder, a hub id, or a name of `onptq zoo list`.")],
    candidates: Annotated[
        list[str],
        typer.Argument(
            metavar="CANDIDATE...",
            help="Checkpoint folders that transformers loads, whoever made them (NAME=FOLDER names one), or METHOD:SCHEME "
            "to be built here, e.g. rtn:W4A8, search:W4A6, onptq:W4A8@paper with a preset of its own.",
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(help="Embedded tasks, e.g. choice,read; or none.", show_default="all that the model can be given"),
    ] = None,
    items: Annotated[
        int | None, typer.Option(min=1, help="Items per task.", show_default="400 in all, e.g. 100 of 4 tasks")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=0, help="Prompts on which behaviour is compared, state by state; 0 for none.")
    ] = PROMPTS,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results, item by item; candidates that are in it already are not run again.",
            show_default="the model's name, e.g. qwen2.5-vl-compared",
        ),
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="Manifest of the prompts to compare behaviour on, instead of embedded ones.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Manifest of prompts to build candidates with; models of the zoo bring their own."),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Where embedded items and prompts come from: test, or held-out while you tune.")
    ] = SPLITS[0],
    preset: Annotated[
        str | None,
        typer.Option(
            help="Preset of the candidates built here: light, default, best, paper or zoo.",
            show_default="zoo for models of the zoo, else default",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Change any field of the recipe they are built by; repeatable."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling, and of what is built.")] = 0,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print progress and the report as JSON lines.")] = False,
) -> None:
    """Compare CANDIDATEs with DENSE and with each other. Killed at any moment, the same command continues."""
    if split not in SPLITS:
        raise OnPTQError(f"--split {split}: expected one of {', '.join(SPLITS)}")
    reporter = make_reporter(quiet, json)
    of_the_zoo = dense.startswith(ZOO)
    if of_the_zoo:
        use_one_thread()
    options = {"seed": seed, "compute.device": device}
    recipe = resolve_recipe(preset or ("zoo" if of_the_zoo else None), None, options, changes or [])

    from onptq.evaluate import comparison
    from onptq.evaluate.candidates import parse_candidates
    from onptq.models.loading import find_source

    parsed = parse_candidates(candidates, recipe, changes or [])
    family = find_source(dense).family.name
    data = _largest_data(parsed, recipe.data)
    known, held_out = _calibration(family, calibration, data, of_the_zoo, parsed, reporter)
    report = comparison.compare(
        dense,
        parsed,
        default_out(dense) if out is None else out,
        items=_items(family, tasks, items, split, reporter),
        prompts=_prompts(family, manifest, prompts, split, data.holdout, reporter),
        calibration=known,
        holdout=held_out,
        recipe=recipe,
        reporter=reporter,
    )
    if json:
        reporter.result(report)
    elif not quiet:
        print_report(report)


def default_out(dense: str) -> Path:
    name = dense.split(":", 1)[1] if dense.startswith(NAMED) else Path(dense).resolve().name
    return Path(f"{name}-compared")


def print_report(report: Mapping[str, Any]) -> None:
    from rich.console import Console

    from onptq.evaluate.report import notes, sentences, tables

    console = Console(highlight=False)
    for one in tables(report):
        table = _rendered(one)
        widest = console.measure(table, options=console.options.update(width=1000)).maximum
        if not console.is_terminal:  # a file has no width, and must not lose digits to a guessed one
            console.width = max(console.width, widest)
        elif widest > console.width:
            table = _rendered(one, stacked=True)
        console.print()
        console.print(table)
        console.print(one.note, style="dim", markup=False)
    console.print()
    for sentence in sentences(report):
        console.print(f"- {sentence}", markup=False)
    console.print()
    for note in notes(report):
        console.print(note, style="dim", markup=False)


def _rendered(table: ReportTable, stacked: bool = False) -> Any:
    """With every interval behind its value or, where that is too wide, below it."""
    from rich.table import Table
    from rich.text import Text

    rendered = Table(title=table.title, title_justify="left", title_style="bold", box=None, header_style="bold")
    for number, column in enumerate(table.header):
        rendered.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in table.rows:
        rendered.add_row(*(Text(cell.replace(" [", "\n[") if stacked else cell) for cell in row))
    return rendered


def _items(family: str, tasks: str | None, per_task: int | None, split: str, reporter: Reporter) -> list[Item]:
    from onptq.zoo.materials import ITEMS
    from onptq.zoo.suite import SIDES, items, tasks_of

    if tasks == NO_TASKS or (tasks is None and family not in SIDES):
        return []
    known = tasks_of(family)
    chosen = known if tasks is None else list(dict.fromkeys(task.strip() for task in tasks.split(",")))
    for task in chosen:
        if task not in known:
            raise OnPTQError(
                f"--tasks: unknown task {task!r} for {family}; expected {NO_TASKS}, or of {', '.join(known)}"
            )
    count = max(1, ITEMS // len(chosen)) if per_task is None else per_task
    drawn = []
    with reporter.phase("Draw items", total=len(chosen) * count, unit="items") as bar:
        for task in chosen:
            for item in items(family, task, split, count):
                drawn.append(item)
                bar.advance()
    return drawn


def _prompts(
    family: str, manifest: Path | None, count: int, split: str, spent: int, reporter: Reporter
) -> list[Prompt]:
    """`spent` held-out prompts choose the best iterate of what is built, so they cannot judge it."""
    if manifest is not None:
        from onptq.data.manifest import load_manifest

        return load_manifest(manifest, limit=count)
    from onptq.zoo.suite import SIDES, prompts

    if not count or family not in SIDES:
        return []
    first = spent if split == "held-out" else 0
    with reporter.phase("Draw prompts", total=count, unit="prompts") as bar:
        drawn = prompts(family, split, first + count)[first:]
        bar.advance(count)
    return drawn


def _calibration(
    family: str,
    manifest: Path | None,
    data: DataConfig,
    of_the_zoo: bool,
    candidates: list[Candidate],
    reporter: Reporter,
) -> tuple[list[Prompt], list[Prompt]]:
    """As many prompts as the most demanding candidate wants, and those that choose its best iterate."""
    from onptq.evaluate.candidates import Built

    if not any(isinstance(one, Built) and one.method != "rtn" for one in candidates):
        return [], []
    if manifest is not None:
        from onptq.data.manifest import load_manifest
        from onptq.data.manifest import split as divide

        return divide(load_manifest(manifest), prompts=data.prompts, holdout=data.holdout, share=data.holdout_share)
    if not of_the_zoo:
        raise OnPTQError("candidates that are built here need --calibration PROMPTS, a .jsonl or .parquet manifest")
    from onptq.zoo.materials import draw_prompts

    return draw_prompts(family, data, reporter)


def _largest_data(candidates: list[Candidate], base: DataConfig) -> DataConfig:
    from onptq.evaluate.candidates import Built

    wanted = [base, *(one.recipe.data for one in candidates if isinstance(one, Built))]
    most = {name: max(getattr(one, name) for one in wanted) for name in ("prompts", "holdout")}
    return base.model_copy(update=most)
