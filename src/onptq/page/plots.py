"""Pictures of a whole page and of a run: size against damage, percentiles, loss terms, time and memory.

Every function returns a Vega-Lite specification with its own data, or None where there is nothing to show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from onptq.page.contract import Candidate, Figure, Page, Plot
from onptq.page.cost_plots import candidate_costs, phase_costs
from onptq.page.costs import events, is_number
from onptq.page.state_plots import (
    around_the_fork,
    first_forks,
    kl_distribution,
    migration,
    mismatch_against_consequence,
    risk_concentration,
)
from onptq.page.text import visible
from onptq.page.vega import (
    LEAST_KL,
    MOST,
    QUIET,
    ROW_HEIGHT,
    Row,
    category,
    coloured,
    dashed,
    floor_of,
    large_unit,
    logarithmic,
    picture,
    quantity,
    shaped,
    tips,
    values,
    whole,
    wide,
)
from onptq.run import LOG

KL_TITLE = "mean KL, nats"
PERCENTILE = re.compile(r"kl_p\d+")
CHOSEN = "chosen"  # the parameter that a page sets to the candidate in view
MARKED = {"filled": False, "color": "#7a7a7a", "opacity": 1}
FEW = 200  # points that are drawn as points
NO_TERMS = ("time", "event", "round", "step", "gradient")  # of a step in the log
NAMES = {"holdout": "held-out score"}


def page_plots(page: Page) -> list[Plot]:
    """Pictures of all candidates side by side."""
    beside = replace(page, candidates=[one for one in page.candidates if not one.aside])
    plots = _present(size_against_damage(beside), kl_percentiles(beside))
    return [*plots, *candidate_costs(beside)]


def candidate_plots(candidate: Candidate, page: Page) -> list[Plot]:
    """Pictures of one candidate's states and responses."""
    return _present(
        risk_concentration(candidate),
        mismatch_against_consequence(candidate, page),
        first_forks(candidate),
        around_the_fork(candidate),
        kl_distribution(candidate),
        migration(candidate),
    )


def run_plots(home: Path) -> list[Plot]:
    """Pictures of how a run went, from its log and its summary."""
    return [*_present(loss_terms(_steps(home / LOG))), *phase_costs(home)]


def size_against_damage(page: Page) -> Plot | None:
    """Every candidate by the size of its weights and its mean KL, with the size of the dense model."""
    measured = [
        (one.title, one.size_bytes, figure.value, figure)
        for one in page.candidates
        if one.size_bytes and (figure := one.figures.get("kl")) is not None and figure.value is not None
    ]
    if not measured:
        return None
    sizes, kls = [size for _, size, _, _ in measured], [kl for _, _, kl, _ in measured]
    unit, scale = large_unit(max(*sizes, page.dense_bytes or 0))
    floor = min(kls) / 2 if wide(kls) else 0.0
    rows = [
        {"candidate": title, "size": size / scale, "kl": kl, **_ends(figure, kl, floor)}
        for title, size, kl, figure in measured
    ]
    names = [title for title, _, _, _ in measured]
    x = quantity("size", f"weights, {unit}", scale={"zero": True})
    ends = [row[end] for row in rows for end in ("low", "high")]
    y = logarithmic("kl", KL_TITLE, ends) if wide(kls) else quantity("kl", KL_TITLE)
    y["scale"] = _tight(ends, wide(kls))
    shared = {
        "x": x,
        "color": coloured("candidate", names),
        "tooltip": tips(("candidate", "candidate"), ("size", unit), ("kl", "KL"), ("low", "from"), ("high", "to")),
    }
    layers: list[Row] = [
        {
            "transform": [{"filter": f"datum.candidate === {CHOSEN}"}],
            "mark": {"type": "point", "shape": "circle", "size": 520, "strokeWidth": 1.5, **MARKED},
            "encoding": {"x": x, "y": y},
        },
        {
            "mark": {"type": "rule", "opacity": 0.7, "strokeWidth": 2},
            "encoding": shared | {"y": y | {"field": "low"}, "y2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": False, "strokeWidth": 2.2, "size": 110, "opacity": 1},
            "encoding": shared | {"y": y, "shape": shaped("candidate", names)},
        },
    ]
    caption = (
        f"Mean KL to the dense model and size of the weights of {len(rows)} candidates, with 95% intervals. Lower and "
        "further left is better."
    )
    if page.dense_bytes:
        size = page.dense_bytes / scale
        layers += _dense_size(size, x)
        caption += f" The dense model has {size:.3g} {unit} and no KL."
    body = {"params": [{"name": CHOSEN, "value": ""}], "data": values(rows), "layer": layers}
    return picture("size-damage", "Size against damage", caption, body)


