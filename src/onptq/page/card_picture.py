"""The picture of a model card: the KL of the checkpoint beside those of RTN and the init."""

from __future__ import annotations

from onptq.checkpoint.provenance import Results
from onptq.errors import OnPTQError
from onptq.page.contract import Plot
from onptq.page.vega import (
    BLUE,
    LEAST_KL,
    ROW_HEIGHT,
    Row,
    can_draw,
    category,
    draw_svg,
    floor_of,
    logarithmic,
    picture,
    quantity,
    values,
    wide,
)

KL = "KL"


def card_picture(results: Results | None) -> str | None:
    """The picture as an SVG; None where nothing was measured, or where it cannot be drawn here: a card does without."""
    plot = None if results is None else results_plot(results)
    if plot is None or not can_draw():
        return None
    try:
        return draw_svg(plot)
    except OnPTQError:
        return None


def results_plot(results: Results) -> Plot | None:
    """The mean KL of every model of the card, a row each, with its interval."""
    measured = {model: row[KL] for model, row in results.rows.items() if KL in row and row[KL].value is not None}
    if len(measured) < 2:
        return None
    rows: list[Row] = []
    for model, one in measured.items():
        value, low, high = (max(end or 0.0, LEAST_KL) for end in (one.value, one.low, one.high))
        rows.append(
            {"model": model, "kl": value, "low": low if one.low else value, "high": high if one.high else value}
        )
    ends = [row[end] for row in rows for end in ("low", "high")]
    title = "mean KL to the source, nats (less is better)"
    x = logarithmic("kl", title, ends) if wide(ends) else quantity("kl", title, scale={"zero": True})
    y = category("model", sort=list(measured), axis={"labelLimit": 240})
    body = {
        "data": values(rows),
        "height": {"step": ROW_HEIGHT},
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.7, "color": BLUE},
                "encoding": {"y": y, "x": x | {"field": "low"}, "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1, "color": BLUE},
                "encoding": {"y": y, "x": x},
            },
        ],
    }
    caption = (
        f"Mean KL on held-out prompts, with {results.confidence:.0%} intervals.{floor_of([row['kl'] for row in rows])}"
    )
    return picture("results", "KL to the source", caption, body)
