"""The choice between the calibrated theta and the init, by fresh rollouts of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onptq.bank import States, Trajectory
from onptq.cycle.calibrate import Holdout
from onptq.cycle.rounds import Cycle
from onptq.evaluate.damage import loop_measures
from onptq.evaluate.metrics import PROMPTS, behaviour_measures, places, sums
from onptq.evaluate.statistics import Interval, Measure, Part, Resampler
from onptq.files import read_json, to_json
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import CALIBRATED, CHOICE, INIT_KEPT, Codec

CALIBRATED_ELSEWHERE, INIT_ELSEWHERE = "final/holdout_of_init.parquet", "final/init_holdout.parquet"
SIDES = ("init", "calibrated")
TV_BOUND = "same_states_tv_bound"
HELPED = "sqrt(KL / 2) on the same states fell beyond chance"


@dataclass(frozen=True)
class Visited:
    """The held-out states that the rollouts of one theta visit, as each of the two thetas decides there."""

    trajectories: Sequence[Trajectory]
    init: States
    calibrated: States


@dataclass(frozen=True)
class Choice:
    """The theta that a run ends with, why, and what calibration changed on held-out prompts: calibrated minus init, paired."""

    kept: str  # CALIBRATED or INIT_KEPT
    why: str
    differences: Mapping[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        shown = {name: interval.to_dict() for name, interval in self.differences.items()}
        return {"kept": self.kept, "why": self.why} | shown


def keep_better(cycle: Cycle, calibrated: Theta, read_init: Callable[[], Theta]) -> Theta:
    """`calibrated`, or the init where held-out prompts do not speak for calibration; Q is what the result folds to.

    Without held-out prompts, or with calibrate.keep=last, nothing is judged.
    """
    recipe, held_out = cycle.recipe, cycle.inputs.held_out
    if not recipe.rounds or recipe.calibrate.keep == "last" or held_out is None:
        return calibrated

    def judge() -> dict[str, Any]:
        after, before = _holdout(cycle, "final", "at the end"), _holdout(cycle, "rounds/0", "1")
        elsewhere = cycle.compare(
            CALIBRATED_ELSEWHERE, "Compare held-out on the init's responses", held_out, before.trajectories
        )
        cycle.inputs.speak_as(read_init())
        init = cycle.compare(INIT_ELSEWHERE, "Compare the init on held-out", held_out, after.trajectories)
        visits = (
            Visited(before.trajectories, before.states, elsewhere),
            Visited(after.trajectories, init, after.states),
        )
        return choose(*visits, Resampler(recipe.seed), looks(recipe)).to_dict()

    choice = cycle.run.step("/".join(CHOICE), Codec(_write_json, read_json), judge)
    theta = calibrated if choice["kept"] == CALIBRATED else read_init()
    cycle.inputs.speak_as(theta)
    return theta


def looks(recipe: Recipe) -> int:
    """How many iterates the held-out prompts chose from, beside the init."""
    return recipe.rounds * recipe.calibrate.evaluations


def choose(by_init: Visited, by_calibrated: Visited, resampler: Resampler, looks: int = 1) -> Choice:
    """The calibrated theta where sqrt(KL / 2) on the same states fell beyond chance, the KL fell with it, and nothing else
    speaks against it; else the init.

    The same states are those that either theta visits, both visits with equal weight. The root is Pinsker's bound of the total
    variation; unlike the KL itself it is not decided by the few largest states. The prompts have chosen the best of `looks`
    iterates, so its interval holds for all of them at once (Bonferroni). Worse beyond chance must be neither the
    mismatch there nor what each theta does on its own responses: KL, mismatch, loops, responses that are cut off. One prompt
    gives no interval: there both must have fallen."""
    prompts = [trajectory.prompt for trajectory in by_calibrated.trajectories]
    visits = (by_init, by_calibrated)
    before, after = ([_measures(getattr(one, side), prompts) for one in visits] for side in SIDES)
    strict = 1 - (1 - resampler.confidence) / looks
    differences = {
        f"same_states_{name}": same_states(
            [(was[name], now[name]) for was, now in zip(before, after, strict=True)],
            strict if name == "tv_bound" else resampler.confidence,
        )
        for name in ("tv_bound", "kl", "mismatch")
    }
    differences |= {name: resampler.difference(before[0][name], after[1][name]) for name in ("kl", "mismatch")}
    was, now = (_response_measures(one.trajectories, prompts) for one in visits)
    differences |= {name: resampler.difference(was[name], now[name]) for name in was}
    why = _against(differences)
    return Choice(INIT_KEPT, why, differences) if why else Choice(CALIBRATED, HELPED, differences)


def same_states(visits: Sequence[tuple[Measure, Measure]], confidence: float) -> Interval:
    """The second measure less the first, each of one part, on the same states: the mean over visits of the same prompts.

    Student's interval over the prompts, by the first-order change of the ratios with each prompt. A bootstrap of few prompts
    with heavy tails is too narrow for the small tails that are needed here."""
    from scipy.stats import t as student

    value, prompts = 0.0, len(visits[0][0].parts[0].numerator)
    influence = np.zeros(prompts)
    for first, second in visits:
        (was,), (now,) = first.parts, second.parts
        change, states = first.scale * (now.numerator - was.numerator), was.denominator
        ratio = change.sum() / states.sum()
        value += ratio / len(visits)
        influence += (change - ratio * states) / states.mean() / len(visits)
    if prompts < 2:
        return Interval(float(value))
    error = float(np.sqrt((influence**2).sum() / (prompts * (prompts - 1))))
    reach = error * float(student.ppf((1 + confidence) / 2, prompts - 1))
    return Interval(float(value), float(value - reach), float(value + reach))


def _against(differences: Mapping[str, Interval]) -> str:
    """The first reason against calibration, in words; empty without one."""
    bound, kl = differences[TV_BOUND], differences["same_states_kl"]
    highest = bound.value if bound.high is None else bound.high
    if highest is None or highest >= 0:
        return "sqrt(KL / 2) on the same states did not fall beyond chance"
    if kl.value is None or kl.value >= 0:
        return "KL on the same states did not fall"
    worse = {
        "same_states_mismatch": "mismatch on the same states rose beyond chance",
        "kl": "KL on its own responses rose beyond chance",
        "mismatch": "mismatch on its own responses rose beyond chance",
        "loops": "more of its responses end in a loop, beyond chance",
        "cut_off": "more of its responses do not end, beyond chance",
    }
    for name, why in worse.items():
        low = differences[name].low
        if low is not None and low > 0:
            return why
    return ""


def _measures(states: States, prompts: Sequence[int]) -> dict[str, Measure]:
    """Measures of states that are compared."""
    bound = np.sqrt(states.kl.astype(np.float64) / 2)
    total = partial(sums, places(states.prompt, prompts), len(prompts))
    part = Part(PROMPTS, total(bound), total(np.ones(len(bound))))
    return behaviour_measures(states, prompts) | {"tv_bound": Measure((part,))}


def _response_measures(trajectories: Sequence[Trajectory], prompts: Sequence[int]) -> dict[str, Measure]:
    """The shares of responses that end in a loop, and that are cut off."""
    finished = {one.prompt: one.finished for one in trajectories}
    cut_off = np.array([not finished[prompt] for prompt in prompts], np.float64)
    part = Part(PROMPTS, cut_off, np.ones(len(prompts)))
    return loop_measures(trajectories, prompts) | {"cut_off": Measure((part,), 100)}


def _holdout(cycle: Cycle, name: str, label: str) -> Holdout:
    holdout = cycle.holdout(name, f"held-out {label}")
    assert holdout is not None  # there are held-out prompts
    return holdout


def _write_json(value: Any, path: Path) -> None:
    path.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
