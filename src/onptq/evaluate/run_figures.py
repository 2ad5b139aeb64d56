"""The figures of a run's summary: every round, and held-out prompts under plain rounding, the init and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onptq import methods
from onptq.bank import Trajectory
from onptq.cycle.calibrate import Holdout
from onptq.cycle.expert_tokens import expert_summary
from onptq.cycle.rounds import Cycle, bank_figures
from onptq.quantizer.theta import Theta
from onptq.run import CALIBRATED, CHOICE, INIT_KEPT


@dataclass(frozen=True)
class Figures:
    """What was measured of a run, and the answers to held-out prompts that it comes from."""

    summary: dict[str, Any]
    dense: Sequence[Trajectory]  # of the dense model
    result: Holdout | None  # of the present Q

    @property
    def no_help(self) -> str | None:
        """A sentence where calibration did not help, so that the init was kept."""
        if self.summary["helped"] is not False:
            return None
        before, after = (self.summary["holdout"][side] for side in ("initial", "calibrated"))
        why = self.summary["choice"].get("why", "it was no better")
        return (
            f"calibration did not help, so the init is kept: on {len(self.dense)} held-out prompts {why}. "
            f"On the responses of each, mismatch went from {before['mismatch_percent']:.2f}% to "
            f"{after['mismatch_percent']:.2f}%, KL from {before['kl']:.5f} to {after['kl']:.5f}. "
            "More prompts or longer answers (follow.max_tokens) may help; --set calibrate.keep=last and "
            "another --out take the calibrated weights all the same"
        )


def measure(cycle: Cycle, theta: Theta) -> Figures:
    ranks, run, recipe = cycle.run.ranks, cycle.run, cycle.recipe
    choice = ranks.lead(lambda: run.read_json(*CHOICE) if run.has(*CHOICE) else None)
    calibrated = cycle.holdout("final", "held-out at the end")
    dense = cycle.answer_holdout()
    before = cycle.holdout("rounds/0", "held-out 1") if recipe.rounds else calibrated
    after = before if choice is not None and choice["kept"] == INIT_KEPT else calibrated
    rounded = _round_to_nearest(cycle, theta) if recipe.method != "rtn" else after
    sides = {"rtn": rounded, "initial": before, "calibrated": calibrated, "final": after}
    summary = {
        "rounds": ranks.lead(lambda: [cycle.figures(k) for k in range(recipe.rounds)]),
        "holdout": {name: None if one is None else _held_out(one, dense) for name, one in sides.items()},
        "choice": choice,
        "helped": None if choice is None else choice["kept"] == CALIBRATED,
    }
    experts = expert_summary(cycle)
    return Figures(summary | ({"experts": experts} if experts else {}), dense, after)


def _held_out(one: Holdout, dense: Sequence[Trajectory]) -> Mapping[str, float]:
    tokens = {each.prompt: each.tokens for each in dense}
    reworded = sum(each.tokens != tokens[each.prompt] for each in one.trajectories) / len(one.trajectories)
    return bank_figures(one.states) | {"reworded_percent": 100 * reworded}


def _round_to_nearest(cycle: Cycle, theta: Theta) -> Holdout | None:
    """The held-out prompts under plain rounding; Q is what `theta` folds to again afterwards."""
    if cycle.inputs.held_out is None:
        return None
    cycle.inputs.speak_as(methods.run("rtn", cycle.policy, cycle.inputs.prompts, lambda blocks: None))
    rounded = cycle.holdout("rtn/final", "held-out of RTN")
    cycle.inputs.speak_as(theta)
    return rounded
