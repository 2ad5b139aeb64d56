"""What can be looked at of a run's own states, as `details` has it of a comparison's: held-out ones, and critical ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onptq.bank import Column, States, Trajectory
from onptq.cycle.branch import Seen
from onptq.cycle.calibrate import Holdout
from onptq.cycle.rounds import Cycle
from onptq.engine.prefixes import Prefixes
from onptq.evaluate.details import (
    MOST,
    OFF,
    Futures,
    branch_mismatches,
    keeps,
    likeliest,
    scored,
    worth_keeping,
    write_details,
)
from onptq.evaluate.store import DETAILS, MISMATCHES

HELD_OUT_MISMATCHES, HELD_OUT_DETAILS = f"final/{MISMATCHES}", f"final/{DETAILS}"
DETAILS_OF_ROUND = f"rounds/{{}}/{DETAILS}"


def keep_details(cycle: Cycle, held_out: Holdout | None, level: str) -> None:
    """Commit the likeliest tokens of both models in the held-out states of the present Q, and the futures of mismatches.

    Of several processes one does that alone, when the others have ended."""
    run, prefixes = cycle.run, cycle.inputs.held_out
    if held_out is None or prefixes is None or level == OFF:
        return
    if run.has(HELD_OUT_MISMATCHES) and keeps(run.file(HELD_OUT_DETAILS), level):
        return
    if run.ranks.size > 1:
        longest, batch = prefixes.max_tokens, cycle.inputs.tokens
        prefixes = Prefixes(prefixes.policy, held_out.prompts, max_tokens=longest, batch_tokens=batch, budget=0)
    rollouts = held_out.trajectories
    branched, futures = branch_mismatches(prefixes, rollouts, held_out.states, cycle.reporter, "held-out")
    with run.writing(HELD_OUT_MISMATCHES) as path:
        branched.write(path)
    states = scored(held_out.states, branched)
    chosen = states.take(worth_keeping(states, level))
    with cycle.reporter.phase("Details held-out", total=len(chosen), unit="states") as bar:
        details = likeliest(prefixes, rollouts, chosen, advance=bar.advance)
    with run.writing(HELD_OUT_DETAILS) as path:
        write_details(chosen, details, futures.by_state, level, path)


class RoundDetails:
    """Keeps what a level wants of the critical states of each round, while they are branched and before the update."""

    def __init__(self, level: str) -> None:
        self._level = level
        self._seen: list[tuple[Column, Column, Column]] = []

    def branching(self) -> Seen | None:
        """What branches are shown to; None where nothing is kept."""
        self._seen = []
        return None if self._level == OFF else lambda *future: self._seen.append(future)

    def keep(self, cycle: Cycle, k: int, trajectories: Sequence[Trajectory], states: States) -> None:
        """Commit the details of the critical states of round k, of those that weigh most where they are many."""
        seen, self._seen = self._seen, []
        if self._level == OFF or not states.critical.any():
            return
        rows = weightiest(states, MOST[self._level])
        chosen, futures = states.take(rows), Futures(states, cycle.policy.eos, cycle.continued_by)
        for branched, tokens, apart in seen:
            mine = np.isin(branched, rows)
            futures.see(branched[mine], tokens[mine], apart[mine])
        if not seen:  # nothing of the update depends on futures
            futures = Futures(chosen, cycle.policy.eos, cycle.continued_by)
            cycle.branch(f"Branch {k + 1}", cycle.prefixes, trajectories, chosen, futures.see)
        with cycle.reporter.phase(f"Details {k + 1}", total=len(chosen), unit="states") as bar:
            details = likeliest(cycle.prefixes, trajectories, chosen, advance=bar.advance)
        if cycle.run.ranks.is_first:
            with cycle.run.writing(DETAILS_OF_ROUND.format(k)) as path:
                write_details(chosen, details, futures.by_state, self._level, path)


def weightiest(states: States, most: int) -> Column:
    """The rows of the critical states, at most so many: those of the largest weight, then of the largest risk."""
    critical = np.flatnonzero(states.critical)
    order = np.lexsort((critical, -states.risk[critical], -states.weight[critical]))
    return np.sort(critical[order[:most]])
