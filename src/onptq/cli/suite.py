"""`onptq compare --suite`: the beds of a suite, and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onptq.cli.drawing import WHOLE_SPLIT, draw_calibration, draw_items, draw_prompts, origin
from onptq.cli.quantize import resolve_recipe, use_one_thread
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.evaluate.beds import Material
    from onptq.progress import Reporter


@dataclass(frozen=True)
class Selection:
    """What of a suite is run, as it was given; None is what the suite says."""

    models: str | None
    schemes: str | None
    methods: str | None
    seeds: str | None
    tasks: str | None
    items: int | None
    prompts: int | None
    split: str


def check_options(suite: str | None, only_in_suites: Mapping[str, Any], never_in_suites: Mapping[str, Any]) -> None:
    """DENSE and CANDIDATEs, or a suite, and no option of the other."""
    unwanted = only_in_suites if suite is None else never_in_suites
    given = [name for name, value in unwanted.items() if value]
    if not given:
        return
    if suite is None:
        raise OnPTQError(f"{', '.join(given)}: only with --suite, which says what else is run")
    raise OnPTQError(f"--suite {suite} says itself what is compared; expected no {', '.join(given)} beside it")


def default_out(suite: str) -> Path:
    return Path(f"{suite}-suite")


def run(
    name: str,
    out: Path | None,
    chosen: Selection,
    preset: str | None,
    changes: list[str],
    seed: int,
    device: str | None,
    critical: bool,
    reporter: Reporter,
) -> dict[str, Any]:
    from onptq.evaluate.beds import SUITES, Material, run_suite
    from onptq.progress import QuietReporter

    if name not in SUITES:
        raise OnPTQError(f"--suite {name}: unknown suite; expected one of {', '.join(SUITES)}")
    suite = SUITES[name]
    use_one_thread()
    options = {"seed": seed, "compute.device": device}
    recipe = resolve_recipe(preset or suite.preset, None, options, [*suite.changes, *changes])
    per_task = chosen.items or suite.items or WHOLE_SPLIT
    prompts = suite.prompts if chosen.prompts is None else chosen.prompts

    def draw(family: str, reporter: Reporter) -> Material:
        calibration, holdout = draw_calibration(family, None, recipe.data, True, reporter)
        asked = draw_items(family, chosen.tasks, per_task, chosen.split, reporter)
        followed = draw_prompts(family, None, prompts, chosen.split, recipe.data.holdout, reporter)
        return Material(asked, followed, calibration, holdout, origin(asked, followed, chosen.split))

    def check(family: str) -> None:
        draw_items(family, chosen.tasks, 1, chosen.split, QuietReporter())
        draw_prompts(family, None, 1, chosen.split, 0, QuietReporter())

    return run_suite(
        suite,
        out or default_out(name),
        draw,
        recipe,
        check=check,
        models=_listed("--models", chosen.models),
        schemes=_listed("--schemes", chosen.schemes),
        methods=_listed("--methods", chosen.methods),
        seeds=_seeds(chosen.seeds),
        critical=critical,
        reporter=reporter,
    )


def print_goals(tables: Mapping[str, Any], out: Path) -> None:
    """The goals in words, and how far they can be believed; the tables themselves are too wide for a terminal."""
    from rich.console import Console

    from onptq.evaluate.beds import SUITES, WORDS
    from onptq.evaluate.report import caveats
    from onptq.evaluate.suite_tables import told_goals

    console = Console(highlight=False)
    console.print()
    for line in told_goals(tables):
        console.print(line.removeprefix("### "), style="bold" if line.startswith("###") else None, markup=False)
    console.print()
    believed = [note for bed in tables["beds"] for note in caveats(bed["items"], bed["prompts"])]
    for note in dict.fromkeys([*SUITES[tables["suite"]].caveats, *believed]):
        console.print(note, style="dim", markup=False)
    console.print(f"Tables: {out / WORDS}", markup=False, soft_wrap=True)


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
