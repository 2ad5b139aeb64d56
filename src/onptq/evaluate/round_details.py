"""What can be looked at of a round's critical states, beside its bank: both futures and the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onptq.bank import Column, States, Trajectory
from onptq.cycle.branch import Seen
from onptq.cycle.rounds import Cycle
from onptq.evaluate.details import MOST, OFF, Futures, likeliest, write_details

DETAILS_OF_ROUND = "rounds/{}/details.parquet"


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
                write_details(chosen, details, futures.found, self._level, path)


def weightiest(states: States, most: int) -> Column:
    """The rows of the critical states, at most so many: those of the largest weight, then of the largest risk."""
    critical = np.flatnonzero(states.critical)
    order = np.lexsort((critical, -states.risk[critical], -states.weight[critical]))
    return np.sort(critical[order[:most]])
