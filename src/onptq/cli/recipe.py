"""`onptq recipe`: what a preset and its changes resolve to, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recipe(
    preset: Annotated[
        str | None, typer.Option(help="light, default, best, risk, paper or zoo.", show_default="default")
    ] = None,
    file: Annotated[Path | None, typer.Option("--recipe", help="Recipe YAML instead of a preset.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change any field; repeatable.")
    ] = None,
) -> None:
    """Print the resolved recipe as YAML, with what every field means."""
    from onptq.cli.settings import resolve_recipe

    typer.echo(resolve_recipe(preset, file, {}, changes or []).to_yaml(comments=True), nl=False)
