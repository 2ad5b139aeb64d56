"""`onptq quantize`: from a checkpoint to a quantized checkpoint, in a folder that is the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.progress import Reporter
    from onptq.recipe import Recipe


def quantize(
    model: Annotated[str, typer.Argument(help="Folder or hub id of the model to quantize.")],
    out: Annotated[Path, typer.Option(help="Folder of the run: the checkpoint, and onptq/ with all it was made from.")],
    scheme: Annotated[
        str | None, typer.Option(help="W4A16, W8A8, W4A8, W4A6, any WbAb; -gN and -asym with A16.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="onptq, static (the control: gamma 0) or rtn.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Manifest of prompts, .jsonl or .parquet; only rtn needs none.")
    ] = None,
    holdout: Annotated[
        Path | None, typer.Option(help="Manifest of held-out prompts, instead of some of the calibration prompts.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="light, default, best or paper.", show_default="default")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe YAML instead of a preset.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Change any field of the recipe; repeatable, wins over others."
        ),
    ] = None,
    init: Annotated[str | None, typer.Option(help="What calibration starts from: search or rtn.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all that is random.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Reload the checkpoint and compare it.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print progress and result as JSON lines.")] = False,
) -> None:
    """Quantize MODEL. Killed at any moment, the same command continues."""
    options = {"scheme": scheme, "method": method, "init": init, "seed": seed, "compute.device": device}
    resolved = resolve_recipe(preset, recipe, options, changes or [])
    if calibration is None and resolved.method != "rtn":
        raise OnPTQError(f"method {resolved.method} needs --calibration PROMPTS, a .jsonl or .parquet manifest")
    reporter = _reporter(quiet, json)

    import onptq

    result = onptq.quantize(
        model, out, calibration=calibration, recipe=resolved, holdout=holdout, reporter=reporter, verify=verify
    )
    reporter.result(result.summary if json else dict(overview(result.summary, result.path)))


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


def _kept(figures: Mapping[str, Any]) -> str:
    best, steps = figures["best_step"], figures["steps"]
    return f"step {best} of {steps}" if best else f"its start, none of {steps} steps was better"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _reporter(quiet: bool, json: bool) -> Reporter:
    from onptq.progress import JsonReporter, QuietReporter, RichReporter

    if quiet and json:
        raise OnPTQError("expected one of --quiet and --json, got both")
    return QuietReporter() if quiet else JsonReporter() if json else RichReporter()
