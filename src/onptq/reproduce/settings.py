"""How a reproduction is run: which model, how many prompts and items, and where it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError, did_you_mean
from onptq.recipe import Recipe

MODEL = "zoo:qwen2.5-vl+outliers"
OMNI = "zoo:qwen2.5-omni+outliers"
PAPER_PROMPTS = 128  # to which the paper's budgets of critical states belong
FAR = 16  # H of the held-out consequence


@dataclass(frozen=True)
class Scale:
    """How much is run. The paper's numbers are those of `full`, where it gives any."""

    name: str
    prompts: int  # that calibrate
    bank: int  # held-out prompts whose states are analysed
    examples: int  # other prompts on which the motivating diagnostics are judged
    items: int  # per task
    tokens: int  # of a response
    epochs: int
    init_prompts: int = 512  # of those that calibrate, at most so many make theta^(0)

    def budget(self, of_paper: int) -> int:
        """The paper's number of critical states, in proportion to the prompts."""
        return max(1, of_paper * self.prompts // PAPER_PROMPTS)


SCALES: Mapping[str, Scale] = {
    "quick": Scale("quick", prompts=8, bank=8, examples=8, items=6, tokens=20, epochs=1, init_prompts=4),
    "medium": Scale("medium", prompts=48, bank=24, examples=48, items=50, tokens=64, epochs=4),
    "full": Scale("full", prompts=128, bank=32, examples=120, items=100, tokens=64, epochs=4),
}


def find_scale(name: str) -> Scale:
    if name not in SCALES:
        raise OnPTQError(f"unknown scale {name!r}{did_you_mean(name, SCALES)}; expected one of {', '.join(SCALES)}")
    return SCALES[name]


@dataclass(frozen=True)
class Settings:
    """What the command was given."""

    out: str | Path
    scale: Scale = SCALES["quick"]
    model: str = MODEL
    omni: str = OMNI  # of the table on speech
    scheme: str | None = None  # None is the paper's for each result
    init: str = "search"
    seeds: int = 1
    seed: int = 0
    device: str = "auto"
    calibration: Path | None = None  # a manifest; None draws embedded prompts
    prompts: Path | None = None  # held-out prompts for everything that is measured state by state
    bench: tuple[Path, ...] = ()  # reports of `onptq bench`
    answers: tuple[tuple[str, Path], ...] = ()  # to real benchmarks, by candidate: folders of `onptq eval`
    changes: tuple[tuple[str, Any], ...] = ()  # fields of every recipe

    def recipe(self, scheme: str, changes: Mapping[str, Any] | None = None) -> Recipe:
        """The paper's preset at this scale.

        The paper says nothing of a judge, so that the last iterate is taken and no prompt is held out for one.
        """
        scale = self.scale
        base = {
            "scheme": scheme,
            "init": self.init,
            "seed": self.seed,
            "data.prompts": scale.prompts,
            "data.holdout": 0,
            "data.init_prompts": scale.init_prompts,
            "follow.max_tokens": scale.tokens,
            "select.budget": scale.budget(256),
            "calibrate.epochs": scale.epochs,
            "calibrate.keep": "last",
            "calibrate.checkpointing": False,
            "compute.device": self.device,
            "report.detail": "off",
        }
        return Recipe.preset("paper", base | dict(self.changes) | dict(changes or {}))

    def describe(self) -> dict[str, Any]:
        """What decides the numbers, for the page and its JSON."""
        scale = self.scale
        return {
            "model": self.model,
            "scale": scale.name,
            "calibration prompts": scale.prompts,
            "held-out prompts": scale.bank,
            "items per task": scale.items,
            "tokens of a response": scale.tokens,
            "epochs": scale.epochs,
            "init": self.init,
            "seeds": self.seeds,
        } | dict(self.changes)
