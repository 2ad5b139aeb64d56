"""`onptq recipe`: what a preset and its changes resolve to, without running anything."""

from __future__ import annotations

from typing import Annotated

import typer

from onptq.cli import options


def recipe(
    preset: Annotated[
        str | None, typer.Option(help="light, default, best, risk, paper or zoo.", show_default="default")
    ] = None,
    file: options.Recipe = None,
    changes: options.Changes = None,
) -> None:
    """Print the resolved recipe as YAML, with what every field means."""
    from onptq.cli.settings import resolve_recipe

    typer.echo(resolve_recipe(preset, file, {}, changes).to_yaml(comments=True), nl=False)
