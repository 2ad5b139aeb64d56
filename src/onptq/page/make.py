"""From folders to the page and its receipt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError
from onptq.evaluate.candidates import folder_name
from onptq.files import atomically
from onptq.files import to_json as as_json
from onptq.page.collect import collect
from onptq.page.contract import Page
from onptq.page.differences import to_json, to_markdown
from onptq.page.places import JSON, MARKDOWN, RECEIPT, Comparison, Place, beside, checkpoint_of, find, page_of
from onptq.page.plots import candidate_plots, page_plots, run_plots
from onptq.page.receipt import receipt
from onptq.page.rounds import collect_run, with_rounds
from onptq.page.side_by_side import merge
from onptq.page.vega import write_svg
from onptq.page.write import write_page


def make(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of one folder, or of several side by side, and return its path.

    Beside it go the changed answers, and beside the page of one folder its receipt.
    """
    places = [find(folder) for folder in folders]
    path = page_of(places) if out is None else out
    if out is None and len(places) > 1 and path.exists():
        raise OnPTQError(f"{path} is in this folder already, and may be of something else; expected --out FILE")
    deliver(with_plots(gather(places), places), path, receipt(places[0]) if len(places) == 1 else None)
    return path


def deliver(page: Page, path: Path, record: Mapping[str, Any] | None = None) -> None:
    """Write the page and, beside it, its receipt and all changed answers in Markdown and as JSON."""
    write_page(page, path)
    if record is not None:
        _write(beside(path, RECEIPT), as_json(record, indent=2) + "\n")
    _write(beside(path, MARKDOWN), to_markdown(page))
    _write(beside(path, JSON), to_json(page))


def draw(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write every picture of the page of these folders as an SVG into `out`, and return the files."""
    places = [find(folder) for folder in folders]
    page = with_plots(gather(places), places)
    named = [(plot.id, plot) for plot in page.plots]
    named += [(f"{folder_name(one.name)}-{plot.id}", plot) for one in page.candidates for plot in one.plots]
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for name, plot in named:
        files.append(out / f"{name}.svg")
        write_svg(plot, files[-1])
    return files


def gather(places: Sequence[Place]) -> Page:
    """What the page shows, without plots."""
    pages = [_page_of(place, alone=len(places) == 1) for place in places]
    return pages[0] if len(pages) == 1 else merge(pages, places)


def _page_of(place: Place, alone: bool) -> Page:
    if not isinstance(place, Comparison):
        return collect_run(place.folder, place.checkpoint)
    page = collect(place.folder)
    return with_rounds(page, place.run, checkpoint_of(place.run)) if place.run is not None and alone else page


def with_plots(page: Page, places: Sequence[Place]) -> Page:
    """The page with all its pictures; those of a run where it is one run's page."""
    candidates = [replace(one, plots=[*candidate_plots(one, page), *one.plots]) for one in page.candidates]
    home = _run_of(places[0]) if len(places) == 1 else None
    plots = [*page_plots(page), *(run_plots(home) if home is not None else ())]
    return replace(page, candidates=candidates, plots=plots)


def _write(path: Path, text: str) -> None:
    with atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _run_of(place: Place) -> Path | None:
    return place.run if isinstance(place, Comparison) else place.folder
