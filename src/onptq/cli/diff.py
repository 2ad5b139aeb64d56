"""`onptq diff`: the answers that a quantized model changed, worst first, and the page that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.cli import options
from onptq.cli.comparing import compare_candidates, parse_models
from onptq.cli.drawing import embedded_kind
from onptq.cli.report import FORMATS, report_differences
from onptq.cli.servers import are_servers, compare_servers, refuse_server_options
from onptq.cli.settings import make_reporter, resolve_recipe, short_name, use_one_thread
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.evaluate.candidates import Candidate
    from onptq.page.contract import Page

EMBEDDED_PROMPTS = 64
EVERY = 2**31  # prompts of a manifest


def diff(
    dense: Annotated[
        str,
        typer.Argument(
            metavar="DENSE",
            help="The dense model: a folder, a hub id, a name of `onptq zoo list`, or the address of a server.",
        ),
    ],
    quantized: Annotated[
        list[str],
        typer.Argument(
            metavar="QUANTIZED...",
            help="Checkpoint folders, whoever made them, the files of runs (DIR-run), METHOD:SCHEME to be built here as in "
            "`onptq compare`, or addresses of OpenAI-compatible servers (vLLM, llama.cpp, SGLang), e.g. http://localhost:8001. "
            "NAME= before it names one.",
        ),
    ],
    manifest: Annotated[
        Path | None,
        typer.Option(help="Your prompts, .jsonl or .parquet.", show_default="64 embedded ones"),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Use so many of the prompts.", show_default="all of the manifest")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the page and of the results, which are not measured again.",
            show_default="the dense model's name, e.g. qwen2.5-vl-diff",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens.", show_default="that of the default recipe")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="table|markdown|json", help="How changed answers are printed.")
    ] = FORMATS[0],
    top: Annotated[int, typer.Option(min=0, help="Print so many changed answers of each model, the worst first.")] = 10,
    fail_above: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            min=0,
            max=100,
            help="Exit with 1 if more answers than that changed clearly: not at a near tie, or in content.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help=f"Manifest of prompts to build METHOD:SCHEME with{options.EMBEDDED_HELP}"),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Change any field of the recipe, e.g. report.detail=full for the likeliest tokens of every state; repeatable.",
        ),
    ] = None,
    device: options.Device = None,
    model: options.ServedModel = None,
    key_env: options.Key = None,
    timeout: options.Timeout = options.TIMEOUT,
    quiet: options.Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="Print progress and all changed answers as JSON lines.")] = False,
) -> None:
    """Show which answers QUANTIZED changed against DENSE, worst first, in the terminal and on a page.

    Servers are compared with servers: DENSE and all QUANTIZED are addresses then, and no other address is contacted.
    """
    if form not in FORMATS:
        raise OnPTQError(f"--format {form}: expected one of {', '.join(FORMATS)}")
    reporter = make_reporter(quiet, json)
    settings = {"compute.device": device, "follow.max_tokens": max_tokens}
    recipe = resolve_recipe(None, None, settings, changes, model=dense)
    if are_servers(dense, quantized):
        page, path = compare_servers(
            dense,
            quantized,
            out,
            "diff",
            recipe,
            reporter,
            manifest=manifest,
            prompts=prompts,
            model=model,
            key_env=key_env,
            timeout=timeout,
        )
    else:
        refuse_server_options(model, key_env)
        use_one_thread(dense)
        candidates = parse_models(quantized, recipe, changes)
        folder = Path(f"{short_name(dense)}-diff") if out is None else out
        every = EMBEDDED_PROMPTS if embedded_kind(manifest) is not None else EVERY
        count = every if prompts is None else prompts
        compare_candidates(
            dense, candidates, folder, recipe, reporter, manifest=manifest, prompts=count, calibration=calibration
        )
        page, path = _page_of(candidates, folder)
    report_differences(page, path, form, top, quiet, json, reporter)
    _fail(page, fail_above)


def _page_of(candidates: Sequence[Candidate], folder: Path) -> tuple[Page, Path]:
    """The page of these candidates alone, and the file of that of all in the folder."""
    from onptq.page.make import gather, make
    from onptq.page.places import find

    page = gather([find(folder)])
    names = {one.name for one in candidates}
    return replace(page, candidates=[one for one in page.candidates if one.name in names]), make([folder])


def _fail(page: Page, above: float | None) -> None:
    """Exit with 1 where more percent of the answers than `above` changed clearly."""
    from onptq.page.differences import all_differences

    failed = [one for one in all_differences(page) if above is not None and one.clear_percent > above]
    for one in failed:
        changed = f"{one.clear} of {one.answers} answers ({one.clear_percent:.1f}%)"
        typer.echo(f"{one.title}: {changed} changed clearly, more than {above:g}%", err=True)
    if failed:
        raise typer.Exit(1)
