"""`onptq reproduce`: the paper's tables, figures and analyses, by name."""

from __future__ import annotations

import atexit
import gc
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.cli import options
from onptq.cli.settings import make_reporter, use_one_thread
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.progress import Reporter
    from onptq.reproduce.experiment import Experiment
    from onptq.reproduce.record import Result

app = typer.Typer(help="Run the paper's tables, figures and analyses by name.", no_args_is_help=True)
OUT = Path("reproduce")


@app.callback()
def _group() -> None:
    pass


@app.command("list")
def list_results() -> None:
    """List the results of the paper that can be run."""
    from onptq.reproduce.catalog import RESULTS

    width = max(map(len, RESULTS))
    for name, says in RESULTS.items():
        typer.echo(f"{name:<{width}}  {says}")


@app.command("run")
def run(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of `onptq reproduce list`, or all.")],
    model: Annotated[
        str, typer.Option(help="Model to reproduce on: a folder, a hub id, or a name of `onptq zoo list`.")
    ] = "zoo:qwen2.5-vl+outliers",
    omni: Annotated[str, typer.Option(help="Model of omni-table, one that hears.")] = "zoo:qwen2.5-omni+outliers",
    scheme: Annotated[
        str | None, typer.Option(help="One scheme for everything.", show_default="the paper's for each result")
    ] = None,
    init: Annotated[str, typer.Option(help=options.INIT_HELP)] = "search",
    scale: Annotated[
        str,
        typer.Option(
            metavar="quick|medium|full",
            help="quick is a trial of minutes; full has the paper's numbers of prompts, medium about a third of them.",
        ),
    ] = "quick",
    seeds: Annotated[
        int, typer.Option(min=1, help="Seeds of everything that calibrates; figures are their means.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the pages, and of the runs behind them.")] = OUT,
    calibration: Annotated[
        Path | None, typer.Option(help="Manifest of calibration prompts.", show_default="embedded prompts")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Manifest of held-out prompts: first those of the banks, then the others."),
    ] = None,
    bench: Annotated[
        list[Path] | None, typer.Option(help="Report of `onptq bench` for efficiency; repeatable.")
    ] = None,
    answers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARM=FOLDER",
            help="Answers of `onptq eval` to real benchmarks, for main-table, flip-rate and omni-table in place of runs: "
            "dense=FOLDER, and METHOD:SCHEME=FOLDER for each other; repeatable.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of every recipe; repeatable."),
    ] = None,
    device: Annotated[str, typer.Option(help=options.DEVICE_HELP)] = "auto",
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Run NAME... and write a page of each: what the paper claims, what was measured, whether it holds here.

    Killed at any moment, the same command continues.
    """
    from onptq.overrides import parse_override
    from onptq.reproduce.catalog import Clock, check_answered, check_names
    from onptq.reproduce.settings import Settings, find_scale

    wanted, found_scale = check_names(names), find_scale(scale)
    if answers:
        check_answered(wanted)
    reporter = make_reporter(quiet, json)
    use_one_thread(model)

    from onptq.reproduce.answered import parse_arm
    from onptq.reproduce.experiment import Experiment
    from onptq.reproduce.page import write_summary

    settings = Settings(
        out=out,
        scale=found_scale,
        model=model,
        omni=omni,
        scheme=scheme,
        init=init,
        seeds=seeds,
        device=device,
        calibration=calibration,
        prompts=prompts,
        bench=tuple(bench or ()),
        answers=tuple(map(parse_arm, answers or ())),
        changes=tuple(map(parse_override, changes or ())),
    )
    gc.freeze()  # modules are no garbage, and there is a collection before each of many models
    atexit.register(gc.unfreeze)
    experiment = Experiment(settings, reporter)
    failed, clock = [], Clock(wanted)
    for name in wanted:
        reporter.note(clock.begin(name))
        if not _run(name, experiment, reporter, out, quiet, json):
            failed.append(name)
    summary = write_summary(out)
    if not quiet and not json:
        typer.echo(f"Summary: {summary}")
        typer.echo(clock.end())
    if failed:
        raise OnPTQError(f"not run: {', '.join(failed)}; the others are finished")


def _run(name: str, experiment: Experiment, reporter: Reporter, out: Path, quiet: bool, json: bool) -> bool:
    """Run one result and write its page; a result that cannot be run here does not stop the others."""
    from onptq.reproduce.catalog import run as run_result
    from onptq.reproduce.page import write_page

    try:
        result = run_result(name, experiment)
    except OnPTQError as error:
        reporter.warn(f"{name} was not run: {error}")
        return False
    written = write_page(result, shlex.join(["onptq", *sys.argv[1:]]), out, reporter.note)
    if json:
        reporter.result(result.to_dict())
    elif not quiet:
        _print(result, written)
    return True


def _print(result: Result, written: list[Path]) -> None:
    typer.echo(f"\n{result.title}")
    for claim in result.claims:
        typer.echo(f"  {claim.verdict}: {claim.says}")
        typer.echo(f"    paper: {claim.paper}")
        typer.echo(f"    here:  {claim.here}")
    typer.echo(f"  written: {', '.join(map(str, written))}")
