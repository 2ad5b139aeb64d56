"""`python -m benchmarks.suite main`: run a suite and write its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from benchmarks.suite.suites import SUITES, TABLES_TEXT, BenchmarkData, run_suite
from benchmarks.suite.tables import goal_lines
from onptq.cli.drawing import origin
from onptq.cli.settings import ZOO, make_reporter, resolve_recipe, use_one_thread
from onptq.errors import OnPTQError
from onptq.evaluate.report import caveats
from onptq.progress import QuietReporter, Reporter
from onptq.zoo.materials import WHOLE_SPLIT, draw_calibration, draw_items, draw_prompts

SPLITS = ("test", "held-out")  # of items and prompts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OnPTQError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None


@app.command(cls=_Command)
def run(
    name: Annotated[str, typer.Argument(metavar="SUITE", help=f"One of {', '.join(SUITES)}.")],
    models: Annotated[str | None, typer.Option(help="Some of its models; processes can share them.")] = None,
    schemes: Annotated[str | None, typer.Option(help="Some of its schemes, e.g. W4A8,W4A6.")] = None,
    methods: Annotated[str | None, typer.Option(help="Some of its methods, e.g. static,onptq.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Further seeds of the methods that have one, e.g. 1,2.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Embedded tasks, e.g. choice,read; or none.")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="Items per task.", show_default="the suite's")] = None,
    prompts: Annotated[
        int | None, typer.Option(min=0, help="Prompts on which behaviour is compared.", show_default="the suite's")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results.", show_default="e.g. main-suite")] = None,
    critical: Annotated[bool, typer.Option("--critical", help="Also margin flips on joint-critical states.")] = False,
    split: Annotated[str, typer.Option(help=f"Source of items and prompts: {' or '.join(SPLITS)}.")] = SPLITS[0],
    preset: Annotated[str | None, typer.Option(help="Preset of the candidates.", show_default="the suite's")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Repeatable.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling, and of the candidates.")] = 0,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print progress and tables as JSON lines.")] = False,
) -> None:
    """Run SUITE and write its tables. Killed at any moment, the same command continues."""
    if name not in SUITES:
        raise OnPTQError(f"{name}: unknown suite; expected one of {', '.join(SUITES)}")
    if split not in SPLITS:
        raise OnPTQError(f"--split {split}: expected one of {', '.join(SPLITS)}")
    suite, folder, reporter = SUITES[name], out or Path(f"{name}-suite"), make_reporter(quiet, json)
    use_one_thread(ZOO)
    options = {"seed": seed, "compute.device": device}
    recipe = resolve_recipe(preset or suite.preset, None, options, [*suite.changes, *(changes or [])])
    per_task = items or suite.items or WHOLE_SPLIT
    count = suite.prompts if prompts is None else prompts

    def draw(family: str, reporter: Reporter) -> BenchmarkData:
        calibration, holdout = draw_calibration(family, recipe.data, reporter, suite.kind)
        drawn = draw_items(family, tasks, per_task, split, reporter)
        choosing = len(holdout) if split == "held-out" else 0  # these choose iterates, so they cannot judge them
        behaviour = draw_prompts(family, split, count, reporter, choosing, suite.kind)
        return BenchmarkData(drawn, behaviour, calibration, holdout, origin(drawn, behaviour, split))

    def check(family: str) -> None:
        draw_calibration(
            family, recipe.data.model_copy(update={"prompts": 1, "holdout": 0}), QuietReporter(), suite.kind
        )
        draw_items(family, tasks, 1, split, QuietReporter())

    tables = run_suite(
        suite,
        folder,
        draw,
        recipe,
        check=check,
        models=_listed("--models", models),
        schemes=_listed("--schemes", schemes),
        methods=_listed("--methods", methods),
        seeds=_seeds(seeds),
        critical=critical,
        reporter=reporter,
    )
    if json:
        reporter.result(tables)
    elif not quiet:
        print_goals(tables, folder)


def print_goals(tables: Mapping[str, Any], out: Path) -> None:
    """Print the goals and their caveats; the tables themselves are too wide for a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print()
    for line in goal_lines(tables):
        console.print(line.removeprefix("### "), style="bold" if line.startswith("###") else None, markup=False)
    console.print()
    few = [note for one in tables["benchmarks"] for note in caveats(one["items"], one["prompts"])]
    for note in dict.fromkeys([*SUITES[tables["suite"]].caveats, *few]):
        console.print(note, style="dim", markup=False)
    console.print(f"Tables: {out / TABLES_TEXT}", markup=False, soft_wrap=True)


def _listed(option: str, text: str | None) -> list[str]:
    if text is None:
        return []
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise OnPTQError(f"{option} {text!r}: expected names with commas between them")
    return names


def _seeds(text: str | None) -> list[int]:
    names = _listed("--seeds", text)
    if not all(name.isascii() and name.isdigit() for name in names):
        raise OnPTQError(f"--seeds {text!r}: expected whole numbers with commas between them, e.g. 0,1,2")
    return [int(name) for name in names]


if __name__ == "__main__":
    app()
