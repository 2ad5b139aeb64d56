"""What all pictures share: colours that the colour-blind tell apart, bounded data, axes, and a file for print and README."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from onptq.errors import OnPTQError
from onptq.files import atomically
from onptq.page.contract import Plot
from onptq.page.text import visible

T = TypeVar("T")
Row = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
VERSION = "6.4"  # of Vega-Lite, as vl-convert names it
INSTALL = 'pip install "onptq[figures]"'

# Of Okabe and Ito, those that stand out from white as well as from black, the strongest first.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
GREY = "#8A8A8A"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [12, 3])
QUIET = {"color": GREY, "strokeDash": [4, 4]}  # lines to compare with

MOST = 2000  # points of a picture
HEIGHT, ROW_HEIGHT, PRINT_WIDTH = 260, 30, 640
LEAST_KL = 1e-8  # nats; on a logarithmic axis smaller values are drawn here
FEW_POWERS = 1.3  # of ten
FEW_NUMBERS = 6
LOGARITHMIC_FROM = 20.0  # the ratio of values from which on an axis is logarithmic

PRINT_CONFIG = {
    "aria": False,  # a picture has one text for all of it, where it is shown
    "font": "system-ui, sans-serif",
    "axis": {"gridColor": "#8A8A8A", "gridOpacity": 0.25, "domainColor": GREY, "tickColor": GREY},
    "view": {"stroke": None},
}
MARGIN = 40  # pixels
PNG_SCALE = 1.5  # pixels of a PNG for one of the SVG
_SIZE = re.compile(r'width="(?P<width>[\d.]+)" height="(?P<height>[\d.]+)" viewBox="0 0 [\d. ]+"')
PRINT_STYLE = "<style>@media (prefers-color-scheme: dark) { text { fill: #dddddd } }</style>"


def picture(name: str, title: str, caption: str, body: Mapping[str, Any]) -> Plot:
    """A plot as wide as the place where it is shown. Text colours are the page's, and nothing is painted behind it."""
    rows = isinstance(body.get("height"), Mapping)
    spec = {
        "$schema": SCHEMA,
        "description": f"{title}. {caption}",
        "background": "transparent",
        "width": "container",
        "height": HEIGHT,
        "autosize": {"type": "fit-x" if rows else "fit", "contains": "padding"},
        **body,
    }
    return Plot(name, title, caption, spec)


def values(rows: Iterable[Row]) -> dict[str, Any]:
    """The rows as data inside a specification: numbers to four digits, null where not finite; text without control characters."""
    return {"values": [{key: _short(value) for key, value in row.items()} for row in rows]}


def quantity(field: str, title: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title, **more}


def logarithmic(field: str, title: str, numbers: Sequence[float], **more: Any) -> dict[str, Any]:
    """An axis of numbers above zero, with a line at the powers of ten; where these are few, at twice and five times them too."""
    low, high = math.log10(min(numbers)), math.log10(max(numbers))
    steps = (1,) if high - low > FEW_POWERS else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    axis = {"values": [_short(tick) for tick in ticks], "format": "~g"}
    return quantity(field, title, scale={"type": "log"}, axis=axis, **more)


def whole(most: int | None = None) -> dict[str, Any]:
    """An axis of whole numbers, of which few are all written."""
    few = {"values": list(range(most + 1))} if most is not None and most <= FEW_NUMBERS else {}
    return {"tickMinStep": 1, "format": "d", **few}


def category(field: str, title: str | None = None, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "nominal", "title": title, **more}


def coloured(field: str, domain: Sequence[str], colours: Sequence[str] = COLOURS) -> dict[str, Any]:
    """The colour of a category, and a legend below the picture."""
    return category(
        field,
        scale=_scale(domain, colours),
        legend={"orient": "bottom", "columns": 3, "labelLimit": 240, "symbolOpacity": 1},
    )


def shaped(field: str, domain: Sequence[str]) -> dict[str, Any]:
    """The shape of a category; its legend is that of the colours."""
    return category(field, scale=_scale(domain, SHAPES))


