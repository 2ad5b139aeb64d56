"""The facts of a run that its model card states, read from the run's own files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onptq.bank import MISMATCH, States, Trajectory, read_trajectories
from onptq.checkpoint.provenance import Calibration, Estimate, Provenance, Results, Update
from onptq.cycle.rounds import DENSE_ANSWERS, read_update
from onptq.data.calibration import Prompts
from onptq.evaluate.damage import response_measures
from onptq.evaluate.statistics import CONFIDENCE, Measure, Part, Resampler
from onptq.files import read_json
from onptq.recipe import Recipe
from onptq.run import CHOICE, INIT_KEPT, Run

HELD_OUT = "holdout.parquet"
HELD_OUT_ANSWERS = "holdout_trajectories.parquet"
RESULT = "this checkpoint"


def read_provenance(run: Run, recipe: Recipe, prompts: Prompts) -> Provenance:
    """The provenance of the weights, once all rounds of `run` are done."""
    updates = [read_update(run, k) for k in range(recipe.rounds)]
    return Provenance(
        recipe.method,
        recipe.init,
        tuple(Update(update["steps"], update["best_step"]) for update in updates),
        rule=recipe.select.rule if recipe.calibrate.gamma > 0 else None,
        learns_codes=recipe.calibrate.codes == "learned",
        calibration=Calibration.of(prompts),
        off_policy=recipe.follow.policy == "dense",
        init_kept=init_kept(run.home),
        why_init=_choice(run.home).get("why", ""),
    )


def read_results(home: Path, recipe: Recipe) -> Results | None:
    """The held-out figures of the run whose files are in `home`: RTN, init, result. None where nothing was held out."""
    resampler = Resampler(recipe.seed)
    files = {title: file for title, file in _tables(home, recipe) if file.is_file()}
    tables = {title: States.read(file) for title, file in files.items()}
    dense = home / DENSE_ANSWERS
    dense_answers = read_trajectories(dense) if dense.is_file() else None  # older runs have none
    if RESULT not in tables:
        return None
    rows: dict[str, dict[str, Estimate]] = {}
    for title, states in tables.items():
        measures = _measures(states)
        if dense_answers is not None:
            measures += _reworded(dense_answers, read_trajectories(files[title].with_name(HELD_OUT_ANSWERS)))
        intervals = ((name, resampler.estimate(measure)) for name, measure in measures)
        rows[title] = {name: Estimate(interval.value, interval.low, interval.high) for name, interval in intervals}
    states = tables[RESULT]
    held_out = held_out_prompts(len(np.unique(states.prompt)), recipe)
    return Results(rows, CONFIDENCE, len(states), held_out)


def init_kept(home: Path) -> bool:
    """Whether the run whose files are in `home` ends with its init."""
    return _choice(home).get("kept") == INIT_KEPT


def _choice(home: Path) -> dict[str, Any]:
    """The content of `final/choice.json`; empty where nothing was judged."""
    choice: dict[str, Any] = read_json(home.joinpath(*CHOICE)) if home.joinpath(*CHOICE).is_file() else {}
    return choice


def held_out_prompts(count: int, recipe: Recipe) -> str:
    """The held-out prompts in words. Figures on prompts that chose the iterate are a little too good."""
    chose = recipe.rounds > 0 and recipe.calibrate.keep == "best"
    return f"the {count} held-out prompts that also chose the iterate" if chose else f"{count} held-out prompts"


def _tables(home: Path, recipe: Recipe) -> Iterator[tuple[str, Path]]:
    if recipe.method != "rtn":
        yield "RTN", home / "rtn" / "final" / HELD_OUT
    if recipe.rounds:
        yield f"init ({recipe.init})", home / "rounds" / "0" / HELD_OUT
    yield RESULT, home / ("rounds/0" if init_kept(home) else "final") / HELD_OUT


def _measures(states: States) -> list[tuple[str, Measure]]:
    """Mismatch and KL. Prompts are the clusters: the states of one response are not independent."""
    prompts, where = np.unique(states.prompt, return_inverse=True)
    counts = np.bincount(where, minlength=len(prompts)).astype(float)

    def over(values: np.ndarray[Any, Any]) -> Part:
        sums = np.bincount(where, weights=values.astype(float), minlength=len(prompts))
        return Part("held-out prompts", sums, counts)

    return [("mismatch %", Measure((over(states.kind == MISMATCH),), 100)), ("KL", Measure((over(states.kl),)))]


def _reworded(dense: Sequence[Trajectory], quantized: Sequence[Trajectory]) -> list[tuple[str, Measure]]:
    """Responses in other tokens than the dense model's."""
    prompts = [one.prompt for one in quantized]
    return [("answers reworded %", response_measures(dense, quantized, prompts)["reworded"])]
