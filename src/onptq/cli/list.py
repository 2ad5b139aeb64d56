"""`onptq list`: the names that recipes and commands accept, and which package brings each."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from onptq.errors import OnPTQError, did_you_mean

LISTS = ("methods", "selection-rules", "loss-terms", "tasks", "families")


def list_names(
    what: Annotated[
        str | None,
        typer.Argument(help="methods, selection-rules, loss-terms, tasks or families.", show_default="all of them"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lists as JSON.")] = False,
) -> None:
    """List base methods, selection rules, loss terms, tasks and model families, those of other packages included."""
    if what is not None and what not in LISTS:
        raise OnPTQError(f"unknown list {what!r}{did_you_mean(what, LISTS)}; expected one of {', '.join(LISTS)}")
    origins = {name: _origins(name) for name in LISTS if what in (None, name)}
    if as_json:
        from onptq.files import to_json

        typer.echo(to_json(origins, indent=2))
        return
    for name, entries in origins.items():
        if what is None:
            typer.echo(f"{name}:")
        indent = "" if what else "  "
        for entry, origin in entries.items():
            typer.echo(f"{indent}{entry}{'' if origin == 'onptq' else f'  (from {origin})'}")
        if not entries:
            typer.echo(f"{indent}none; other packages may add some, see the documentation's page on extending")


def _origins(name: str) -> dict[str, str]:
    """The package that brings each name."""
    from onptq import registry

    lists: dict[str, registry.Registry[Any]] = {
        "methods": registry.METHODS,
        "selection-rules": registry.SELECTION_RULES,
        "loss-terms": registry.LOSS_TERMS,
        "tasks": registry.TASKS,
        "families": registry.FAMILIES,
    }
    embedded: dict[str, str] = {}
    if name == "tasks":
        from onptq.zoo import suite

        embedded = dict.fromkeys(suite.TASKS, "onptq")
    return embedded | {entry: lists[name].origin(entry) for entry in lists[name]}
