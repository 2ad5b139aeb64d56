"""`onptq verify`: whether a checkpoint is whole, loads, and still agrees with the dense model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.cli import options
from onptq.cli.terminal import make_table

if TYPE_CHECKING:
    from onptq.check.examine import Examination


def verify(
    folder: Annotated[str, typer.Argument(help="Checkpoint to check: a folder, whoever quantized it.")],
    against: Annotated[
        str | None,
        typer.Option(help="The dense model it was made from, a folder or a name of `onptq zoo list`: compare logits."),
    ] = None,
    device: Annotated[str, typer.Option(help=options.DEVICE_HELP)] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only checks that failed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run every check of `onptq inspect`, read all values, reload FOLDER in transformers, check its logits and answers.

    Exit code 1: a check failed.
    """
    from rich.console import Console

    from onptq.check.examine import examine
    from onptq.checkpoint.source import choose_device, choose_dtype

    chosen = choose_device(device)
    # Nothing is shown where there is no terminal.
    with nullcontext() if quiet else Console(stderr=True).status("reading the folder") as status:
        update = status.update if status is not None else lambda text: None
        examination = examine(folder, against, dtype=choose_dtype("auto", chosen), device=chosen, note=update)
    if json:
        from onptq.files import to_json

        typer.echo(to_json(examination.to_dict()))
    else:
        print_checks(examination, Path(folder).name, quiet)
    if not examination.passed:
        raise typer.Exit(1)


def print_checks(examination: Examination, name: str, quiet: bool = False) -> None:
    from rich.console import Console
    from rich.text import Text

    from onptq.check.trial import EXPLAINED
    from onptq.errors import printable

    failed = [check for check in examination.checks if not check.passed]
    if quiet and not failed:
        return
    table = make_table("check", "", "seen")
    for check in failed if quiet else examination.checks:
        outcome = Text("ok", "green") if check.passed else Text("FAIL", "bold red")
        table.add_row(check.name, outcome, Text(printable(check.seen)))
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width, and nothing in it should be folded at a guessed one
        console.width = max(console.width, console.measure(table, options=console.options.update(width=2000)).maximum)
    console.print(table)
    if examination.agreements and not quiet:
        console.print(EXPLAINED, markup=False, style="dim")
    count = len(examination.checks)
    verdict = f"{len(failed)} of {count} checks failed" if failed else f"all {count} checks passed"
    console.print(f"{printable(name)}: {verdict}", markup=False)
