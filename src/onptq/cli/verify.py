"""`onptq verify`: is a checkpoint whole, does it load, and does it still say what the dense model says?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from onptq.check.examine import Examination


def verify(
    folder: Annotated[str, typer.Argument(help="Checkpoint to look at: a folder, whoever quantized it.")],
    against: Annotated[
        str | None,
        typer.Option(help="The dense model it was made from, a folder or a name of `onptq zoo list`: compare logits."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Reload FOLDER in transformers and check files, shapes, values, schemes, logits and answers. Exit code 1: a check failed."""
    from rich.console import Console

    from onptq.check.examine import examine
    from onptq.checkpoint.source import choose_device, choose_dtype

    chosen = choose_device(device)
    with Console(stderr=True).status("looking at the folder") as status:  # nothing where there is no terminal
        found = examine(folder, against, dtype=choose_dtype("auto", chosen), device=chosen, note=status.update)
    if json:
        from onptq.files import to_json

        typer.echo(to_json(found.to_dict()))
    else:
        print_checks(found, Path(folder).name)
    if not found.passed:
        raise typer.Exit(1)


def print_checks(found: Examination, name: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("check", "", "seen"):
        table.add_column(column, overflow="fold")
    for check in found.checks:
        table.add_row(
            check.name,
            Text("ok" if check.passed else "FAIL", "green" if check.passed else "bold red"),
            Text(check.seen),
        )
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width, and nothing in it should be folded at a guessed one
        console.width = max(console.width, console.measure(table, options=console.options.update(width=2000)).maximum)
    console.print(table)
    failed = sum(not check.passed for check in found.checks)
    verdict = f"{failed} of {len(found.checks)} checks failed" if failed else f"all {len(found.checks)} checks passed"
    console.print(f"{name}: {verdict}", markup=False)
