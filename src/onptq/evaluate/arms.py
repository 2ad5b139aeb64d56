"""The arms of a run side by side: the same items and held-out prompts for the dense model and for every theta.

Each arm's answers and held-out states are kept as soon as they are whole, so that a killed run goes on after them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onptq.bank import States
from onptq.cycle.rounds import Cycle, bank_figures
from onptq.evaluate.answers import Answer, Questions, answer, read_answers, write_answers
from onptq.evaluate.items import Item
from onptq.evaluate.scores import compare_answers, score
from onptq.methods import METHODS
from onptq.models.language_model import Side
from onptq.models.processing import PromptProcessor
from onptq.progress import NamedReporter
from onptq.quantizer.theta import Theta

DENSE = "dense"
ANSWERS, COMPARISON = "answers.parquet", "comparison.json"
# With the same theta^(0) the first round's rollouts are the same in every arm; only what the update makes of them differs.
SHARED = ("trajectories.parquet", "holdout_trajectories.parquet", "holdout.parquet")


@dataclass(frozen=True)
class Arm:
    """One theta, and the cycle in whose folder its held-out states lie."""

    name: str
    theta: Theta
    cycle: Cycle


def make_arms(cycle: Cycle, init: Callable[[], Theta], theta: Theta) -> list[Arm]:
    """What a run is compared with: plain rounding, and the static control of the same steps; its own theta last. `init` gives
    theta^(0) to an arm that begins from it."""
    method, arms = cycle.recipe.method, []
    if method != "rtn":
        plain = METHODS["rtn"](cycle.policy, cycle.prompts, lambda blocks: None)
        arms.append(Arm("rtn", plain, _beside(cycle, "rtn")))
    if method == "onptq":
        control = _beside(cycle, "static")
        if control.recipe.rounds:
            _share_start(cycle, control)
        arms.append(Arm("static", control.rounds(init()), control))
    return [*arms, Arm(method, theta, cycle)]


def compare_arms(
    cycle: Cycle, arms: Sequence[Arm], items: Sequence[Item], processor: PromptProcessor
) -> dict[str, Any]:
    """`comparison.json` and `answers.parquet` of the run. Leaves the policy speaking as whichever arm came last."""
    run = cycle.run
    if not run.has(COMPARISON):
        exam = _Exam(cycle, items, processor)
        answers = {DENSE: exam.answers(DENSE, "D")}
        states: dict[str, States] = {}
        for arm in arms:
            arm.cycle.speak_as(arm.theta)
            answers[arm.name] = exam.answers(arm.name, "Q")
            found = arm.cycle.holdout("final", "held-out at the end")
            if found is not None:
                states[arm.name] = found.states
        with run.writing(ANSWERS) as path:
            write_answers(answers, path)
        run.write_json(summarize(items, answers, states), COMPARISON)
    for part in run.file().glob(".answers-*.parquet"):
        part.unlink()
    comparison: dict[str, Any] = run.read_json(COMPARISON)
    return comparison


def summarize(
    items: Sequence[Item], answers: Mapping[str, Sequence[Answer]], states: Mapping[str, States]
) -> dict[str, Any]:
    """Scores of every arm; of all but the dense one also what changed, and its on-policy states on held-out prompts."""
    arms: dict[str, Any] = {}
    for name, given in answers.items():
        arms[name] = score(items, given).to_dict()
        if name != DENSE:
            arms[name] |= compare_answers(items, answers[DENSE], given).to_dict()
            arms[name]["on_policy"] = bank_figures(states[name]) if name in states else None
    return {"items": len(items), "arms": arms}


class _Exam:
    """Items put to one arm after the other; whose answers are there already is not asked again."""

    def __init__(self, cycle: Cycle, items: Sequence[Item], processor: PromptProcessor) -> None:
        self.cycle, self.items, self.processor = cycle, items, processor

    @cached_property
    def questions(self) -> Questions:
        with self.cycle.reporter.phase("Encode items", total=len(self.items), unit="items") as bar:
            return Questions(
                self.cycle.policy,
                self.processor,
                self.items,
                batch_tokens=self.cycle.tokens,
                advance=bar.advance,
            )

    def answers(self, name: str, side: Side) -> list[Answer]:
        run, file = self.cycle.run, f".answers-{name}.parquet"
        if not run.has(file):
            questions = self.questions
            with self.cycle.reporter.phase(f"Answer {name}", total=len(self.items), unit="items") as bar:
                given = answer(questions, side, bar.advance)
            with run.writing(file) as path:
                write_answers({name: given}, path)
        return read_answers(run.file(file))[name]


def _beside(cycle: Cycle, method: str) -> Cycle:
    recipe = cycle.recipe.with_overrides({"method": method})
    return cycle.arm(recipe, cycle.run.arm(method), NamedReporter(cycle.reporter, method))


def _share_start(cycle: Cycle, other: Cycle) -> None:
    for name in SHARED:
        parts = ("rounds", "0", name)
        if cycle.run.has(*parts) and not other.run.has(*parts):
            with other.run.writing(*parts) as path:
                shutil.copyfile(cycle.run.file(*parts), path)