def kl_percentiles(page: Page) -> Plot | None:
    """Percentiles of the KL over all states, a row for each candidate."""
    measured = {name for one in page.candidates for name in one.figures if PERCENTILE.fullmatch(name)}
    names = sorted(measured, key=lambda name: int(name.removeprefix("kl_p")))
    rows = [
        {
            "candidate": one.title,
            "percentile": name.removeprefix("kl_"),
            "kl": max(figure.value, LEAST_KL),
            **_ends(figure, figure.value, LEAST_KL),
        }
        for one in page.candidates
        for name in names
        if (figure := one.figures.get(name)) is not None and figure.value is not None
    ]
    if not rows:
        return None
    shares = [name.removeprefix("kl_") for name in names]
    x = logarithmic("kl", "KL of a state, nats", [row[end] for row in rows for end in ("low", "high")])
    shared = {
        "y": category("candidate", sort=[visible(one.title) for one in page.candidates], axis={"labelLimit": 160}),
        "color": coloured("percentile", shares),
        "tooltip": tips(
            ("candidate", "candidate"), ("percentile", "percentile"), ("kl", "KL"), ("low", "from"), ("high", "to")
        ),
    }
    layers = [
        {
            "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.7},
            "encoding": shared | {"x": x | {"field": "low"}, "x2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
            "encoding": shared | {"x": x, "shape": shaped("percentile", shares)},
        },
    ]
    clipped = floor_of(
        [one.figures[name].value or 0.0 for one in page.candidates for name in names if name in one.figures]
    )
    caption = f"The KL that so many percent of all states do not exceed, with 95% intervals.{clipped}"
    body = {"data": values(rows), "height": {"step": ROW_HEIGHT}, "layer": layers}
    return picture("kl-percentiles", "KL percentiles by candidate", caption, body)


def loss_terms(steps: Sequence[Mapping[str, Any]]) -> Plot | None:
    """The terms of the loss at every step of the update, round after round."""
    terms = [key for key in dict.fromkeys(key for step in steps for key in step) if key not in NO_TERMS]
    block = max(1, -(-len(steps) * len(terms) // MOST))
    rows = [
        {"step": start + 1, "term": NAMES.get(term, term), "value": sum(known) / len(known)}
        for start in range(0, len(steps), block)
        for term in terms
        if (known := [step[term] for step in steps[start : start + block] if is_number(step.get(term))])
    ]
    if not rows:
        return None
    names = [NAMES.get(term, term) for term in terms]
    numbers = [row["value"] for row in rows]
    y = logarithmic("value", "value", numbers) if wide(numbers) else quantity("value", "value", scale={"zero": True})
    x = quantity("step", "step of the update", axis=whole())
    lines = {
        "mark": {"type": "line", "point": len(rows) <= FEW},
        "encoding": {
            "x": x,
            "y": y,
            "color": coloured("term", names),
            "strokeDash": dashed("term", names),
            "tooltip": tips(("term", "term"), ("step", "step"), ("value", "value")),
        },
    }
    begun = [
        {"step": place + 0.5} for place in range(1, len(steps)) if steps[place]["round"] != steps[place - 1]["round"]
    ]
    rounds = {"data": values(begun), "mark": {"type": "rule", **QUIET}, "encoding": {"x": x}}
    rounds_of = "one round" if not begun else f"{len(begun) + 1} rounds"
    caption = f"Terms of the loss over {len(steps):,} steps of {rounds_of}, as the update saw them."
    caption += " Dashed lines part the rounds." if begun else ""
    caption += f" Each point is a mean of {block} steps." if block > 1 else ""
    body = {"data": values(rows), "layer": [lines, *([rounds] if begun else [])]}
    return picture("loss-terms", "Loss over the steps", caption, body)


def _steps(log: Path) -> list[Mapping[str, Any]]:
    """The steps of a run's own update, in order; of one that was computed again, the later."""
    steps: dict[tuple[int, int], Mapping[str, Any]] = {}
    for event in events(log):
        with suppress(ValueError, KeyError, TypeError):
            if event["event"] == "step" and "arm" not in event:
                steps[int(event["round"]), int(event["step"])] = event
    return [steps[key] for key in sorted(steps)]


def _tight(ends: Sequence[float], in_powers: bool) -> Row:
    """A scale around these numbers, with a tenth of their range on either side, and not below zero."""
    low, high = min(ends), max(ends)
    if in_powers:
        room = (high / low) ** 0.1
        return {"type": "log", "nice": False, "domain": [low / room, high * room]}
    room = (high - low) / 10 or high / 10 or 1.0
    return {"zero": False, "nice": False, "domain": [max(0.0, low - room), high + room]}


def _dense_size(size: float, x: Row) -> list[Row]:
    """A line at the size of the dense model, and its name beside it."""
    data = values([{"size": size, "name": "dense"}])
    name = {"mark": {"type": "text", "align": "right", "baseline": "top", "dx": -4, "dy": 4}, "data": data}
    return [
        {"data": data, "mark": {"type": "rule", **QUIET}, "encoding": {"x": x}},
        name | {"encoding": {"x": x, "y": {"value": 0}, "text": {"field": "name"}}},
    ]


def _ends(figure: Figure, value: float, floor: float) -> Row:
    """The ends of a figure's interval on an axis that begins at `floor`; without one, the value itself."""
    low, high = (value if end is None else end for end in (figure.low, figure.high))
    return {"low": max(low, floor), "high": max(high, floor)}


def _present(*plots: Plot | None) -> list[Plot]:
    return [plot for plot in plots if plot is not None]
