"""`onptq plan`: whether a run fits, how long it takes, what it writes, and who can serve the result."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.checkpoint.served import EVIDENCE
from onptq.cli import options
from onptq.cli.settings import ZOO, resolve_recipe, resolve_vllm, use_one_thread
from onptq.cli.terminal import make_table
from onptq.errors import OnPTQError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from onptq.checkpoint.served import Served
    from onptq.data.prompts import Prompt
    from onptq.plan.planning import Plan
    from onptq.recipe import Recipe

WIDTH = 100  # columns where the output is no terminal
LARGEST_TERMS = 3  # of a phase that are shown
VERDICTS = {
    "serves": "serves it",
    "simulates": "simulates it",
    "differs": "computes another scheme",
    "doubtful": "may not serve it",
    "refuses": "refuses it",
}


def plan(
    model: Annotated[
        str, typer.Argument(help="Model to quantize: a folder, a downloaded hub id, or a name of `onptq zoo list`.")
    ],
    scheme: options.Scheme = None,
    mix: options.Mix = None,
    method: options.Method = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Manifest of prompts, whose tokens are counted.",
            show_default="the zoo's own for models of the zoo, else assumed prompts",
        ),
    ] = None,
    holdout: options.Holdout = None,
    on_bad_prompt: options.OnBadPrompt = "fail",
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an assumed prompt, those of images and audio included.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU to plan for by its data sheet, instead of this machine: a100-40g, h100-80g, l4-24g, ..."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, with a process each: torchrun --nproc-per-node N.")] = 1,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="GiB of each GPU: what is free of --gpu, or else the slowest GPU that is sold with so much is planned for.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder that the checkpoint would be written to: is it usable, is there room?")
    ] = None,
    preset: options.Preset = None,
    recipe: options.Recipe = None,
    changes: options.Changes = None,
    init: options.Init = None,
    device: options.Device = None,
    policy_endpoint: options.PolicyEndpoint = None,
    vllm_python: options.VllmPython = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the verdict.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, every term of every phase.")] = False,
) -> None:
    """Say whether quantizing MODEL will fit, how long it will take and what it will write, without loading a weight.

    Exit code 1 where it cannot run, with the reasons.
    """
    if quiet and json:
        raise OnPTQError("expected one of --quiet and --json, got both")
    use_one_thread(model)
    chosen = {"scheme": scheme, "method": method, "init": init, "compute.device": device}
    resolved = resolve_recipe(preset, recipe, chosen, changes, model=model, mix=mix)
    server = resolve_vllm(resolved, policy_endpoint, vllm_python)
    from rich.console import Console

    from onptq.plan.machine import machine_with
    from onptq.plan.planning import make_plan
    from onptq.serving.vllm import Vllm

    there = None if gpu is None and gpu_memory is None else machine_with(gpu, resolved.compute, gpu_memory, gpus)
    prompts: Path | list[Prompt] | None = calibration
    held_out: Path | list[Prompt] | None = holdout
    with Console(stderr=True).status("reading the model and measuring the machine"):
        if model.startswith(ZOO) and calibration is None and prompt_tokens is None:
            prompts, drawn = _own_calibration(model, resolved)
            held_out = drawn if holdout is None else holdout
        result = make_plan(
            model,
            resolved,
            calibration=prompts,
            holdout=held_out,
            on_bad_prompt=on_bad_prompt,
            prompt_tokens=prompt_tokens,
            out=out,
            machine=there,
            gpus=gpus,
            vllm=Vllm.given(server["policy_endpoint"], server["vllm_python"]),
        )
    if json:
        typer.echo(json_format.dumps(result.to_json(), indent=2))
    else:
        _print(result, quiet)
    if result.refusals:
        raise typer.Exit(1)


def _own_calibration(model: str, recipe: Recipe) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts that `onptq quantize` draws for a model of the zoo."""
    from onptq.checkpoint.source import find_source
    from onptq.progress import QuietReporter
    from onptq.zoo.materials import draw_calibration

    return draw_calibration(find_source(model).family.name, recipe.data, QuietReporter())


