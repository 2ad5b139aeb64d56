"""Sentences and cells that several pages have alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.evaluate.statistics import Interval
from onptq.reproduce.record import scaled, shown


def percent(interval: Interval, digits: int = 1) -> str:
    """A share with its interval, in percent."""
    return shown(scaled(interval, 100), digits, unit="%")


COCO = "128 pairs of COCO"


def differing_setup(
    settings: Mapping[str, Any], model: str, data: str, *, calibrated: str = COCO, graded: bool = True
) -> list[str]:
    """What differs from the paper in every result: model, data, theta; `graded` is whether items of tasks are answered.

    `data` and `calibrated` are the paper's. `settings` are those of the page, with several inits where it has several.
    """
    items = f" and {settings['items per task']} items of each task" if graded else ""
    inits = [settings["init"]] if isinstance(settings["init"], str) else settings["init"]
    return [
        f"Model: {settings['model']}; the paper's is {model}.",
        f"Data: {settings['calibration prompts']} calibration prompts, {settings['held-out prompts']} held-out ones"
        f"{items}; the paper's are {calibrated}, and {data}.",
        "Theta: the paper does not say what it is, how it is updated and where it starts. Here it starts from "
        f"{' and '.join(f'`{init}`' for init in inits)}, and docs/method.md says the rest.",
    ]
