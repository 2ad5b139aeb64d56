"""`onptq compare`: a dense model and its quantized candidates, on the same items and prompts, with paired statistics.

With --samples the answers are there already, in the logs of a benchmark tool.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.cli import options
from onptq.cli.comparing import TEST, compare_candidates, parse_models
from onptq.cli.report import FORMATS, TOP, page_of_results, print_page, report_differences
from onptq.cli.report_tables import print_report
from onptq.cli.samples import compare_samples
from onptq.cli.servers import are_servers, compare_servers, refuse_server_options
from onptq.cli.settings import make_reporter, resolve_recipe, short_name, use_one_thread
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.evaluate.summary import Report

PROMPTS = 64
SPLITS = (TEST, "held-out")


def compare(
    dense: Annotated[
        str,
        typer.Argument(
            metavar="DENSE",
            help="The dense model: a folder, a hub id, a name of `onptq zoo list`, or the address of a server. With --samples "
            "its log.",
        ),
    ],
    candidates: Annotated[
        list[str],
        typer.Argument(
            metavar="CANDIDATE...",
            help="Checkpoint folders that transformers loads, whoever made them (NAME=FOLDER names one), or METHOD:SCHEME "
            "to be built here, e.g. rtn:W4A8, search:W4A6. Behind @ come a preset, a recipe file or FIELD=VALUE, with commas "
            "between them, e.g. onptq:W4A8@paper,init=awq. Behind # comes a seed, e.g. onptq:W4A8#1. Or addresses of "
            "OpenAI-compatible servers, as in `onptq diff`. With --samples logs; NAME=LOG names one.",
        ),
    ],
    samples: Annotated[
        bool,
        typer.Option(
            "--samples",
            help="Compare answers that are there already: DENSE and CANDIDATE... are per-sample logs (.jsonl) of lmms-eval or "
            "lm-evaluation-harness, or folders of them, as `onptq eval` writes them. No model is loaded.",
        ),
    ] = False,
    metric: Annotated[
        str | None,
        typer.Option(help="With --samples: the metric that grades an item.", show_default="the log's first"),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of `onptq list tasks`, e.g. choice,read; or none.",
            show_default="all embedded ones that the model can be given",
        ),
    ] = None,
    items: options.Items = None,
    prompts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts on which behaviour is compared, state by state; 0 for none.",
            show_default=f"{PROMPTS}; of servers all of the manifest",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results, item by item; candidates that are in it already are not run again.",
            show_default="the model's name, e.g. qwen2.5-vl-compared",
        ),
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="Manifest of the prompts to compare behaviour on, instead of embedded ones.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help=f"Manifest of prompts to build candidates with{options.EMBEDDED_HELP}"),
    ] = None,
    on_bad_prompt: options.OnBadPrompt = "fail",
    critical: Annotated[
        bool,
        typer.Option(
            "--critical",
            help="Also measure margin flips on joint-critical states: those where plain rounding goes astray and it matters, "
            "the same for all candidates of a scheme.",
        ),
    ] = False,
    split: Annotated[
        str, typer.Option(help="Where embedded items and prompts come from: test, or held-out while you tune.")
    ] = SPLITS[0],
    preset: options.Preset = None,
    changes: options.Changes = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling, and of what is built.")] = 0,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Build every candidate that calibrates with so many seeds: its own and those that follow. Its row has means.",
        ),
    ] = 1,
    device: options.Device = None,
    model: options.ServedModel = None,
    key_env: options.Key = None,
    timeout: options.Timeout = options.TIMEOUT,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Compare CANDIDATEs with DENSE and with each other. Killed at any moment, the same command continues."""
    if split not in SPLITS:
        raise OnPTQError(f"--split {split}: expected one of {', '.join(SPLITS)}")
    if samples:
        compare_samples(dense, candidates, metric, seed, out, quiet, json)
        return
    if metric is not None:
        raise OnPTQError("--metric chooses among the metrics of logs; expected --samples with it")
    reporter = make_reporter(quiet, json)
    use_one_thread(dense)
    recipe = resolve_recipe(preset, None, {"seed": seed, "compute.device": device}, changes, model=dense)
    if are_servers(dense, candidates):
        for option, given in (("--tasks", tasks not in (None, "none")), ("--items", items), ("--critical", critical)):
            if given:
                raise OnPTQError(f"{option} is for checkpoints: servers answer the prompts of --manifest alone")
        page, path = compare_servers(
            dense,
            candidates,
            out,
            "compared",
            recipe,
            reporter,
            manifest=manifest,
            prompts=prompts,
            model=model,
            key_env=key_env,
            timeout=timeout,
        )
        report_differences(page, path, FORMATS[0], TOP, quiet, json, reporter)
        return
    refuse_server_options(model, key_env)

    from onptq.data.calibration import check_on_bad_prompt
    from onptq.evaluate.candidates import with_seeds

    check_on_bad_prompt(on_bad_prompt)
    parsed = parse_models(candidates, recipe, changes)
    folder = Path(f"{short_name(dense)}-compared") if out is None else out
    earlier = models_in(folder)
    report = compare_candidates(
        dense,
        parsed,
        folder,
        recipe,
        reporter,
        manifest=manifest,
        prompts=PROMPTS if prompts is None else prompts,
        calibration=calibration,
        tasks=tasks,
        items=items,
        split=split,
        on_bad_prompt=on_bad_prompt,
        critical=critical,
        seed=seed,
        seeds=seeds,
    )
    written = page_of_results(folder, reporter)
    if json:
        reporter.result(report.to_dict())
    elif not quiet:
        print_report(report)
        print_ending(report, folder, [one.name for first in parsed for one in with_seeds(first, seeds)], earlier)
        if written is not None:
            print_page(written)


def models_in(folder: Path) -> list[str]:
    """The models in the report of an earlier run, each seed for itself."""
    from onptq.evaluate.comparison import REPORT_JSON

    try:
        models = json_format.loads((folder / REPORT_JSON).read_text(encoding="utf-8"))["models"]
        return [name for model, one in models.items() for name in one.get("seeds") or (model,)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def print_ending(report: Report, folder: Path, named: Sequence[str], earlier: Sequence[str]) -> None:
    """Print which candidates were not run again, which others are shown, and the report's path."""
    from rich.console import Console

    from onptq.evaluate.candidates import DENSE
    from onptq.evaluate.comparison import REPORT_TEXT

    console = Console(highlight=False, soft_wrap=True)
    console.print()
    again = [name for name in named if name in earlier]
    here = [name for model, one in report.models.items() for name in one.seeds or (model,)]
    others = [name for name in here if name in earlier and name not in (DENSE, *named)]
    if again:
        console.print(f"Not run again, as measured before in {folder}: {', '.join(again)}", markup=False)
    if others:
        console.print(f"Also shown, as measured before in {folder}: {', '.join(others)}", markup=False)
    console.print(f"Report: {folder / REPORT_TEXT}", markup=False)
