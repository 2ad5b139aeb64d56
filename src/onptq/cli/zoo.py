"""`onptq zoo`: small models to try everything on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from onptq.errors import OnPTQError

app = typer.Typer(help="Small models to try everything on.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


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
