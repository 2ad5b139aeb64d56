"""The paper's own numbers, transcribed as data."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from onptq.evaluate.statistics import Interval


def paper(name: str) -> dict[str, Any]:
    """The rows of `paper/NAME.yaml`."""
    text = resources.files("onptq.reproduce").joinpath("paper", f"{name}.yaml").read_text(encoding="utf-8")
    rows: dict[str, Any] = yaml.safe_load(text)
    return rows


def paper_interval(numbers: dict[str, float]) -> Interval:
    return Interval(numbers["value"], numbers["low"], numbers["high"])
