"""Figure 3: mismatch against consequence, concentration of risk, and migration of the selected states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onptq.bank import Column, States, Trajectory, read_trajectories
from onptq.evaluate.statistics import Interval
from onptq.evaluate.store import path_of
from onptq.reproduce.banks import Bank, bank_of_init, make_theta
from onptq.reproduce.common import differing_setup, percent
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.record import Cell, Claim, Picture, Result, Table, all_of, as_mark, below, shown
from onptq.reproduce.resampling import Statistic, mass_of_top, resampled, rows_of_mass, share
from onptq.run import Run

NAME, TITLE, SCHEME = "risk-properties", "Properties of the risk (Figure 3)", "W4A8"
TOPS, MASSES = (0.01, 0.05, 0.10, 0.20), (0.5, 0.8)
PER_PROMPT = 2  # selected states of a prompt in each round of the migration
FEW, SMALL_LIFT = 0.5, 1.5  # what "sparse", "concentrated" and "weakly" are taken to mean here


@dataclass(frozen=True)
class Mismatches:
    """How mismatches and high consequence meet, as shares of the states."""

    states: int
    mismatch: Interval
    joint: Interval
    high: Interval
    high_of_mismatch: Interval
    lift: Interval  # how many times likelier high consequence is at a mismatch


@dataclass(frozen=True)
class Concentration:
    """The risk that the riskiest states hold, and the states that hold most of the risk."""

    mass: Mapping[float, Interval]
    states: Mapping[float, Interval]


@dataclass(frozen=True)
class Migration:
    """The selected states of one round that are selected in the next."""

    selected: int
    exact: Interval  # the same prompt and the same tokens before
    timestep: Interval  # the same prompt and the same t


def mismatches(bank: Bank, seed: int = 0) -> Mismatches:
    """Figure 3 (a) and (b), over the states with valid branches."""
    usable = bank.usable
    mismatch, high = usable.mismatch, usable.high
    of_mismatch, of_all = share(high, mismatch), share(high)
    ratio: Statistic = lambda rows: of_mismatch(rows) / (of_all(rows) or np.nan)  # noqa: E731
    intervals = resampled(
        (share(mismatch), share(mismatch & high), of_all, of_mismatch, ratio), usable.states.prompt, seed
    )
    return Mismatches(len(usable.states), *intervals)


def concentration(bank: Bank, seed: int = 0) -> Concentration:
    """Figure 3 (c)."""
    usable = bank.usable
    risk = usable.states.risk
    statistics = [*(mass_of_top(risk, top) for top in TOPS), *(rows_of_mass(risk, mass) for mass in MASSES)]
    intervals = resampled(statistics, usable.states.prompt, seed)
    mass, states = intervals[: len(TOPS)], intervals[len(TOPS) :]
    return Concentration(dict(zip(TOPS, mass, strict=True)), dict(zip(MASSES, states, strict=True)))


Round = tuple[States, Sequence[Trajectory]]


def migration(updates: Sequence[tuple[Round, Round]], seed: int = 0) -> Migration:
    """Figure 3 (d): which of the states selected before an update are selected after it; over the updates of all seeds."""
    exact, timestep, prompts = [], [], []
    for before, after in updates:
        chosen, again = _selected(*before), _selected(*after)
        prefixes, steps = set(again), {(prompt, t) for prompt, t, _ in again}
        exact += [key in prefixes for key in chosen]
        timestep += [key[:2] in steps for key in chosen]
        prompts += [prompt for prompt, _, _ in chosen]
    shares = (share(np.array(exact, np.bool_)), share(np.array(timestep, np.bool_)))
    return Migration(len(prompts), *resampled(shares, np.array(prompts, np.int64), seed))


def _selected(states: States, trajectories: Sequence[Trajectory]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Prompt, t and the tokens before it of every selected state."""
    tokens = {one.prompt: one.tokens for one in trajectories}
    rows: Column = np.flatnonzero(states.critical)
    pairs = zip(states.prompt[rows].tolist(), states.t[rows].tolist(), strict=True)
    return [(prompt, t, tokens[prompt][: t - 1]) for prompt, t in pairs]


def run(experiment: Experiment) -> Result:
    scheme = experiment.settings.scheme or SCHEME
    with bank_of_init(experiment, scheme) as init:
        session, bank = init.session, init.bank
        changes = {"rounds": 2, "select.per_prompt": PER_PROMPT}
        updates = []
        for one in experiment.cycles("onptq two states per prompt", scheme, changes):
            make_theta(session, one)
            arm = session.run.arm("/".join(path_of(one.name, "run")))
            updates.append((read_round(arm, 0), read_round(arm, 1)))
    seed = experiment.settings.seed
    return result(
        mismatches(bank, seed),
        concentration(bank, seed),
        migration(updates, seed),
        experiment.settings.describe(),
    )


