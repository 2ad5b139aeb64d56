"""The paper's tables, figures and analyses, run by name: one module for each, over the cycle and the one harness."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onptq.reproduce.catalog import NAMES, run
    from onptq.reproduce.experiment import Experiment
    from onptq.reproduce.settings import SCALES, Settings

# Imported at first use: `onptq reproduce list` needs none of torch.
_HOMES = {
    "NAMES": "catalog",
    "run": "catalog",
    "Experiment": "experiment",
    "SCALES": "settings",
    "Settings": "settings",
}

__all__ = ["NAMES", "SCALES", "Experiment", "Settings", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
