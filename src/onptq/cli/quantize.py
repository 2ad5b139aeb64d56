"""`onptq quantize`: from a checkpoint to a quantized checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.checkpoint.catalogs import is_cataloged
from onptq.cli import options
from onptq.cli.drawing import embedded_kind, origin
from onptq.cli.report import page_of_results, print_page
from onptq.cli.result import overview, print_comparison, print_examples, print_next
from onptq.cli.settings import ZOO, make_reporter, resolve_recipe, resolve_vllm, short_name, use_one_thread
from onptq.errors import OnPTQError
from onptq.ranks import is_first
from onptq.schemes import Scheme

if TYPE_CHECKING:
    from onptq.checkpoint.source import Source
    from onptq.data.prompts import Prompt
    from onptq.evaluate.summary import Report
    from onptq.evaluate.tasks import Item
    from onptq.pipeline import Result
    from onptq.progress import Reporter
    from onptq.recipe import Recipe

DEMO = "zoo:qwen2.5-vl+outliers"  # its activations have outliers as large models do, so that rounding breaks something
CAPTIONS = "captions"  # that models of the zoo were calibrated on by runs of contract 1
EVALUATED = 32  # prompts on which behaviour is compared


def quantize(
    model: Annotated[
        str, typer.Argument(help="Model to quantize: a folder, a hub id, or a name of `onptq zoo list`.")
    ] = DEMO,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the checkpoint. The run, with the prompts and all else it was made from, goes to DIR-run.",
            show_default="the model's name and the scheme, e.g. qwen2.5-vl-W4A8",
        ),
    ] = None,
    scheme: options.Scheme = None,
    mix: options.Mix = None,
    method: options.Method = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help=f"Manifest of prompts, .jsonl or .parquet; rtn needs none{options.EMBEDDED_HELP}"),
    ] = None,
    holdout: options.Holdout = None,
    on_bad_prompt: options.OnBadPrompt = "fail",
    on_degenerate: Annotated[
        str,
        typer.Option(
            metavar="fail|warn",
            help="For a quantized model most of whose answers are empty or one token over and over, where the dense model's "
            "are not: stop before the checkpoint is written, or warn.",
        ),
    ] = "fail",
    preset: options.Preset = None,
    recipe: options.Recipe = None,
    changes: options.Changes = None,
    init: options.Init = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all that is random.")] = None,
    device: options.Device = None,
    policy_endpoint: options.PolicyEndpoint = None,
    vllm_python: options.VllmPython = None,
    vllm_args: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Further options of the server that is started, e.g. '--tensor-parallel-size 2'.",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Reload the checkpoint and compare it.")] = True,
    evaluate: Annotated[
        bool | None,
        typer.Option(
            "--evaluate/--no-evaluate",
            help="Afterwards, compare the result with plain rounding and the static control: on embedded tasks where the "
            "model can be given them, and state by state.",
            show_default="models of the zoo only",
        ),
    ] = None,
    items: options.Items = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Quantize MODEL. Killed at any moment, the same command continues; given again, it shows the finished run."""
    evaluated = model.startswith(ZOO) if evaluate is None else evaluate
    if items is not None and not evaluated:
        raise OnPTQError("--items is for an evaluation, and there is none here: give --evaluate, or leave out --items")
    chosen = {"scheme": scheme, "method": method, "init": init, "seed": seed, "compute.device": device}
    resolved = resolve_recipe(preset, recipe, chosen, changes, model=model, mix=mix)
    server = resolve_vllm(resolved, policy_endpoint, vllm_python, vllm_args)
    reporter = make_reporter(quiet, json)
    use_one_thread(model)
    folder = default_out(model, resolved) if out is None else out

    import onptq
    from onptq.check.job import check_settings
    from onptq.checkpoint.source import find_source
    from onptq.evaluate.details import OFF
    from onptq.recipe import ReportConfig
    from onptq.run import is_contract_1

    source: str | Source = model
    prompts: Path | list[Prompt] | None = calibration
    held_out: Path | list[Prompt] | None = holdout
    kind = CAPTIONS if calibration is None and is_contract_1(folder) else embedded_kind(calibration)
    if kind is not None and (calibration is not None or is_cataloged(model)):
        from onptq.zoo.materials import draw_calibration

        source = find_source(model)
        if is_first():
            check_settings(folder, resolved, None, holdout)
        prompts, drawn = draw_calibration(source.family.name, resolved.data, reporter, kind)
        held_out = drawn if holdout is None else holdout
    result = onptq.quantize(
        source,
        folder,
        calibration=prompts,
        holdout=held_out,
        recipe=resolved.model_copy(update={"report": ReportConfig()}),  # what is shown of a run is no part of it
        on_bad_prompt=on_bad_prompt,
        on_degenerate=on_degenerate,
        reporter=reporter,
        verify=verify,
        detail=resolved.report.detail,
        held_out_detail=OFF if evaluated else None,  # an evaluation keeps its own
        **server,
    )
    if not is_first():
        return
    summary = result.summary
    shown = dict(overview(summary, result.path))
    if evaluated:
        source = source if not isinstance(source, str) else find_source(source)
        questions, report = _evaluate(source, result, resolved, items, reporter)
        summary = {**summary, "comparison": report.to_dict()}
        if not quiet and not json:
            print_examples(questions, folder, resolved.method)
            print_comparison(report, folder)
    page = page_of_results(folder, reporter)
    reporter.result(summary if json else shown)
    if not quiet and not json:
        print_next(summary, str(result.path), model)
        if page is not None:
            print_page(page)


def default_out(model: str, recipe: Recipe) -> Path:
    """A folder named after the last part of the model's name, the scheme, and the method where it is not onptq."""
    scheme = Scheme.parse(recipe.scheme)
    named = f"{scheme.unmixed}{'-mixed' if scheme.others else ''}"
    return Path("-".join((short_name(model), named, *(() if recipe.method == "onptq" else (recipe.method,)))))


def _evaluate(
    source: Source, result: Result, recipe: Recipe, per_task: int | None, reporter: Reporter
) -> tuple[list[Item], Report]:
    """The items, and the finished run beside its baselines: on embedded prompts, or else on those it held out."""
    from onptq.evaluate.baselines import compare_with_baselines
    from onptq.zoo.materials import draw_items, draw_prompts

    family, split = source.family.name, "test"
    items = draw_items(family, None, per_task, split, reporter)
    prompts = draw_prompts(family, split, EVALUATED, reporter)
    where = origin(items, prompts, split)
    if not prompts:
        prompts, where = list(result.prompts.holdout), "held-out prompts, which also chose the iterate"
    if not items and not prompts:
        raise OnPTQError(
            f"there is nothing to evaluate {source.name} on: no embedded tasks for {family} and no held-out prompts; "
            "expected --no-evaluate, or a calibration set with more prompts"
        )
    report = compare_with_baselines(
        source,
        result.path,
        recipe,
        items=items,
        prompts=prompts,
        calibration=result.prompts.calibration,
        holdout=result.prompts.holdout,
        origin=where,
        reporter=reporter,
    )
    return items, report
