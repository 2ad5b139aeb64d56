"""`onptq quantize`: from a checkpoint to a quantized checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onptq.checkpoint.catalogs import is_cataloged
from onptq.cli.comparison import print_comparison
from onptq.errors import OnPTQError

ZOO = "zoo:"

if TYPE_CHECKING:
    from onptq.data.prompts import Prompt
    from onptq.evaluate.items import Item
    from onptq.progress import Reporter
    from onptq.recipe import Recipe


def quantize(
    model: Annotated[
        str, typer.Argument(help="Model to quantize: a folder, a hub id, or a name of `onptq zoo list`.")
    ] = "zoo:qwen2.5-vl",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the checkpoint. The run, with the prompts and all else it was made from, goes to DIR-run.",
            show_default="the model's name and the scheme, e.g. qwen2.5-vl-W4A8",
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(help="W4A16, W8A8, W4A8, W4A6, any WbAb; -gN and -asym with A16.", show_default="W4A8"),
    ] = None,
    method: Annotated[str | None, typer.Option(help="onptq, static (the control: gamma 0) or rtn.")] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Manifest of prompts, .jsonl or .parquet; rtn needs none, and models of the zoo bring their own."
        ),
    ] = None,
    holdout: Annotated[
        Path | None, typer.Option(help="Manifest of held-out prompts, instead of some of the calibration prompts.")
    ] = None,
    on_bad_prompt: Annotated[
        str,
        typer.Option(metavar="fail|skip", help="Stop at prompts that cannot be used, or leave them out and say which."),
    ] = "fail",
    preset: Annotated[
        str | None,
        typer.Option(
            help="light, default, best, paper or zoo (few prompts and one round: two minutes on two cores).",
            show_default="zoo for models of the zoo, else default",
        ),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe YAML instead of a preset.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Change any field of the recipe; repeatable, wins over others."
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="What calibration starts from: search, rtn, smoothquant, awq, mbq, qig, masquant, blockwise, gptq, "
            "signround, search+gptq or search+signround.",
            show_default="the preset's: search+signround; search in light and paper",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all that is random.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Reload the checkpoint and compare it.")] = True,
    evaluate: Annotated[
        bool | None,
        typer.Option(
            "--evaluate/--no-evaluate",
            help="Put the embedded tasks to the dense model, RTN, the static control and the result; the control is "
            "calibrated for it.",
            show_default="models of the zoo only",
        ),
    ] = None,
    items: Annotated[
        int | None, typer.Option(min=1, help="Test items per task.", show_default="400 in all, e.g. 100 of 4 tasks")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print progress and result as JSON lines.")] = False,
) -> None:
    """Quantize MODEL. Killed at any moment, the same command continues; given again, it shows the finished run."""
    of_the_zoo = model.startswith(ZOO)
    evaluated = of_the_zoo if evaluate is None else evaluate
    if items is not None and not evaluated:
        raise OnPTQError("--items is for an evaluation, and there is none here: give --evaluate, or leave out --items")
    if of_the_zoo and recipe is None and preset is None:
        preset = "zoo"
    options = {"scheme": scheme, "method": method, "init": init, "seed": seed, "compute.device": device}
    resolved = resolve_recipe(preset, recipe, options, changes or [])
    reporter = make_reporter(quiet, json)
    if of_the_zoo:
        use_one_thread()
    folder = default_out(model, resolved) if out is None else out

    import onptq
    from onptq.checkpoint.source import Source, find_source
    from onptq.pipeline import check_settings

    source: str | Source = model
    prompts: Path | list[Prompt] | None = calibration
    held_out: Path | list[Prompt] | None = holdout
    drawn: list[Item] | None = None
    if of_the_zoo or evaluated:
        from onptq.zoo.materials import draw_items, draw_prompts

        source = find_source(model)
        check_settings(folder, resolved, calibration, holdout)
        if of_the_zoo and calibration is None:
            prompts, others = draw_prompts(source.family.name, resolved.data, reporter)
            held_out = others if holdout is None else holdout
        if evaluated:
            drawn = draw_items(source.family.name, items, reporter)
    result = onptq.quantize(
        source,
        folder,
        calibration=prompts,
        holdout=held_out,
        recipe=resolved,
        evaluation=drawn,
        on_bad_prompt=on_bad_prompt,
        reporter=reporter,
        verify=verify,
    )
    reporter.result(result.summary if json else dict(overview(result.summary, result.path)))
    if "comparison" in result.summary and not quiet and not json:
        from onptq.checkpoint.card_tables import held_out_prompts

        count = result.summary["prompts"]["holdout"]
        print_comparison(result.summary["comparison"], held_out_prompts(count, resolved) if count else "")


def default_out(model: str, recipe: Recipe) -> Path:
    """In the current folder: the last part of the model's name, the scheme, and the method where it is not onptq."""
    name = model.split(":", 1)[1] if is_cataloged(model) else Path(model).resolve().name
    return Path("-".join((name, recipe.scheme, *(() if recipe.method == "onptq" else (recipe.method,)))))


