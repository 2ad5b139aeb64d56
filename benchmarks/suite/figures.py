"""A picture of a suite's tables: one measure of every method, a panel for each scheme and a point for each model.

python -m benchmarks.suite.figures results/suite.md docs/assets/suite-mismatch.svg
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from onptq.page.contract import Plot
from onptq.page.vega import (
    BLUE,
    GREY,
    ROW_HEIGHT,
    SKY,
    VERMILION,
    Row,
    category,
    coloured,
    logarithmic,
    picture,
    tips,
    values,
    write_svg,
)

SECTION = re.compile(r"### (?P<model>\S+), (?P<scheme>\S+)")
AXES = {
    "mismatch %": "changed decisions, %",
    "erosion": "erosion, logits",
    "KL": "on-policy KL, nats",
    "flips %": "flips, %",
}
COLOURS = {"OnPTQ": VERMILION, "uniform": BLUE, "static control": SKY, "others": GREY}
GROUPS = {"onptq": "OnPTQ", "uniform": "uniform", "static": "static control"}
PANEL = 84  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="the .md of a suite")
    parser.add_argument("out", type=Path, help="an .svg")
    parser.add_argument("--measure", choices=list(AXES), default="mismatch %")
    args = parser.parse_args()
    write_svg(plot(list(read(args.tables.read_text(encoding="utf-8"), args.measure)), args.measure), args.out)


def read(text: str, measure: str) -> Iterator[Row]:
    """The measure of every method, model and scheme, from the tables of a suite; what is not above zero is left out."""
    section, column, lines = None, None, iter(text.splitlines())
    for line in lines:
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            section, column = SECTION.fullmatch(line), None
        elif not line.startswith("|"):
            column = None
        elif section and cells[0] == section["scheme"]:
            column = cells.index(measure) if measure in cells else None
        elif section and column is not None and re.fullmatch(r"[\d.]+", cells[column]) and float(cells[column]) > 0:
            yield {**section.groupdict(), "method": cells[0], "value": float(cells[column])}


def plot(rows: Sequence[Row], measure: str) -> Plot:
    """A panel for each scheme, each with an axis of its own."""
    schemes, methods, models = (
        list(dict.fromkeys(row[name] for row in rows)) for name in ("scheme", "method", "model")
    )
    shown = [row | {"group": GROUPS.get(row["method"], "others")} for row in rows]
    x = logarithmic("value", "", [row["value"] for row in rows])
    x["axis"] |= {"labelOverlap": True}
    body = {
        "data": values(shown),
        "width": PANEL,
        "height": {"step": ROW_HEIGHT // 2},
        "autosize": {"type": "pad"},
        "mark": {"type": "point", "filled": True, "size": 28, "opacity": 0.8},
        "encoding": {
            "column": category("scheme", title=AXES[measure], sort=schemes, header={"titleOrient": "bottom"}),
            "y": category("method", sort=methods, axis={"grid": True}),
            "x": x,
            "color": coloured("group", list(COLOURS), list(COLOURS.values())),
            "tooltip": tips(("model", "model"), ("method", "method"), ("scheme", "scheme"), ("value", measure)),
        },
        "resolve": {"scale": {"x": "independent"}},
    }
    caption = f"{AXES[measure]} of every method and scheme; each point is one of {len(models)} models."
    return picture("suite", "Every method", caption, body)


if __name__ == "__main__":
    main()