def dashed(field: str, domain: Sequence[str]) -> dict[str, Any]:
    return category(field, scale=_scale(domain, DASHES))


def tips(*fields: tuple[str, str]) -> list[dict[str, Any]]:
    """What is shown at the pointer: fields and their titles."""
    return [{"field": field, "title": title} for field, title in fields]


def wide(numbers: Sequence[float]) -> bool:
    """Whether numbers need a logarithmic axis: all above zero, the largest at least twenty times the smallest."""
    return bool(numbers) and min(numbers) > 0 and max(numbers) / min(numbers) >= LOGARITHMIC_FROM


def thinned(items: Sequence[T], most: int = MOST) -> list[T]:
    """At most so many of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(place * last / (most - 1))] for place in range(most)]


def drawn_of(shown: int, count: int, what: str) -> str:
    """A sentence on points left out, where some are."""
    return f" Drawn are {shown:,} of {count:,} {what}, evenly spaced." if shown < count else ""


def floor_of(kls: Sequence[float]) -> str:
    """A sentence on values that are drawn at the end of a logarithmic axis, where there are some."""
    return f" Values below {LEAST_KL:g} are drawn there." if min(kls) < LEAST_KL else ""


def large_unit(most_bytes: float) -> tuple[str, float]:
    """The unit in which so many bytes are written, and how many bytes it has."""
    return ("GB", 1e9) if most_bytes >= 1e9 else ("MB", 1e6)


def can_draw() -> bool:
    """Whether the optional package that draws pictures as files is installed."""
    return find_spec("vl_convert") is not None


def draw_svg(plot: Plot) -> str:
    """The plot as an SVG that can be read on light and on dark ground. Nothing is downloaded."""
    drawn = _drawn(plot, "vegalite_to_svg", {})
    head, opened, body = drawn.partition(">")
    return f"{_widened(head)}{opened}{PRINT_STYLE}{body}"


def draw_png(plot: Plot) -> bytes:
    """The plot as a PNG on white ground."""
    drawn: bytes = _drawn(plot, "vegalite_to_png", {"background": "white"}, scale=PNG_SCALE)
    return drawn


def _drawn(plot: Plot, convert: str, changes: Mapping[str, Any], **options: Any) -> Any:
    try:
        import vl_convert
    except ImportError:
        raise OnPTQError(f"pictures as files need vl-convert-python, which is not installed: {INSTALL}") from None
    width = {"width": PRINT_WIDTH} if plot.spec["width"] == "container" else {}
    spec = dict(plot.spec) | width | dict(changes)
    draw = getattr(vl_convert, convert)
    try:
        return draw(spec, vl_version=VERSION, config=PRINT_CONFIG, allowed_base_urls=[], **options)
    except BaseException as error:  # a limit of the machine makes its Rust panic, which is no Exception
        if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            raise OnPTQError(f"the picture {plot.id!r} cannot be drawn: {error}") from error
        raise


def _widened(head: str) -> str:
    """The opening tag of an SVG with room on the left: a reader's font may be wider than the one that was measured."""
    opening = _SIZE.search(head)
    assert opening is not None
    width, height = float(opening["width"]), opening["height"]
    size = f'width="{width + MARGIN:g}" height="{height}" viewBox="{-MARGIN} 0 {width + MARGIN:g} {height}"'
    return head[: opening.start()] + size + head[opening.end() :]


def write_png(plot: Plot, path: Path) -> None:
    """Write the plot as a PNG."""
    data = draw_png(plot)
    with atomically(path) as temporary:
        temporary.write_bytes(data)


def write_svg(plot: Plot, path: Path) -> None:
    """Write the plot as an SVG."""
    text = draw_svg(plot)
    with atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _scale(names: Sequence[str], parts: Sequence[Any]) -> dict[str, Any]:
    """A scale that gives every name, as it is in the data, a part of its own while there are enough."""
    domain = list(dict.fromkeys(map(visible, names)))
    return {"domain": domain, "range": _cycled(parts, len(domain))}


def _cycled(parts: Sequence[Any], count: int) -> list[Any]:
    return [parts[place % len(parts)] for place in range(count)]


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None
