"""`onptq diff`: the answers that a quantized model changed, worst first, and the page that shows them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.checkpoint.catalogs import is_cataloged
from onptq.cli.drawing import (
    behaviour_prompts,
    calibration_prompts,
    embedded_kind,
    largest_data,
    needs_calibration,
    origin,
    unseen,
)
from onptq.cli.report import print_page
from onptq.cli.settings import (
    DEVICE_HELP,
    EMBEDDED_HELP,
    ZOO,
    make_reporter,
    resolve_recipe,
    short_name,
    use_one_thread,
)
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.data.prompts import Prompt
    from onptq.page.contract import Page
    from onptq.progress import Reporter
    from onptq.recipe import Recipe

EMBEDDED_PROMPTS = 64
EVERY = 2**31  # prompts of a manifest
SPLIT = "test"
FORMATS = ("table", "markdown", "json")
MARKDOWN, JSON = "differences.md", "differences.json"


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
            help="Checkpoint folders, whoever made them, METHOD:SCHEME to be built here as in `onptq compare`, or addresses "
            "of OpenAI-compatible servers (vLLM, llama.cpp, SGLang), e.g. http://localhost:8001. NAME= before it names one.",
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
            help="Exit with 1 if more answers than that changed clearly: where the dense model was sure, or in content.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help=f"Manifest of prompts to build METHOD:SCHEME with{EMBEDDED_HELP}"),
    ] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What the servers call their model.", show_default="the one that each of them serves"
        ),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the API key, which is sent to all servers."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one answer of a server.")] = 300.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print progress and all changed answers as JSON lines.")] = False,
) -> None:
    """Show which answers QUANTIZED changed against DENSE, worst first, in the terminal and on a page.

    Servers are compared with servers: DENSE and all QUANTIZED are addresses then, and no other address is contacted.
    """
    if form not in FORMATS:
        raise OnPTQError(f"--format {form}: expected one of {', '.join(FORMATS)}")
    reporter = make_reporter(quiet, json)
    from onptq.page.endpoints import is_endpoint

    addresses = [text for text in (dense, *quantized) if is_endpoint(text)]
    if addresses and len(addresses) <= len(quantized):
        raise OnPTQError(
            f"{addresses[0]} is a server, but not every model here is; expected addresses alone, or checkpoints alone: "
            "serve the others too"
        )
    if addresses:
        folder = Path(f"{_place_name(dense)}-diff") if out is None else out
        page, path = _of_servers(
            dense, quantized, folder, manifest, prompts, max_tokens, model, _key(key_env), timeout, reporter
        )
    else:
        if model is not None or key_env is not None:
            raise OnPTQError(
                "--model and --key-env are for servers; expected their addresses, e.g. http://localhost:8000"
            )
        folder = Path(f"{short_name(dense)}-diff") if out is None else out
        settings = {"compute.device": device, "follow.max_tokens": max_tokens}
        recipe = resolve_recipe("zoo" if dense.startswith(ZOO) else None, None, settings, [])
        page, path = _of_models(dense, quantized, folder, manifest, prompts, calibration, recipe, reporter)
    _report(page, path, form, top, quiet, json, reporter)
    _fail(page, fail_above)


def _of_models(
    dense: str,
    quantized: Sequence[str],
    folder: Path,
    manifest: Path | None,
    count: int | None,
    calibration: Path | None,
    recipe: Recipe,
    reporter: Reporter,
) -> tuple[Page, Path]:
    """The page of the named candidates, and the file of the whole one."""
    if dense.startswith(ZOO):
        use_one_thread()

    from onptq.checkpoint.source import choose_device, find_source
    from onptq.evaluate.candidates import parse_candidates
    from onptq.evaluate.comparison import compare_models
    from onptq.page.make import gather, make
    from onptq.page.places import find
    from onptq.run import check_place

    parsed = parse_candidates(quantized, recipe)
    source = find_source(dense)
    family = source.family.name
    choose_device(recipe.compute.device)
    check_place(folder)
    data = largest_data(parsed, recipe.data)
    calibrating, held_out = (
        calibration_prompts(family, calibration, data, is_cataloged(dense), reporter)
        if needs_calibration(parsed)
        else ([], [])
    )
    wanted = (EMBEDDED_PROMPTS if embedded_kind(manifest) is not None else EVERY) if count is None else count
    asked = behaviour_prompts(family, manifest, wanted, SPLIT, data.holdout, reporter)
    asked = unseen(asked, [*calibrating, *held_out], reporter)
    compare_models(
        source,
        parsed,
        folder,
        prompts=asked,
        origin=origin([], asked, SPLIT, manifest),
        calibration=calibrating,
        holdout=held_out,
        recipe=recipe,
        reporter=reporter,
    )
    page = gather([find(folder)])
    names = {one.name for one in parsed}
    return replace(page, candidates=[one for one in page.candidates if one.name in names]), make([folder])


def _of_servers(
    dense: str,
    quantized: Sequence[str],
    folder: Path,
    manifest: Path | None,
    count: int | None,
    max_tokens: int | None,
    model: str | None,
    key: str | None,
    timeout: float,
    reporter: Reporter,
) -> tuple[Page, Path]:
    from onptq.data.manifest import load_manifest
    from onptq.page.endpoints import compare_endpoints
    from onptq.page.places import PAGE
    from onptq.page.write import write_page
    from onptq.recipe import Recipe
    from onptq.run import HOME

    if manifest is None or embedded_kind(manifest) is not None:
        raise OnPTQError("servers are asked your own prompts; expected --manifest PROMPTS, a .jsonl or .parquet file")
    if (folder / HOME).exists() or (folder.exists() and not folder.is_dir()):
        raise OnPTQError(f"{folder} holds something else than a comparison of servers: choose another --out")
    asked: list[Prompt] = load_manifest(manifest, limit=count, note=reporter.note)
    try:
        page = compare_endpoints(
            dense,
            quantized,
            asked,
            max_tokens=Recipe().follow.max_tokens if max_tokens is None else max_tokens,
            origin=f"prompts of {manifest.name}",
            model=model,
            key=key,
            timeout=timeout,
            reporter=reporter,
        )
    except KeyboardInterrupt:
        typer.echo("interrupted: answers of servers are not kept, the same command asks them again", err=True)
        raise typer.Exit(130) from None
    write_page(page, folder / PAGE)
    return page, folder / PAGE


def _report(page: Page, path: Path, form: str, top: int, quiet: bool, json: bool, reporter: Reporter) -> None:
    """Write all changed answers beside the page, and print the worst of them."""
    from onptq.files import atomically
    from onptq.page.differences import all_differences, print_differences, to_json, to_markdown

    for name, text in ((MARKDOWN, to_markdown(page)), (JSON, to_json(page))):
        with atomically(path.with_name(name)) as temporary:
            temporary.write_text(text, encoding="utf-8")
    if json:
        found = [one.to_dict() for one in all_differences(page)]
        reporter.result({"page": str(path), "candidates": found})
    elif not quiet and form == FORMATS[0]:
        from rich.console import Console

        print_differences(Console(highlight=False), page, top)
        print_page(path)
    elif not quiet:
        typer.echo(to_markdown(page, top) if form == "markdown" else to_json(page), nl=False)
        reporter.note(f"Page: {path}")


def _fail(page: Page, above: float | None) -> None:
    """Exit with 1 where more percent of the answers than `above` changed clearly."""
    from onptq.page.differences import all_differences

    failed = [one for one in all_differences(page) if above is not None and one.clear_percent > above]
    for one in failed:
        changed = f"{one.clear} of {one.answers} answers ({one.clear_percent:.1f}%)"
        typer.echo(f"{one.title}: {changed} changed clearly, more than {above:g}%", err=True)
    if failed:
        raise typer.Exit(1)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if variable not in os.environ:
        raise OnPTQError(f"--key-env {variable}: there is no such environment variable; expected one with the API key")
    return os.environ[variable]


def _place_name(address: str) -> str:
    """A folder's name from the address of a server."""
    from onptq.evaluate.candidates import folder_name
    from onptq.page.endpoints import Endpoint

    return folder_name(Endpoint.parse(address).name.replace(":", "-").replace("/", "-"))
