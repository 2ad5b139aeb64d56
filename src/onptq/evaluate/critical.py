"""Margins on joint-critical states: the same prefixes and the same two tokens for every candidate of a scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from onptq.bank import MISMATCH, Column, States, Trajectory
from onptq.cycle.branch import branch
from onptq.cycle.compare import padded_responses, pair_margin, state_rows
from onptq.engine.prefixes import Prefixes

HORIZON = 16  # tokens over which a consequence is measured here, whatever the calibration looks ahead
TOP = 0.2  # share of all states that count as consequential

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Margins:
    """One row per state of a bank, in its order."""

    prompt: Column  # int32
    t: Column  # int32
    dense: Column  # float32, m_D
    quant: Column  # float32, m_Q of this candidate for the bank's reference and competitor
    critical: Column  # bool, joint-critical

    def write(self, path: Path) -> None:
        pq.write_table(pa.table({name: pa.array(column) for name, column in vars(self).items()}), path)

    @classmethod
    def read(cls, path: Path) -> Margins:
        table = pq.read_table(path)
        return cls(**{name: table[name].to_numpy() for name in table.column_names})


def joint_critical(
    prefixes: Prefixes,
    trajectories: Sequence[Trajectory],
    states: States,
    *,
    horizon: int = HORIZON,
    advance: Advance = lambda states: None,
) -> States:
    """The states with those marked critical that are mismatches of a consequence in the top fifth of all states.

    Every state is branched for that.
    """
    branched = branch(prefixes, trajectories, states, horizon=horizon, everywhere=True, advance=advance)
    bar = np.quantile(branched.consequence, 1 - TOP) if len(states) else 0.0
    critical = (states.kind == MISMATCH) & (branched.horizon > 0) & (branched.consequence >= bar)
    return branched.with_columns(critical=critical)


@torch.no_grad()
def margins_on(
    candidate: Prefixes,
    trajectories: Sequence[Trajectory],
    bank: States,
    advance: Advance = lambda prompts: None,
) -> Margins:
    """Q's margins (Eq. 5) at the states of a bank, teacher-forced on the rollouts that visited them."""
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    quant = np.empty(len(bank), np.float32)
    size = state_rows(candidate.policy.vocabulary, models=1)

    def read_batch(index: int) -> int:
        batch = candidate.batches[index]
        hidden = candidate.teacher_force(index, "Q", padded_responses(batch, by_prompt))[1]  # [B, T, d]
        for place, prompt in enumerate(batch.prompts):
            of_prompt = np.flatnonzero(bank.prompt == prompt.ordinal)
            for rows in np.split(of_prompt, range(size, len(of_prompt), size)):
                steps, reference, competitor = (
                    torch.from_numpy(column[rows].astype(np.int64)).to(hidden.device)
                    for column in (bank.t - 1, bank.reference, bank.competitor)
                )
                margin = pair_margin(candidate.policy.logits(hidden[place, steps]), reference, competitor)
                quant[rows] = margin.float().cpu().numpy()
        return len(batch.prompts)

    for prompts in candidate.map_batches(read_batch):
        advance(prompts)
    return Margins(bank.prompt, bank.t, bank.margin_dense, quant, bank.critical)
