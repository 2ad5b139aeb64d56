"""`onptq plan`: what a run will quantize, take and write, and who can serve the result, before anything runs."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.cli.quantize import ZOO, resolve_recipe, use_one_thread

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from onptq.checkpoint.serving import Served
    from onptq.plan.planning import Plan

KNOWN = "known: run = seen on such hardware; asked = the server's choice, not run; read = the kernel's list of types"


def plan(
    model: Annotated[str, typer.Argument(help="Model to quantize: a folder, or a name of `onptq zoo list`.")],
    scheme: Annotated[
        str | None,
        typer.Option(help="W4A16, W8A8, W4A8, W4A6, any WbAb; -gN and -asym with A16.", show_default="W4A8"),
    ] = None,
    method: Annotated[str | None, typer.Option(help="onptq, static (the control: gamma 0) or rtn.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="light, default, best, paper or zoo.", show_default="zoo for models of the zoo, else default"
        ),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe YAML instead of a preset.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change any field of the recipe; repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a prompt, its picture or sound included.", show_default="a usual length, stated"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where it will be written: is there room?")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, every term of every phase.")] = False,
) -> None:
    """Say what quantizing MODEL will do, take and give, from config.json and safetensors headers alone.

    Exit code 1 where it cannot work on this machine, with the reasons.
    """
    if model.startswith(ZOO):
        use_one_thread()
        preset = "zoo" if preset is None and recipe is None else preset
    resolved = resolve_recipe(
        preset, recipe, {"scheme": scheme, "method": method, "compute.device": device}, changes or []
    )
    from onptq.plan.planning import make_plan

    found = make_plan(model, resolved, out=out, prompt_tokens=prompt_tokens)
    if json:
        typer.echo(json_format.dumps(found.to_json(), indent=2))
    else:
        _print(found)
    if found.refusals:
        raise typer.Exit(1)


def _print(plan: Plan) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width of its own
        console.width = 100
    console.print(f"{plan.model} in {plan.recipe.scheme} by {plan.recipe.method}", style="bold", markup=False)
    if plan.parts is not None:
        _print_parts(console, plan)
    if plan.phases:
        _print_phases(console, plan)
    _print_serving(console, plan)
    for reason in plan.refusals:
        console.print(f"cannot run here: {reason}", style="bold red", markup=False)


def _print_parts(console: Console, plan: Plan) -> None:
    from onptq.plan.planning import size

    assert plan.parts is not None
    parts = plan.parts
    table = _table("part", "modules >", "parameters >", "now >", "written >", "becomes")
    for part in parts.parts:
        becomes = plan.recipe.scheme if part.quantized else "as it is"
        table.add_row(
            part.name, f"{part.modules}", f"{part.parameters:,}", size(part.bytes), size(part.output_bytes), becomes
        )
    console.print(f"decoder: {parts.decoder.prefix}layers.0 to {parts.decoder.layers - 1}, {plan.family}", markup=False)
    console.print()
    console.print(table)
    room = "" if plan.disk_free is None else f", {size(plan.disk_free)} free at --out"
    console.print(f"written in all: {size(parts.output_bytes)}{room}", markup=False)
    for pattern in parts.unmatched:
        console.print(f"warning: the ignore pattern {pattern} matches no tensor", style="yellow", markup=False)


def _print_phases(console: Console, plan: Plan) -> None:
    from onptq.plan.planning import size

    assert plan.machine is not None
    machine = plan.machine
    heads = ("phase", "time >", *(("GPU >",) if machine.on_gpu else ()), "host >", "mostly")
    table = _table(*heads)
    for phase in plan.phases:
        terms = phase.gpu or phase.host
        largest = sorted(terms.items(), key=lambda term: -term[1])[:3]
        mostly = ", ".join(f"{name} {size(count)}" for name, count in largest if count)
        gpu = (size(phase.gpu_bytes),) if machine.on_gpu else ()
        table.add_row(phase.name, duration(phase.seconds), *gpu, size(phase.host_bytes), mostly)
    peak = max(phase.host_bytes for phase in plan.phases)
    gpu_peak = (size(max(phase.gpu_bytes for phase in plan.phases)),) if machine.on_gpu else ()
    table.add_row("in all", duration(sum(phase.seconds for phase in plan.phases)), *gpu_peak, size(peak), "")
    free = f"{size(machine.host_free)} of host memory free"
    if machine.on_gpu:
        free = f"{size(machine.device_free)} of GPU memory and {free}"
    dtype = str(machine.dtype).removeprefix("torch.")
    console.print()
    console.print(f"on {machine.name} in {dtype}, {free}", markup=False)
    console.print()
    console.print(table)
    for text in plan.assumptions:
        console.print(f"- {text}", style="dim", markup=False)


def _print_serving(console: Console, plan: Plan) -> None:
    """Servers of one row in a sentence, those with several in a table."""
    by_server: dict[str, list[Served]] = {}
    for row in plan.serving:
        by_server.setdefault(row.server, []).append(row)
    for server, rows in by_server.items():
        console.print()
        if len(rows) == 1:
            (row,) = rows
            console.print(f"{server} {row.verdict} it ({row.evidence}): {row.note}", markup=False)
        else:
            _print_server(console, server, rows)
    console.print()
    console.print(KNOWN, style="dim", markup=False)


def _print_server(console: Console, server: str, rows: list[Served]) -> None:
    table = _table(server, "", "computes", "kernel", "switch", "known")
    notes: dict[str, int] = {}
    for row in rows:
        mark = f" [{notes.setdefault(row.note, len(notes) + 1)}]" if row.note else ""
        cells = (row.hardware, row.verdict + mark, row.computes, row.kernel or "-", row.switch or "-", row.evidence)
        table.add_row(*map(_plain, cells))
    console.print(table)
    for note, number in notes.items():
        console.print(f"[{number}] {note}", style="dim", markup=False)


def _plain(text: str) -> Text:
    from rich.text import Text

    return Text(text)  # brackets are no markup here


def _table(*heads: str) -> Table:
    """Columns by their heads; those that end with > are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        right = head.endswith(" >")
        table.add_column(head.removesuffix(" >"), justify="right" if right else "left", overflow="fold")
    return table


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
