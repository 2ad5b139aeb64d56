"""The choice between the calibrated theta and the init, by fresh rollouts of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onptq.bank import States
from onptq.cycle.calibrate import Holdout
from onptq.cycle.rounds import Cycle
from onptq.evaluate.metrics import behaviour_measures
from onptq.evaluate.statistics import Interval, Resampler
from onptq.quantizer.theta import Theta
from onptq.run import CALIBRATED, CHOICE, INIT_KEPT

JUDGED = ("kl", "mismatch")


@dataclass(frozen=True)
class Choice:
    """The theta that a run ends with, and what calibration changed on held-out prompts: calibrated minus init, paired."""

    kept: str  # CALIBRATED or INIT_KEPT
    differences: Mapping[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        return {"kept": self.kept} | {name: interval.to_dict() for name, interval in self.differences.items()}


def keep_better(cycle: Cycle, calibrated: Theta, read_init: Callable[[], Theta]) -> Theta:
    """`calibrated`, or the init where held-out prompts speak against calibration; Q is what the result folds to.

    Both are judged by rollouts of their own. Without held-out prompts, or with calibrate.keep=last, nothing is judged.
    """
    recipe = cycle.recipe
    if not recipe.rounds or recipe.calibrate.keep == "last":
        return calibrated
    after = cycle.holdout("final", "held-out at the end")
    before = cycle.holdout("rounds/0", "held-out 1")
    if before is None or after is None:
        return calibrated
    choice = choose(before.states, after, recipe.seed)
    cycle.run.write_json(choice.to_dict(), *CHOICE)
    if choice.kept == CALIBRATED:
        return calibrated
    init = read_init()
    cycle.inputs.speak_as(init)
    return init


def choose(before: States, after: Holdout, seed: int) -> Choice:
    """The calibrated theta where KL fell beyond chance and mismatch did not rise beyond chance; else the init.

    One prompt gives no interval: there the KL itself must have fallen."""
    prompts = [trajectory.prompt for trajectory in after.trajectories]
    resampler = Resampler(seed)
    measures = [behaviour_measures(states, prompts) for states in (before, after.states)]
    differences = {name: resampler.difference(*(each[name] for each in measures)) for name in JUDGED}
    kl, mismatch = (differences[name] for name in JUDGED)
    harmful = mismatch.low is not None and mismatch.low > 0
    highest = kl.value if kl.high is None else kl.high
    fell = highest is not None and highest < 0
    return Choice(CALIBRATED if fell and not harmful else INIT_KEPT, differences)
