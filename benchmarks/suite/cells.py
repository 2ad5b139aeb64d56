"""The cells of a suite's tables: column titles, figures and differences as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.evaluate.report import ABSENT

PERCENT_COLUMNS = ("flips", "mismatch", "noise", "critical_flips")  # scores are read as percentages without the sign


def title(measure: str, labels: Mapping[str, Any]) -> str:
    """The title of a measure's column."""
    name = "average" if measure == "average" else str(labels[measure]["name"])
    return f"{name} %" if measure in PERCENT_COLUMNS else name


def value_of(model: Mapping[str, Any], measure: str) -> float | None:
    """A model's figure; None where it was not measured."""
    value: float | None = model["figures"].get(measure, {}).get("value")
    return value


def figure(model: Mapping[str, Any], measure: str, labels: Mapping[str, Any]) -> str:
    value = value_of(model, measure)
    return ABSENT if value is None else f"{value:.{labels[measure]['digits']}f}"


def difference(one: Mapping[str, Any], label: Mapping[str, Any]) -> str:
    """A difference with its interval."""
    if one["value"] is None:
        return "unknown"
    digits = 2 if label["percent"] else label["digits"]
    if one["low"] is None:
        return f"{one['value']:+.{digits}f}"
    return f"{one['value']:+.{digits}f} [{one['low']:+.{digits}f}, {one['high']:+.{digits}f}]"
