"""Pictures of what candidates took to be made: time and memory."""

from __future__ import annotations

from dataclasses import replace

from onptq.page.contract import Page, Plot
from onptq.page.text import visible
from onptq.page.vega import BLUE, ROW_HEIGHT, category, picture, quantity, tips, values


def cost_plots(page: Page) -> list[Plot]:
    """Pictures of what candidates took to be made."""
    page = replace(page, candidates=[one for one in page.candidates if not one.aside])
    plots = costs(page, "seconds", "Time"), costs(page, "peak", "Memory")
    return [plot for plot in plots if plot is not None]


def costs(page: Page, name: str, what: str) -> Plot | None:
    """A bar for what it took to make each candidate."""
    rows = [
        {"candidate": one.title, "value": figure.value}
        for one in page.candidates
        if (figure := one.figures.get(name)) is not None and figure.value is not None
    ]
    if len(rows) < 2:
        return None
    measure = page.measures[name]
    title = f"{measure.name}, {measure.unit}"
    body = {
        "data": values(rows),
        "height": {"step": ROW_HEIGHT},
        "mark": {"type": "bar", "color": BLUE},
        "encoding": {
            "y": category("candidate", sort=[visible(one.title) for one in page.candidates], axis={"labelLimit": 160}),
            "x": quantity("value", title),
            "tooltip": tips(("candidate", "candidate"), ("value", measure.unit)),
        },
    }
    caption = f"{what} to make each of {len(rows)} candidates."
    caption += " The others were there before." if len(rows) < len(page.candidates) else ""
    return picture(f"costs-{name}", f"{what} by candidate", caption, body)
