"""`onptq quantize`: from a checkpoint to a quantized checkpoint, in a folder that is the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onptq.cli.comparison import print_comparison
from onptq.errors import OnPTQError

ZOO = "zoo:"
NAMED = (ZOO, "real:")  # prefixes of the names in `onptq zoo list`
RUN_FILES = "onptq"

if TYPE_CHECKING:
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
            help="Folder of the run: the checkpoint, and onptq/ with all it was made from.",
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
    _check_first(model, folder, resolved, calibration, holdout)
    given: dict[str, Any] = {"calibration": calibration, "holdout": holdout}
    if of_the_zoo and calibration is None:
        given |= _drawn_prompts(model, resolved, holdout, reporter)
    if evaluated:
        given["evaluation"] = _drawn_items(model, items, reporter)

    import onptq

    result = onptq.quantize(model, folder, recipe=resolved, reporter=reporter, verify=verify, **given)
    reporter.result(result.summary if json else dict(overview(result.summary, result.path)))
    if "comparison" in result.summary and not quiet and not json:
        from onptq.export.card_tables import held_out_prompts

        count = result.summary["prompts"]["holdout"]
        print_comparison(result.summary["comparison"], held_out_prompts(count, resolved) if count else "")


def _check_first(model: str, out: Path, recipe: Recipe, calibration: Path | None, holdout: Path | None) -> None:
    """What can be noticed at once, the model first, before anything is fetched, drawn or hashed."""
    from onptq.export.compressed import check_apart
    from onptq.models.loading import choose_device, find_source, is_hub_id
    from onptq.run import check_place

    fetched = is_hub_id(model)
    if not fetched:
        check_apart(find_source(model).folder, out)
    if calibration is None and recipe.method != "rtn" and not model.startswith(ZOO):
        absent = f"; {model!r} is no folder here and would be fetched from the hub" if fetched else ""
        raise OnPTQError(f"method {recipe.method} needs --calibration PROMPTS, a .jsonl or .parquet manifest{absent}")
    for manifest in (calibration, holdout):
        if manifest is not None and not manifest.exists():
            raise OnPTQError(f"cannot read the manifest {manifest}: no such file; expected a .jsonl or .parquet file")
    choose_device(recipe.compute.device)
    check_place(out)


def default_out(model: str, recipe: Recipe) -> Path:
    """In the current folder: the last part of the model's name, the scheme, and the method where it is not onptq."""
    name = model.split(":", 1)[1] if model.startswith(NAMED) else Path(model).resolve().name
    return Path("-".join((name, recipe.scheme, *(() if recipe.method == "onptq" else (recipe.method,)))))


def _drawn_prompts(model: str, recipe: Recipe, holdout: Path | None, reporter: Reporter) -> dict[str, Any]:
    from onptq.models.loading import find_source
    from onptq.zoo.materials import draw_prompts

    calibration, held_out = draw_prompts(find_source(model).family.name, recipe.data, reporter)
    return {"calibration": calibration, "holdout": held_out if holdout is None else holdout}


def _drawn_items(model: str, per_task: int | None, reporter: Reporter) -> list[Item]:
    from onptq.models.loading import find_source
    from onptq.zoo.materials import draw_items

    return draw_items(find_source(model).family.name, per_task, reporter)


def use_one_thread() -> None:
    """The products of models this small gain little from a second thread, and wait long for it where a core is busy."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def resolve_recipe(preset: str | None, file: Path | None, options: Mapping[str, Any], changes: list[str]) -> Recipe:
    """The preset or recipe file, changed by the options that were given, then by --set."""
    from onptq.recipe import Recipe, parse_override

    overrides = {name: value for name, value in options.items() if value is not None}
    overrides.update(map(parse_override, changes))
    if file is None:
        return Recipe.preset("default" if preset is None else preset, overrides)
    if preset is not None:
        raise OnPTQError("expected one of --preset and --recipe, got both")
    return Recipe.from_yaml(file, overrides)


def overview(summary: Mapping[str, Any], path: Path | str) -> Iterator[tuple[str, str]]:
    """The few lines of a summary that a user wants to see at once; what the summary lacks is left out."""
    for name in ("scheme", "method"):
        if name in summary:
            yield name, str(summary[name])
    sides = [_mapping(_mapping(summary.get("holdout")).get(side)) for side in ("initial", "final")]
    for key, name, form in (
        ("mismatch_percent", "mismatch", "{:.2f}%"),
        ("erosion", "erosion", "{:.4f}"),
        ("kl", "KL", "{:.5f}"),
    ):
        values = [form.format(side[key]) for side in sides if isinstance(side.get(key), int | float)]
        if values:
            yield f"held-out {name}", " -> ".join(values)
    kept = [_kept(figures) for figures in summary.get("rounds") or () if "best_step" in figures]
    if kept:
        yield "iterate kept", ", ".join(f"round {k}: {which}" for k, which in enumerate(kept, 1))
    steps: dict[str, float] = {}
    for phase, seconds in _mapping(summary.get("seconds")).items():
        step = phase.split()[0]  # "Follow 1" and "Follow 2" are both Follow
        steps[step] = steps.get(step, 0.0) + seconds
    if steps:
        yield "seconds", ", ".join(f"{step} {seconds:.1f}" for step, seconds in steps.items())
    size = _mapping(summary.get("checkpoint")).get("bytes")
    if isinstance(size, int | float):
        yield "checkpoint", f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
    yield "written to", str(path)
    yield "run files", str(Path(path) / RUN_FILES)


def _kept(figures: Mapping[str, Any]) -> str:
    best, steps = figures["best_step"], figures["steps"]
    return f"step {best} of {steps}" if best else f"its start, none of {steps} steps was better"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def make_reporter(quiet: bool, json: bool) -> Reporter:
    from onptq.progress import JsonReporter, QuietReporter, RichReporter

    if quiet and json:
        raise OnPTQError("expected one of --quiet and --json, got both")
    return QuietReporter() if quiet else JsonReporter() if json else RichReporter()
