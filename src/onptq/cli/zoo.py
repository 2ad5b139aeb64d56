"""`onptq zoo`: list, export and write small models."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.zoo.catalog import Status

app = typer.Typer(help="List, export and write small models.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the models that every command takes by name."""
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
    """Write the model NAME into FOLDER as an ordinary checkpoint that transformers loads."""
    from onptq.zoo import catalog

    catalog.export(name, folder)
    typer.echo(f"wrote {name} to {folder}")


@app.command("random")
def random(
    family: Annotated[str, typer.Argument(help="qwen2.5-vl, qwen3-vl, qwen2.5-omni, llama, qwen2 or qwen3.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write the model and its prompts into.")],
    prompts: Annotated[int, typer.Option(min=1, help="How many calibration prompts to write.")] = 16,
) -> None:
    """Write a tiny model of FAMILY with random weights, and prompts for it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OnPTQError(f"{folder} exists and is not an empty folder: expected a new or empty folder")
    from onptq.zoo.random import write_random

    write_random(family, folder, prompts=prompts)
    out = folder.with_name(f"{folder.name}-W4A8")
    typer.echo(f"wrote a random {family} model and {prompts} prompts; next:")
    typer.echo(
        f"onptq quantize {shlex.quote(str(folder))} --scheme W4A8 --method onptq "
        f"--calibration {shlex.quote(str(folder / 'prompts.jsonl'))} --preset light --out {shlex.quote(str(out))}"
    )


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
    for column in ("what it does", "available"):
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
    console = Console(markup=False, highlight=False)  # `onptq[smollm2]` is not a style
    console.print(table)
    for note in dict.fromkeys(status.note for status in statuses if status.note):
        console.print(note, soft_wrap=True)
