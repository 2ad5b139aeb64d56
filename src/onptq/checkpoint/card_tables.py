"""A run's measurements with their intervals, read from its own tables, as the model card shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onptq.bank import MISMATCH, States
from onptq.evaluate.statistics import CONFIDENCE, Interval, Measure, Part, Resampler
from onptq.recipe import Recipe
from onptq.run import RECORD

DENSE = "dense"
NAMES = {DENSE: "source", "rtn": "plain rounding", "static": "static control", "onptq": "OnPTQ"}
ANSWERS, COMPARISON, STATES = "answers.parquet", "comparison.json", ("final", "holdout.parquet")


@dataclass(frozen=True)
class Results:
    """By arm and measure; the source and what it is compared with first, the checkpoint itself last."""

    arms: Mapping[str, Mapping[str, Interval]]
    items: int
    states: int
    held_out: str = ""  # the prompts where they were visited


def read_results(home: Path, method: str, seed: int = 0) -> Results | None:
    """What the run whose records lie in `home` has measured; None when it measured nothing."""
    resampler = Resampler(seed)
    answers, kinds = _answers(home / ANSWERS), _kinds(home / COMPARISON)
    arms: dict[str, dict[str, Interval]] = {}
    states = prompts = 0
    recipe = Recipe.from_yaml(home / RECORD) if (home / RECORD).is_file() else None
    for arm in answers or {method: []}:
        figures = {name: resampler.estimate(measure) for name, measure in _task_measures(answers, kinds, arm)}
        held_out = home.joinpath(*(() if arm == method else (arm,)), *STATES)
        if arm != DENSE and held_out.is_file():
            table = States.read(held_out)
            if arm == method:
                states, prompts = len(table), len(np.unique(table.prompt))
            figures |= {name: resampler.estimate(measure) for name, measure in _behaviour_measures(table)}
        if figures:
            arms[arm] = figures
    items = len({row["item"] for row in answers.get(DENSE, ())})
    return Results(arms, items, states, held_out_prompts(prompts, recipe)) if arms else None


def measured(results: Results | None) -> str:
    if results is None:
        return "Nothing was measured in the run that made it."
    columns = list(dict.fromkeys(name for figures in results.arms.values() for name in figures))
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for arm, figures in results.arms.items():
        lines.append(f"| {NAMES.get(arm, arm)} | {' | '.join(_shown(figures.get(name)) for name in columns)} |")
    return "\n".join(lines) + f"\n\n{_explained(results, columns)}"


def not_measured(results: Results | None) -> str:
    speed = "speed, memory in use and safety"
    if results is None or not results.items:
        return f"Not measured: accuracy on any task, {speed}."
    return f"Not measured: any task but those above, {speed}."


def held_out_prompts(count: int, recipe: Recipe | None) -> str:
    """In words, with what else they were used for: figures on prompts that chose the iterate are a little too good."""
    chose = recipe is not None and recipe.rounds > 0 and recipe.calibrate.keep == "best"
    return f"the {count} held-out prompts that also chose the iterate" if chose else f"{count} held-out prompts"


def _answers(path: Path) -> dict[str, list[dict[str, Any]]]:
    import pyarrow.parquet as pq

    found: dict[str, list[dict[str, Any]]] = {}
    if path.is_file():
        for row in pq.read_table(path).to_pylist():
            found.setdefault(row["arm"], []).append(row)
    return found


def _kinds(path: Path) -> dict[str, str]:
    """What each task's points are: right answers, right facts, or wrong words."""
    if not path.is_file():
        return {}
    dense = json.loads(path.read_text(encoding="utf-8"))["arms"][DENSE]
    return {task: score["measure"] for task, score in dense["tasks"].items()}


def _task_measures(
    answers: Mapping[str, Sequence[Mapping[str, Any]]], kinds: Mapping[str, str], arm: str
) -> list[tuple[str, Measure]]:
    """Points over totals by task; and how many answers became right or wrong, of the tasks where they are either."""
    found, flips = [], []
    for task, kind in kinds.items():
        mine = [row for row in answers[arm] if row["task"] == task]
        points, totals = (np.array([row[name] for row in mine], dtype=float) for name in ("points", "total"))
        label = f"{task} WER % (less is better)" if kind == "word errors" else f"{task} %"
        found.append((label, Measure((Part(task, points, totals),), 100)))
        if arm != DENSE and kind == "accuracy":
            before = {row["item"]: row["points"] for row in answers[DENSE]}
            flipped = np.array([before[row["item"]] != row["points"] for row in mine], dtype=float)
            flips.append(Part(task, flipped, totals))
    return [*found, ("flips %", Measure(tuple(flips), 100))] if flips else found


def _behaviour_measures(states: States) -> list[tuple[str, Measure]]:
    """Prompts are the clusters: the states of one response are not independent."""
    prompts, where = np.unique(states.prompt, return_inverse=True)
    counts = np.bincount(where, minlength=len(prompts)).astype(float)

    def over(values: np.ndarray[Any, Any]) -> Part:
        return Part(
            "held-out prompts", np.bincount(where, weights=values.astype(float), minlength=len(prompts)), counts
        )

    return [("mismatch %", Measure((over(states.kind == MISMATCH),), 100)), ("KL", Measure((over(states.kl),)))]


def _shown(interval: Interval | None) -> str:
    if interval is None or interval.value is None:
        return "-"
    digits = 1 if interval.value >= 1 or interval.value == 0 else 4
    if interval.low is None:
        return f"{interval.value:.{digits}f}"
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def _explained(results: Results, columns: Sequence[str]) -> str:
    said = [f"In brackets: {CONFIDENCE:.0%} bootstrap intervals over items or prompts."]
    if results.items:
        said.append(f"Tasks: {results.items} test items in all.")
    if "flips %" in columns:
        said.append("flips: answers that turned right or wrong against the source.")
    if results.states:
        said.append(
            "mismatch, KL (nats): next-token decisions and distributions against the source, on the model's own answers "
            f"to {results.held_out} ({results.states:,} states)."
        )
    return " ".join(said)
