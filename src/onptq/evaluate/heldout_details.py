"""What can be looked at of a run's own held-out states, as `details` has it of a comparison's."""

from __future__ import annotations

import numpy as np

from onptq.bank import MISMATCH
from onptq.cycle.branch import branch
from onptq.cycle.calibrate import Holdout
from onptq.cycle.rounds import Cycle
from onptq.engine.prefixes import Prefixes
from onptq.evaluate.critical import HORIZON
from onptq.evaluate.details import OFF, Futures, keeps, likeliest, scored, worth_keeping, write_details
from onptq.evaluate.store import DETAILS, MISMATCHES

HELD_OUT_MISMATCHES, HELD_OUT_DETAILS = f"final/{MISMATCHES}", f"final/{DETAILS}"


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
    mismatches = held_out.states.take(np.flatnonzero(held_out.states.kind == MISMATCH))
    futures = Futures(mismatches, cycle.policy.eos)
    with cycle.reporter.phase("Branch held-out", total=len(mismatches), unit="mismatches") as bar:
        branched = branch(
            prefixes,
            held_out.trajectories,
            mismatches,
            horizon=HORIZON,
            side="D",
            count_forced=True,
            seen=futures.see,
            advance=bar.advance,
        )
    states = scored(held_out.states, branched)
    chosen = states.take(worth_keeping(states, level))
    with cycle.reporter.phase("Details held-out", total=len(chosen), unit="states") as bar:
        details = likeliest(prefixes, held_out.trajectories, chosen, advance=bar.advance)
    with run.writing(HELD_OUT_MISMATCHES) as path:
        branched.write(path)
    with run.writing(HELD_OUT_DETAILS) as path:
        write_details(chosen, details, futures.found, level, path)