def use_one_thread() -> None:
    """The products of models this small gain little from a second thread, and wait long for it where a core is busy."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def resolve_recipe(preset: str | None, file: Path | None, options: Mapping[str, Any], changes: list[str]) -> Recipe:
    """The preset or recipe file, changed by the options that were given, then by --set."""
    from onptq.overrides import parse_override
    from onptq.recipe import Recipe

    overrides = {name: value for name, value in options.items() if value is not None}
    overrides.update(map(parse_override, changes))
    if file is None:
        return Recipe.preset("default" if preset is None else preset, overrides)
    if preset is not None:
        raise OnPTQError("expected one of --preset and --recipe, got both")
    return Recipe.from_yaml(file, overrides)


def overview(summary: Mapping[str, Any], path: Path | str) -> Iterator[tuple[str, str]]:
    """The few lines of a summary that a user wants to see at once; what the summary lacks is left out."""
    from onptq.run import run_home

    for name in ("scheme", "method"):
        if name in summary:
            yield name, str(summary[name])
    sides = [_mapping(_mapping(summary.get("holdout")).get(side)) for side in ("initial", "final")]
    for key, name, form in (
        ("mismatch_percent", "changed decisions", "{:.2f}%"),
        ("erosion", "margin erosion", "{:.4f}"),
        ("kl", "KL to dense", "{:.5f}"),
    ):
        values = [form.format(side[key]) for side in sides if isinstance(side.get(key), int | float)]
        if values:
            yield f"held-out {name}", " -> ".join(values) + (" (initial -> calibrated)" if len(values) > 1 else "")
    if isinstance(helped := summary.get("helped"), bool):
        yield "calibration helped", "yes" if helped else "no"
    rounds = [_kept(figures) for figures in summary.get("rounds") or () if "best_step" in figures]
    if rounds:
        yield "best theta", ", ".join(f"round {k}: {which}" for k, which in enumerate(rounds, 1))
    steps: dict[str, float] = {}
    for phase, seconds in _mapping(summary.get("seconds")).items():
        step = phase.split()[0]  # "Follow 1" and "Follow 2" are both Follow
        steps[step] = steps.get(step, 0.0) + seconds
    if steps:
        parts = ", ".join(f"{step} {seconds:.1f}" for step, seconds in steps.items())
        yield "time", f"{sum(steps.values()):.0f} s ({parts})"
    size = _mapping(summary.get("checkpoint")).get("bytes")
    if isinstance(size, int | float):
        yield "weights", f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
    yield "checkpoint", str(path)
    yield "run files", f"{run_home(path)} (hold the prompts: do not upload them)"


def _kept(figures: Mapping[str, Any]) -> str:
    best, steps = figures["best_step"], figures["steps"]
    return f"step {best} of {steps}" if best else f"the initial one, none of {steps} steps was better"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def make_reporter(quiet: bool, json: bool) -> Reporter:
    from onptq.progress import JsonReporter, QuietReporter, RichReporter

    if quiet and json:
        raise OnPTQError("expected one of --quiet and --json, got both")
    return QuietReporter() if quiet else JsonReporter() if json else RichReporter()
