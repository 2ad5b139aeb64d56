"""Run a function as a command."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from onptq.errors import OnPTQError


def application(main: Callable[..., None]) -> typer.Typer:
    """A command line with `main` as its only command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    return app


def run_command(main: Callable[..., None]) -> None:
    """Run `main` with the arguments of the process; an OnPTQError becomes one line and exit status 2."""
    try:
        application(main)()
    except OnPTQError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
