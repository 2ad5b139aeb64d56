"""Pictures of time and memory: of every candidate, and of every phase of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onptq.files import read_json
from onptq.page.contract import Page, Plot
from onptq.page.costs import held_by_phase, is_number
from onptq.page.text import visible
from onptq.page.vega import BLUE, ROW_HEIGHT, category, large_unit, picture, quantity, tips, values
from onptq.run import LOG, SUMMARY

PHASE = re.compile(r"\w+(?: held-out)?")  # "Follow 1" and "Follow 2" are both Follow


def candidate_costs(page: Page) -> list[Plot]:
    """A bar for what it took to make each candidate, in time and in memory."""
    plots = _costs(page, "seconds", "Time"), _costs(page, "peak", "Memory")
    return [plot for plot in plots if plot is not None]


def _costs(page: Page, name: str, what: str) -> Plot | None:
    figures = {one.title: one.figures[name].value for one in page.candidates if name in one.figures}
    known = {title: value for title, value in figures.items() if value is not None}
    if len(known) < 2:
        return None
    measure, titles = page.measures[name], [one.title for one in page.candidates]
    caption = f"{what} to make each of {len(known)} candidates."
    caption += " The others were there before." if len(known) < len(titles) else ""
    return _bars(f"costs-{name}", f"{what} by candidate", caption, known, titles, f"{measure.name}, {measure.unit}")


def phase_costs(home: Path) -> list[Plot]:
    """The time and the memory of the phases of a run, those of all rounds together."""
    plots = seconds_by_phase(_seconds(home / SUMMARY)), memory_by_phase(held_by_phase(home / LOG))
    return [plot for plot in plots if plot is not None]


def seconds_by_phase(seconds: Mapping[str, Any]) -> Plot | None:
    """How long the phases of a run took."""
    total: dict[str, float] = {}
    for phase, took in seconds.items():
        if is_number(took) and (name := PHASE.match(phase)):
            total[name[0]] = total.get(name[0], 0.0) + took
    everything = sum(total.values())
    if not everything > 0:
        return None
    longest = max(total, key=lambda phase: total[phase])
    share = 100 * total[longest] / everything
    caption = f"The run took {everything:,.1f} s, {share:.0f}% of it for {longest}. Rounds are taken together."
    return _bars("seconds", "Where the time went", caption, total, list(total), "seconds")


def memory_by_phase(held: Mapping[str, float]) -> Plot | None:
    """The most memory that had been held when a phase ended."""
    most: dict[str, float] = {}
    for phase, peak in held.items():
        if name := PHASE.match(phase):
            most[name[0]] = max(peak, most.get(name[0], 0.0))
    if not most:
        return None
    highest = max(most.values())
    unit, scale = large_unit(highest)
    first = next(phase for phase, peak in most.items() if peak == highest)
    caption = f"{highest / scale:.3g} {unit} were held at most, first reached by the end of {first}."
    shown = {phase: peak / scale for phase, peak in most.items()}
    return _bars("memory", "Where the memory went", caption, shown, list(most), f"{unit} held at most so far")


def _bars(
    name: str, title: str, caption: str, lengths: Mapping[str, float], order: Sequence[str], quantity_title: str
) -> Plot:
    body = {
        "data": values([{"what": what, "value": length} for what, length in lengths.items()]),
        "height": {"step": ROW_HEIGHT},
        "mark": {"type": "bar", "color": BLUE},
        "encoding": {
            "y": category("what", sort=[visible(one) for one in order], axis={"labelLimit": 160}),
            "x": quantity("value", quantity_title),
            "tooltip": tips(("what", "of"), ("value", quantity_title)),
        },
    }
    return picture(name, title, caption, body)


def _seconds(summary: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        seconds = read_json(summary)["seconds"]
        return seconds if isinstance(seconds, Mapping) else {}
    return {}
