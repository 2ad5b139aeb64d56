"""What it took to make a candidate: seconds and the most memory, from what a run or a comparison wrote down."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onptq.files import read_json
from onptq.page.contract import Figure, Measure
from onptq.run import LOG, SUMMARY

COSTS = {"seconds": Measure("time to make it", "s", True), "peak": Measure("peak memory", "GB", True)}
GIGA = 1e9


def cost_figures(seconds: float | None, peak_bytes: float | None) -> dict[str, Figure]:
    """Seconds and peak memory, where these are known."""
    costs = {"seconds": seconds, "peak": None if peak_bytes is None else peak_bytes / GIGA}
    return {name: Figure(value) for name, value in costs.items() if value is not None}


def costs_of_run(home: Path) -> dict[str, Figure]:
    """Seconds and peak memory of a finished run."""
    held = held_by_phase(home / LOG).values()
    return cost_figures(sum(read_json(home / SUMMARY)["seconds"].values()), max(held, default=None))


def held_by_phase(log: Path) -> dict[str, float]:
    """The bytes that had been held at most when a phase ended, in the order of the phases; the last of one phase counts."""
    return {
        str(event["phase"]): float(event["peak_bytes"])
        for event in events(log)
        if event.get("event") == "phase" and event.get("state") == "end" and event.get("peak_bytes")
    }


def is_number(value: Any) -> bool:
    """Whether a value of a log is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def events(log: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of a log, without those that a kill cut short."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else ():
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, Mapping):
                yield event
