"""What a run looked at: its result, what that began as, plain rounding, and the calibration prompts of every round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onptq.bank import BANK, ROLLOUTS, Trajectory, read_trajectories
from onptq.bank import States as Bank
from onptq.cycle.rounds import DENSE_ANSWERS
from onptq.evaluate.details import read_details, scored
from onptq.evaluate.model_card import HELD_OUT, HELD_OUT_ANSWERS, init_kept
from onptq.evaluate.run_details import DETAILS_OF_ROUND, HELD_OUT_DETAILS, HELD_OUT_MISMATCHES
from onptq.page.contract import Kind
from onptq.page.provenance import how_made
from onptq.page.responses import Details, kinds
from onptq.recipe import Recipe
from onptq.registry import METHODS

ROUND = "round "
Answers = Mapping[int, Trajectory]


@dataclass(frozen=True)
class Visit:
    """Responses and their states, as one file each has them."""

    trajectories: Mapping[int, Trajectory]
    states: Bank
    rows: Mapping[int, Any]

    @classmethod
    def read(cls, trajectories: Path, states: Path) -> Visit:
        bank = Bank.read(states)
        return cls({one.prompt: one for one in read_trajectories(trajectories)}, bank, bank.rows_by_prompt())


@dataclass(frozen=True)
class Stage:
    """What a run looked at: one theta on one set of prompts, with what became of its states later."""

    name: str
    how: str
    visit: Visit
    later: Sequence[Visit] = ()
    details: Details = field(default_factory=dict)


def stages_of(home: Path, recipe: Recipe) -> Iterable[Stage]:
    """The result first, then what it began as, plain rounding, and the calibration prompts of every round."""
    rounds = range(recipe.rounds)
    held_out = [home / f"rounds/{k}" for k in rounds] + [home / "final"]
    visits = [Visit.read(one / HELD_OUT_ANSWERS, one / HELD_OUT) for one in held_out if (one / HELD_OUT).is_file()]
    init = METHODS.label(recipe.init)
    made = how_made({"scheme": recipe.scheme, "method": recipe.init})
    calibrated = how_made({"scheme": recipe.scheme, "method": recipe.method, "recipe": recipe.model_dump()})
    if visits and (not recipe.rounds or init_kept(home)):
        yield Stage("result", made, visits[0], visits[1:])
    elif visits:
        yield Stage("result", calibrated, visits[-1])
        yield Stage(f"init ({init})", made, visits[0], visits[1:])
    rtn = home / "rtn/final"
    if (rtn / HELD_OUT).is_file():
        how = how_made({"scheme": recipe.scheme, "method": "rtn"})
        yield Stage("rtn", how, Visit.read(rtn / HELD_OUT_ANSWERS, rtn / HELD_OUT))
    folders = [home / f"rounds/{k}" for k in (rounds if recipe.refresh else rounds[:1])]
    banks = [Visit.read(one / ROLLOUTS, one / BANK) for one in folders if (one / BANK).is_file()]
    for k, bank in enumerate(banks):
        whose = ", answered by the dense model" if recipe.follow.policy == "dense" else ""
        learned = "states that it selected, by their weights" if recipe.selects else "every state alike"
        learned = learned if recipe.calibrate.gamma else "prompt tokens alone"
        how = f"The calibration prompts of round {k + 1}{whose}; its update learns from {learned}."
        details = home / DETAILS_OF_ROUND.format(k)
        likeliest = read_details(details) if details.is_file() else {}
        yield Stage(f"{ROUND}{k + 1}", how, bank, banks[k + 1 :], likeliest)


def became(visit: Visit, prompt: int, later: Sequence[Visit]) -> list[list[Kind | None]]:
    """Of every state of a response, its kind in later visits; None where these did not come to the exact prefix."""
    tokens = visit.trajectories[prompt].tokens
    columns = [_kinds_there(tokens, other, prompt) for other in later]
    return [[column[place] for column in columns] for place in range(len(tokens))]


def _kinds_there(tokens: Sequence[int], other: Visit, prompt: int) -> list[Kind | None]:
    if prompt not in other.trajectories or prompt not in other.rows:
        return [None] * len(tokens)
    theirs, there = other.trajectories[prompt].tokens, kinds(other.states.kind[other.rows[prompt]])
    column: list[Kind | None] = []
    for place in range(len(tokens)):
        same = place < len(there) and tokens[:place] == theirs[:place]
        column.append(there[place] if same else None)
    return column


def detailed(stage: Stage, home: Path) -> Stage:
    """The result with the details of its states; other stages as they are."""
    files = home / HELD_OUT_MISMATCHES, home / HELD_OUT_DETAILS
    if stage.name != "result" or not all(file.is_file() for file in files):
        return stage
    visit = replace(stage.visit, states=scored(stage.visit.states, Bank.read(files[0])))
    return replace(stage, visit=visit, details=read_details(files[1]))


def dense_answers(home: Path, recipe: Recipe) -> Answers:
    """The dense model's own answers, by prompt: to held-out prompts, and to calibration prompts where it answered these."""
    files = [home / DENSE_ANSWERS]
    if recipe.follow.policy == "dense" and recipe.follow.sampling == "greedy":
        files.append(home / "rounds/0" / ROLLOUTS)
    return {one.prompt: one for file in files if file.is_file() for one in read_trajectories(file)}
