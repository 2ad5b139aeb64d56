"""`onptq zoo`: small models to try everything on."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onptq.errors import OnPTQError
from onptq.zoo.splits import SPLITS

if TYPE_CHECKING:
    from onptq.data.prompts import Prompt
    from onptq.zoo.catalog import Status
    from onptq.zoo.exam import Report
    from onptq.zoo.outliers import Strengths

app = typer.Typer(help="Small models to try everything on.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the models that can be named wherever a model is asked for."""
    from onptq.zoo.catalog import ENTRIES, describe

    statuses = [describe(name) for name in ENTRIES]
    if as_json:
        typer.echo(json.dumps([_record(status) for status in statuses], indent=2))
        return
    _print_table(statuses)


@app.command("export")
def export(
    name: Annotated[str, typer.Argument(help="A name that `onptq zoo list` shows.")],
    folder: Annotated[Path, typer.Argument(help="New or empty folder to write the model into.")],
) -> None:
    """Write the model NAME into FOLDER as an ordinary checkpoint, which plain transformers loads."""
    from onptq.zoo import catalog

    catalog.export(name, folder)
    typer.echo(f"wrote {name} to {folder}")


@app.command("evaluate")
def evaluate(
    model: Annotated[str, typer.Argument(help="A name that `onptq zoo list` shows, or the folder of such a model.")],
    tasks: Annotated[list[str] | None, typer.Option("--task", help="Only this task; repeatable.")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="Items per task; the whole split unless given.")] = None,
    split: Annotated[str, typer.Option(help=f"{', '.join(SPLITS[:-1])} or {SPLITS[-1]}.")] = "test",
    real: Annotated[
        bool, typer.Option("--real", help="Recorded speech and described pictures instead, where they are installed.")
    ] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Write the scores into the model card of the folder MODEL.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Score the dense MODEL on the embedded tasks."""
    if card and not Path(model).is_dir():
        raise OnPTQError(
            f"--card writes into a folder, and {model!r} is none here; expected the folder of a trained model"
        )
    from onptq.progress import QuietReporter, RichReporter
    from onptq.zoo.exam import examine

    reporter = QuietReporter() if as_json else RichReporter()
    report = examine(model, tasks=tasks, count=items, split=split, real=real, reporter=reporter)
    for note in report.notes:
        typer.echo(note, err=True)
    if card:
        from onptq.zoo.train.card import add_scores

        add_scores(Path(model), report.tasks)
    if as_json:
        typer.echo(
            json.dumps({task: {"percent": found.percent} | asdict(found) for task, found in report.tasks.items()})
        )
    else:
        _print_report(report)


@app.command("random")
def random(
    family: Annotated[str, typer.Argument(help="qwen2.5-vl, qwen3-vl, qwen2.5-omni, llama, qwen2 or qwen3.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write the model and its prompts into.")],
    prompts: Annotated[int, typer.Option(min=1, help="How many calibration prompts to write.")] = 16,
) -> None:
    """Write a tiny model of FAMILY with random weights, and prompts for it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OnPTQError(f"{folder} is there already: expected a new or empty folder")
    from onptq.zoo.random import write_random

    write_random(family, folder, prompts=prompts)
    out = folder.with_name(f"{folder.name}-W4A8")
    typer.echo(f"wrote a random {family} model and {prompts} prompts; next:")
    typer.echo(
        f"onptq quantize {shlex.quote(str(folder))} --scheme W4A8 --method onptq "
        f"--calibration {shlex.quote(str(folder / 'prompts.jsonl'))} --preset light --out {shlex.quote(str(out))}"
    )


@app.command("outliers")
def outliers(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model; outliers.json is written into it.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Manifest of prompts to choose by, instead of the suite's calibration split.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many prompts to choose by.")] = 64,
    strengths: Annotated[
        list[str] | None,
        typer.Option(
            "--strength",
            metavar="PLACE.KIND=FACTORS",
            help="Other factors, e.g. up_proj.vision=32,32,16; repeatable.",
        ),
    ] = None,
) -> None:
    """Choose the outlier channels of a trained model in FOLDER by what its pictures, sounds and words excite."""
    from onptq.zoo.outliers import write_outliers

    chosen = write_outliers(folder, _prompts(folder, prompts, count), _strengths(folder, strengths or []))
    channels = sum(len(places) for block in chosen.blocks for places in block.values())
    typer.echo(f"wrote {channels} channels in {len(chosen.blocks)} blocks to {folder / 'outliers.json'}")


def _print_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "measure", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("items", "%"):
        table.add_column(column, justify="right")
    for task, found in report.tasks.items():
        table.add_row(task, found.measure, str(found.items), f"{found.percent:.1f}")
        for kind, part in report.kinds[task].items():
            table.add_row(f"  {kind}", "", str(part.items), f"{part.percent:.1f}", style="dim")
    Console(highlight=False).print(table)


def _prompts(folder: Path, manifest: Path | None, count: int) -> list[Prompt]:
    if manifest is not None:
        from onptq.data.manifest import load_manifest

        return load_manifest(manifest, limit=count)
    from onptq.models.loading import find_source
    from onptq.zoo.suite import prompts

    return prompts(find_source(folder).family.name, "calibration", count)


def _strengths(folder: Path, changes: list[str]) -> dict[str, Strengths]:
    """The family's strengths with `place.kind=factor,factor,...` replaced; `loudest` and `reach` take one number."""
    from onptq.models.loading import find_source
    from onptq.zoo.outliers import strengths_of

    strengths = dict(strengths_of(find_source(folder).family.name))
    for change in changes:
        target, _, values = change.partition("=")
        place, _, kind = target.partition(".")
        try:
            numbers = [float(value) for value in values.split(",") if value]
            value: Any = numbers[0] if kind in ("loudest", "reach") else tuple(map(int, numbers))
            strengths[place] = replace(strengths[place], **{kind: value})
        except (KeyError, IndexError, TypeError, ValueError) as error:
            kinds = ", ".join(field.name for field in fields(strengths["v_proj"]))
            raise OnPTQError(
                f"--strength {change}: expected PLACE.KIND=FACTOR,FACTOR,... with PLACE one of {', '.join(strengths)} "
                f"and KIND one of {kinds}"
            ) from error
    return strengths


def _record(status: Status) -> dict[str, Any]:
    return {
        "name": status.entry.name,
        "what": status.entry.what,
        "does": status.entry.does,
        "parameters": status.parameters,
        "bytes": status.bytes,
        "available": status.available,
        "note": status.note,
        "folder": None if status.folder is None else str(status.folder),
    }


def _print_table(statuses: list[Status]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what it is", box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("params", justify="right", no_wrap=True)
    table.add_column("disk", justify="right", no_wrap=True)
    for column in ("what it does", "here"):
        table.add_column(column)
    table.columns[0].no_wrap = True
    for status in statuses:
        table.add_row(
            status.entry.name,
            status.entry.what,
            "-" if status.parameters is None else f"{status.parameters / 1e6:.1f} M",
            "-" if status.bytes is None else f"{status.bytes / 1e6:.1f} MB",
            status.entry.does,
            "no" if not status.available else "yes" if status.folder else "on first use",
        )
    console = Console(markup=False, highlight=False)  # `onptq[smollm2]` is no style
    console.print(table)
    for note in dict.fromkeys(status.note for status in statuses if status.note):
        console.print(note, soft_wrap=True)
