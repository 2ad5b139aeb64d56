"""Margin flips on joint-critical states: one frozen bank per scheme, on which every candidate of that scheme is judged.

The paper judges variants of one initial checkpoint on that checkpoint's bank. Here methods of every kind are judged, and a bank
of any of them would hold the mistakes of just that one and of what starts from it; so it is plain rounding's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onptq.bank import States, Trajectory, read_trajectories
from onptq.evaluate.candidates import Built, Candidate, folder_name, parse_candidates
from onptq.evaluate.margins import joint_critical, margins_on
from onptq.evaluate.session import Hall
from onptq.evaluate.store import MARGINS, ROLLOUTS, STATES, THETA, parts
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe

VISITOR = "rtn"  # whose rollouts visit the bank's states


def bank_candidates(candidates: Sequence[Candidate], recipe: Recipe) -> dict[str, Built]:
    """By scheme, the candidate whose states are the bank; folders have no scheme and are judged on none."""
    schemes = dict.fromkeys(str(one.scheme) for one in candidates if isinstance(one, Built))
    found = parse_candidates([f"{VISITOR}:{scheme}" for scheme in schemes], recipe) if schemes else []
    return {str(one.scheme): one for one in found if isinstance(one, Built)}


def judge_critical(candidates: Sequence[Built], visitors: Mapping[str, Built], hall: Hall) -> None:
    """The margins of every candidate that has none yet."""
    for scheme, visitor in visitors.items():
        same = [one for one in candidates if str(one.scheme) == scheme]
        waiting = [one for one in same if not hall.run.has(*parts(one.name, MARGINS))]
        if not waiting:
            continue
        rollouts = read_trajectories(hall.run.file(*parts(visitor.name, ROLLOUTS)))
        bank = _bank(visitor, rollouts, hall)
        for one in waiting:
            _speak_as(one, hall)
            with hall.reporter.phase(f"Margins {one.name}", total=len(hall.prompts), unit="prompts") as bar:
                margins = margins_on(hall.prefixes(), rollouts, bank, bar.advance)
            with hall.run.writing(*parts(one.name, MARGINS)) as path:
                margins.write(path)


def _bank(visitor: Built, rollouts: Sequence[Trajectory], hall: Hall) -> States:
    home = ("critical", f"{folder_name(visitor.name)}.parquet")
    if not hall.run.has(*home):
        states = States.read(hall.run.file(*parts(visitor.name, STATES)))
        _speak_as(visitor, hall)
        with hall.reporter.phase(f"Branch {visitor.name}", total=len(states), unit="states") as bar:
            bank = joint_critical(hall.prefixes(), rollouts, states, advance=bar.advance)
        with hall.run.writing(*home) as path:
            bank.write(path)
    return States.read(hall.run.file(*home))


def _speak_as(one: Built, hall: Hall) -> None:
    policy = hall.policy(one.scheme)
    policy.freeze(Theta.load(hall.run.file(*parts(one.name, THETA)), hall.device), keep="floats")
    hall.prefixes().forget("Q")
