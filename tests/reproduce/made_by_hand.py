"""Banks of states made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onptq.bank import AGREE, MISMATCH, NEAR_MISS, Column, States, Trajectory
from onptq.reproduce.banks import Bank
from onptq.reproduce.settings import Scale, Settings

KIND = {".": AGREE, "n": NEAR_MISS, "x": MISMATCH}
TINY = Scale("tiny", prompts=3, bank=3, examples=3, items=2, tokens=12, epochs=1)
FLOATS = ("margin_dense", "margin_quant", "erosion", "js", "kl", "consequence", "risk", "weight")
INTEGERS = ("token", "reference", "competitor", "quantized", "horizon")


def make_states(prompts: Sequence[int], kinds: str, **columns: Sequence[float] | Sequence[bool]) -> States:
    """A state for each letter of `kinds` (. agrees, n is a near miss, x a mismatch); what is not given is 0, or its place."""
    count = len(kinds)
    t = [list(prompts[: place + 1]).count(prompt) for place, prompt in enumerate(prompts)]
    made: dict[str, Any] = {name: np.zeros(count, np.float32) for name in FLOATS}
    made |= {name: np.zeros(count, np.int32) for name in INTEGERS} | {"critical": np.zeros(count, np.bool_)}
    made |= {"t": np.array(t, np.int32), "prompt": np.array(prompts, np.int32)}
    made |= {"kind": np.array([KIND[kind] for kind in kinds], np.int8)}
    return States(**made | {name: np.array(column, made[name].dtype) for name, column in columns.items()})


def make_bank(states: States, far: Sequence[float], valid: Sequence[bool] | None = None) -> Bank:
    known = np.ones(len(states), np.bool_) if valid is None else np.array(valid, np.bool_)
    return Bank([], states, np.array(far, np.float64), known)


def say(*responses: Sequence[int]) -> list[Trajectory]:
    return [Trajectory(prompt, tuple(tokens), False) for prompt, tokens in enumerate(responses)]


def column(*values: float) -> Column:
    return np.array(values, np.float64)


def describe() -> dict[str, Any]:
    """Settings as a page tells them."""
    from pathlib import Path

    return Settings(out=Path("reproduce"), scale=TINY).describe()
