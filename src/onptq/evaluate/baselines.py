"""A finished run beside plain rounding and its static control, and answers that show the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onptq.checkpoint.source import Source
from onptq.data.prompts import Prompt
from onptq.evaluate.answers import Answer
from onptq.evaluate.candidates import DENSE, Candidate, MethodCandidate, RunCandidate
from onptq.evaluate.comparison import compare_models
from onptq.evaluate.scores import is_right
from onptq.evaluate.store import read_answers_of
from onptq.evaluate.summary import Report
from onptq.evaluate.tasks import Item
from onptq.progress import Reporter
from onptq.recipe import Recipe
from onptq.run import run_home

FOLDER = "comparison"  # in the run's folder


@dataclass(frozen=True)
class Example:
    """An item and every model's answer to it."""

    item: Item
    answers: Mapping[str, str]


def comparison_folder(out: Path) -> Path:
    """The folder of the comparison of the run whose checkpoint is in `out`."""
    return run_home(out) / FOLDER


def compare_with_baselines(
    source: Source,
    out: Path,
    recipe: Recipe,
    *,
    items: Sequence[Item],
    prompts: Sequence[Prompt],
    calibration: Sequence[Prompt],
    holdout: Sequence[Prompt],
    origin: str = "",
    reporter: Reporter | None = None,
) -> Report:
    """The finished run of `recipe` with its checkpoint in `out`, beside plain rounding and the static control of its steps.

    The control starts from the run's own theta^(0) and first rollouts. Results go to `comparison` in the run's folder.
    """
    home = run_home(out)
    names = ["rtn"] if recipe.method != "rtn" else []
    if recipe.rounds and recipe.calibrate.gamma > 0:
        names.append("static")
    followed = recipe.follow.policy == "quantized"
    candidates: list[Candidate] = [
        MethodCandidate(name, _control(recipe, name), home if name == "static" and followed else None) for name in names
    ]
    candidates.append(RunCandidate.of(recipe.method, out, recipe))
    return compare_models(
        source,
        candidates,
        comparison_folder(out),
        items=items,
        prompts=prompts,
        calibration=calibration,
        holdout=holdout,
        origin=origin,
        recipe=recipe,
        reporter=reporter,
    )


def _control(recipe: Recipe, method: str) -> Recipe:
    """The recipe with another method. Where a server writes the run's rollouts, those of a control's later rounds are ours."""
    return recipe.with_overrides({"method": method, "follow.engine": "own"})


def telling_examples(items: Sequence[Item], out: Path, method: str, limit: int = 3) -> list[Example]:
    """Items that the dense model answers right, plain rounding wrong, and the run right again; of every task in turn."""
    answers = read_answers_of(comparison_folder(out), [DENSE, "rtn", method])
    if len(answers) < 3:
        return []
    chosen = [item for item in items if _restored(item, answers, method)]
    by_task = {task: [item for item in chosen if item.task == task] for task in dict.fromkeys(i.task for i in chosen)}
    in_turn = [each[place] for place in range(len(chosen)) for each in by_task.values() if place < len(each)]
    return [Example(item, {name: by_id[item.id].text for name, by_id in answers.items()}) for item in in_turn[:limit]]


def _restored(item: Item, answers: Mapping[str, Mapping[str, Answer]], method: str) -> bool:
    dense, rounded, result = (is_right(answers[name][item.id]) for name in (DENSE, "rtn", method))
    return item.measure == "accuracy" and dense and not rounded and result