def _print(plan: Plan, quiet: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH
    verdict = printable(plan.verdict, also="\n")
    console.print(verdict, style="bold red" if plan.refusals else "bold green", soft_wrap=True)
    if quiet:
        return
    for text in plan.warnings:
        console.print(f"warning: {printable(text)}", style="yellow")
    if plan.parts is not None:
        _print_parts(console, plan)
    if plan.phases:
        _print_phases(console, plan)
    if not plan.refusals:
        _print_serving(console, plan.serving)


def _print_parts(console: Console, plan: Plan) -> None:
    from onptq.files import size

    assert plan.parts is not None
    parts, decoder = plan.parts, plan.parts.decoder
    start = "" if plan.recipe.method == plan.recipe.init else f", starting from {plan.recipe.init}"
    console.print(
        f"\n{plan.model} ({plan.family}) in {plan.recipe.scheme} by {plan.recipe.method}{start}", style="bold"
    )
    table = make_table("part", "modules >", "parameters >", "now >", "written >", "becomes")
    for part in parts.parts:
        becomes = plan.recipe.scheme if part.quantized else "as it is"
        table.add_row(
            part.name, f"{part.modules}", f"{part.parameters:,}", size(part.bytes), size(part.output_bytes), becomes
        )
    console.print(table)
    console.print(f"decoder: {printable(decoder.prefix)}layers, {decoder.layers} blocks", style="dim")
    beside = "" if plan.run_bytes is None else f", and about {size(plan.run_bytes)} of run files beside it"
    console.print(f"written: a checkpoint of {size(parts.output_bytes)}{beside}", style="dim")


def _print_phases(console: Console, plan: Plan) -> None:
    from onptq.files import size
    from onptq.plan.phases import duration

    assert plan.machine is not None
    machine, phases = plan.machine, plan.phases
    table = make_table("phase", "time >", *(("GPU >",) if machine.on_gpu else ()), "host >", "mostly")
    for phase in phases:
        largest = sorted((phase.gpu or phase.host).items(), key=lambda term: -term[1])[:LARGEST_TERMS]
        mostly = ", ".join(f"{name} {size(count)}" for name, count in largest if count)
        gpu = (size(phase.gpu_bytes),) if machine.on_gpu else ()
        table.add_row(phase.name, duration(phase.seconds), *gpu, size(phase.host_bytes), mostly)
    peak = size(max(phase.host_bytes for phase in phases))
    gpu_peak = (size(max(phase.gpu_bytes for phase in phases)),) if machine.on_gpu else ()
    table.add_row("in all", duration(plan.seconds), *gpu_peak, peak, "", style="bold")
    dtype = str(machine.dtype).removeprefix("torch.")
    many = f"{machine.gpus} x " if machine.gpus > 1 else ""
    console.print(f"\nOn {many}{machine.name} in {dtype}", style="bold")
    console.print(table)
    for text in plan.assumptions:
        console.print(f"- {text}", style="dim")


def _print_serving(console: Console, serving: tuple[Served, ...]) -> None:
    """Servers of one row in a sentence, those with several in a table."""
    by_server: dict[str, list[Served]] = {}
    for row in serving:
        by_server.setdefault(row.server, []).append(row)
    console.print("\nWho serves the checkpoint", style="bold")
    for server, rows in by_server.items():
        if len(rows) == 1:
            (row,) = rows
            console.print(f"{server} {VERDICTS[row.verdict]} ({EVIDENCE[row.evidence]}): {row.note}")
        else:
            _print_server(console, server, rows)


def _print_server(console: Console, server: str, rows: list[Served]) -> None:
    from rich.text import Text

    table = make_table(server, "", "computes", "kernel", "switch", "known")
    notes: dict[str, int] = {}
    for row in rows:
        mark = f" [{notes.setdefault(row.note, len(notes) + 1)}]" if row.note else ""
        cells = (row.hardware, row.verdict + mark, row.computes, row.kernel or "-", row.switch or "-", row.evidence)
        table.add_row(*map(Text, cells))  # brackets are no markup here
    console.print(table)
    for note, number in notes.items():
        console.print(f"[{number}] {note}", style="dim")
    known = "; ".join(f"{name} = {EVIDENCE[name]}" for name in dict.fromkeys(row.evidence for row in rows))
    console.print(f"known: {known}", style="dim")
