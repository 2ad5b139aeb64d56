"""Sentences and cells that several pages have alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.evaluate.statistics import Interval
from onptq.reproduce.record import scaled, shown


def percent(interval: Interval, digits: int = 1) -> str:
    """A share with its interval, in percent."""
    text = shown(scaled(interval, 100), digits)
    return text if text == "-" else text.replace(" [", "% [", 1) if " [" in text else f"{text}%"


def differing_setup(settings: Mapping[str, Any], model: str, data: str) -> list[str]:
    """What differs from the paper in every result: model, data, scale, theta."""
    return [
        f"Model: {settings['model']}; the paper's is {model}.",
        f"Data: {settings['calibration prompts']} calibration prompts and {settings['held-out prompts']} held-out ones, "
        f"at scale {settings['scale']}; the paper has 128 and {data}.",
        f"The paper does not say what theta is, how it is updated and where it starts: here {settings['init']} is the init, "
        "and docs/method.md says the rest.",
    ]
