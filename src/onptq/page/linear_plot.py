"""A picture of the erosion by layer and linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.page.contract import Plot
from onptq.page.vega import BLUE, ROW_HEIGHT, VERMILION, coloured, picture, quantity, shaped, tips, values

SIGNS = ("takes margin", "gives margin back")
MOST_SIZE = 420  # of a mark, in square pixels


def erosion_by_linear(losses: Mapping[str, Any]) -> Plot | None:
    """The mean margin that each linear takes from decisions, as `attribution.json` has it."""
    linears = [one for one in losses["linears"] if one["lost"]]
    if not losses["states"] or not linears:
        return None
    rows = [
        {
            "layer": one["block"],
            "linear": one["linear"],
            "lost": one["lost"],
            "size": abs(one["lost"]),
            "what": SIGNS[one["lost"] < 0],
        }
        for one in linears
    ]
    layers = 1 + max(row["layer"] for row in rows)
    names = list(dict.fromkeys(one["linear"] for one in losses["linears"]))
    signs = [sign for sign in SIGNS if any(row["what"] == sign for row in rows)]
    body = {
        "data": values(rows),
        "height": {"step": ROW_HEIGHT},
        "mark": {"type": "point", "filled": True, "opacity": 0.9},
        "encoding": {
            "x": {
                "field": "layer",
                "type": "ordinal",
                "title": "layer",
                "scale": {"domain": list(range(layers))},
                "axis": {"labelAngle": 0, "labelOverlap": True, "grid": True},
            },
            "y": {"field": "linear", "type": "nominal", "title": None, "sort": names, "axis": {"grid": True}},
            "size": quantity("size", "logits", scale={"range": [0, MOST_SIZE]}, legend=None),
            "color": coloured("what", signs, [(VERMILION, BLUE)[SIGNS.index(sign)] for sign in signs]),
            "shape": shaped("what", signs),
            "tooltip": tips(("layer", "layer"), ("linear", "linear"), ("lost", "logits lost")),
        },
    }
    worst = max(rows, key=lambda row: float(row["lost"]))
    total = sum(float(row["lost"]) for row in rows)
    caption = (
        f"Mean logits of margin that each linear takes from {losses['states']:,} decisions, to first order: together "
        f"{total:.3g}, measured {losses['lost']:.3g}. The largest share, {worst['lost']:.2g}, is that of {worst['linear']} "
        f"in layer {worst['layer']}."
    )
    return picture("erosion-linear", "Erosion by layer and linear", caption, body)
