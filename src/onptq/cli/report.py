"""`onptq report`: the page of results that are there, built from their files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.cli.settings import make_reporter
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.page.contract import Page
    from onptq.progress import Reporter

FORMATS = ("table", "markdown", "json")
TOP = 10  # changed answers of a model that are printed


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Folders of comparisons, of runs (DIR-run) or of their checkpoints; several are shown side by side.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of the page.",
            show_default="page.html beside the results; of several DIRs, in the current folder, unless one is there",
        ),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write every picture of the page into FOLDER too, as SVG.", show_default="no"
        ),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the states and responses into a new FOLDER too, as a data set that can be published.",
            show_default="no",
        ),
    ] = None,
    texts: Annotated[
        str, typer.Option(metavar="numbers|answers|prompts", help="How much text the data set holds.")
    ] = "numbers",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON lines.")] = False,
) -> None:
    """Write the page that shows where decisions changed, from the files of DIR alone: no model runs."""
    from onptq.page.dataset import write_dataset
    from onptq.page.make import draw, gather, make
    from onptq.page.places import find

    reporter = make_reporter(quiet, json)
    path = make(folders, out)
    drawn = [] if pictures is None else draw(folders, pictures)
    if dataset is not None:
        write_dataset(gather([find(folder) for folder in folders]), dataset, texts)
    if json:
        written = {"pictures": [str(one) for one in drawn], "dataset": None if dataset is None else str(dataset)}
        reporter.result({"page": str(path), "bytes": path.stat().st_size, **written})
    elif not quiet:
        if pictures is not None:
            typer.echo(f"Pictures: {len(drawn)} in {pictures}")
        if dataset is not None:
            typer.echo(f"Data set: {dataset} ({texts})")
        print_page(path)


def page_of_results(folder: Path, reporter: Reporter) -> Path | None:
    """The page of results that were just written; a warning and None where it cannot be made, which spoils no result."""
    from onptq.page.make import make

    try:
        return make([folder])
    except OnPTQError as error:
        reporter.warn(f"no page was written: {error}")
        return None


def report_differences(
    page: Page, path: Path, form: str, top: int, quiet: bool, json: bool, reporter: Reporter
) -> None:
    """Print the worst of the changed answers, and where the page of all is."""
    from onptq.page.differences import all_differences, print_differences, to_json, to_markdown

    if json:
        candidates = [one.to_dict() for one in all_differences(page)]
        reporter.result({"page": str(path), "candidates": candidates})
    elif not quiet and form == FORMATS[0]:
        from rich.console import Console

        print_differences(Console(highlight=False), page, top)
        print_page(path)
    elif not quiet:
        typer.echo(to_markdown(page, top) if form == "markdown" else to_json(page), nl=False)
        reporter.note(f"Page: {path}")


def print_page(path: Path) -> None:
    """The last line of a command that wrote a page."""
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(f"Page: {path}", markup=False)