def read_round(run: Run, k: int) -> tuple[States, list[Trajectory]]:
    return (
        run.read(f"rounds/{k}/bank.parquet", States.read),
        run.read(f"rounds/{k}/trajectories.parquet", read_trajectories),
    )


def result(shares: Mismatches, mass: Concentration, moved: Migration, settings: Mapping[str, Any]) -> Result:
    there = paper(NAME)
    claims = [
        Claim(
            f"High-consequence mismatches are sparse: fewer than {FEW:.0%} of the mismatches",
            f"{there['high_of_mismatch']}% of the mismatches; {there['mismatch']}% of states are mismatches, "
            f"{there['joint']}% both",
            f"{percent(shares.high_of_mismatch)} of the mismatches; {percent(shares.mismatch)} and {percent(shares.joint)}",
            below(shares.high_of_mismatch, FEW),
        ),
        Claim(
            f"A mismatch weakly enriches future consequence: less than {SMALL_LIFT} times",
            f"{there['high']}% of all states, {there['high_of_mismatch']}% of mismatches",
            f"{percent(shares.high)}, {percent(shares.high_of_mismatch)}: {shown(shares.lift)} times",
            below(shares.lift, SMALL_LIFT),
        ),
        Claim(
            f"Risk is concentrated: fewer than {FEW:.0%} of the states hold 80% of it",
            f"{there['states_of_mass'][50]}% hold 50%, {there['states_of_mass'][80]}% hold 80%",
            f"{percent(mass.states[0.5])} hold 50%, {percent(mass.states[0.8])} hold 80%",
            below(mass.states[0.8], FEW),
        ),
        Claim(
            f"Selected states migrate after one update: fewer than {FEW:.0%} are selected again",
            f"{there['retention']['exact']}% by prefix, {there['retention']['timestep']}% by timestep",
            f"{percent(moved.exact)} by prefix, {percent(moved.timestep)} by timestep, of {moved.selected}",
            all_of([below(moved.exact, FEW), below(moved.timestep, FEW)]),
        ),
    ]
    rows: list[list[Cell]] = [
        ["mismatches, % of states", there["mismatch"], percent(shares.mismatch)],
        ["mismatches of high consequence, % of states", there["joint"], percent(shares.joint)],
        ["high consequence, % of states", there["high"], percent(shares.high)],
        ["high consequence, % of mismatches", there["high_of_mismatch"], percent(shares.high_of_mismatch)],
        *([f"risk in the top {top:.0%}, %", there["mass"][round(100 * top)], percent(mass.mass[top])] for top in TOPS),
        *(
            [f"states that hold {held:.0%} of the risk, %", there["states_of_mass"][round(100 * held)], percent(one)]
            for held, one in mass.states.items()
        ),
        ["selected again, exact prefix, %", there["retention"]["exact"], percent(moved.exact)],
        ["selected again, prompt and timestep, %", there["retention"]["timestep"], percent(moved.timestep)],
    ]
    marks = [
        *as_mark("mismatch", "here", shares.mismatch),
        *as_mark("mismatch and consequential", "here", shares.joint),
        *as_mark("consequential", "here", shares.high),
        *as_mark("consequential, of mismatches", "here", shares.high_of_mismatch),
        *as_mark("states with 50% of the risk", "here", mass.states[0.5]),
        *as_mark("states with 80% of the risk", "here", mass.states[0.8]),
        *as_mark("selected again, exact prefix", "here", moved.exact),
        *as_mark("selected again, timestep", "here", moved.timestep),
    ]
    differs = [
        *differing_setup(settings, "Qwen2.5-VL-7B-Instruct", "767 states of 32 prompts", graded=False),
        f"{shares.states} states have valid branches: both futures have at least one state to compare.",
        f'The thresholds of "sparse", "concentrated" ({FEW:.0%}) and "weakly" ({SMALL_LIFT} times) are ours.',
        "The bank is that of the init, whatever the seeds; the migration is from the first round of OnPTQ to its second, "
        "with several seeds over the selected states of all of them.",
    ]
    table = Table("Shares in percent, 95% intervals over prompts", ("", "paper", "here"), rows)
    return Result(NAME, TITLE, claims, [table], differs, Picture(TITLE, "share", marks), settings)
