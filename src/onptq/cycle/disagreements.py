"""Where a server wrote another token than Q, as this package computes it, would have: how far apart the two are for Q."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from onptq.bank import Column, States, Trajectory
from onptq.cycle.compare import padded_responses, state_rows
from onptq.engine.prefixes import Prefixes

NEAR_TIE = 0.25  # logits: a gap below this is what other kernels and another order of sums explain
CLEAR_SHARE = 0.01  # of all states; from here on the server computes something else


@dataclass(frozen=True)
class Disagreements:
    """The states at which the rollout has another token than Q's choice, in the order of the bank."""

    prompt: Column  # int32
    t: Column  # int32, 1-based
    token: Column  # int32, what the server wrote
    quantized: Column  # int32, Q's choice
    gap: Column  # float32, z_Q(quantized) - z_Q(token), at least 0

    def __len__(self) -> int:
        return len(self.prompt)

    def figures(self, states: int) -> dict[str, float]:
        """Counts, near ties apart, of so many states."""
        near = int((self.gap < NEAR_TIE).sum())
        return {
            "server_near_ties": near,
            "server_clear": len(self) - near,
            "server_clear_percent": 100 * (len(self) - near) / states,
            "server_largest_gap": float(self.gap.max(initial=0.0)),
        }

    def write(self, path: Path) -> None:
        pq.write_table(pa.table({column.name: pa.array(getattr(self, column.name)) for column in fields(self)}), path)

    @classmethod
    def read(cls, path: Path) -> Disagreements:
        table = pq.read_table(path)
        return cls(**{name: table[name].to_numpy() for name in table.column_names})


@torch.no_grad()
def disagreements(
    prefixes: Prefixes,
    trajectories: Sequence[Trajectory],
    states: States,
    advance: Callable[[int], None] = lambda prompts: None,
) -> Disagreements:
    """The disagreements of a bank, each with its gap, by one more forward of Q over the responses that have some."""
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    differing = states.take(np.flatnonzero(states.token != states.quantized))
    rows = differing.rows_by_prompt()
    gaps = np.zeros(len(differing), np.float32)
    policy, sides = prefixes.policy, (differing.quantized, differing.token)

    def of_batch(index: int) -> tuple[list[int], list[float], int]:
        batch = prefixes.batches[index]
        places = [(row, int(one)) for row, prompt in enumerate(batch.prompts) for one in rows.get(prompt.ordinal, ())]
        if not places:
            return [], [], len(batch.prompts)
        hidden = prefixes.teacher_force(index, "Q", padded_responses(batch, by_prompt))[1]
        found: list[float] = []
        size = state_rows(policy.vocabulary)
        for chunk in (places[start : start + size] for start in range(0, len(places), size)):
            which = [one for _, one in chunk]
            steps = torch.from_numpy(differing.t[which] - 1).to(hidden.device, torch.long)
            logits = policy.logits(hidden[torch.tensor([row for row, _ in chunk], device=hidden.device), steps])
            pair = [torch.from_numpy(ids[which]).to(hidden.device, torch.long) for ids in sides]
            chosen, other = (logits.gather(-1, ids[:, None])[:, 0].float() for ids in pair)
            found += (chosen - other).tolist()
        return [one for _, one in places], found, len(batch.prompts)

    for which, found, prompts in prefixes.map_batches(of_batch):
        gaps[which] = found
        advance(prompts)
    return Disagreements(differing.prompt, differing.t, differing.token, differing.quantized, gaps)


def sentence(figures: Mapping[str, float]) -> str:
    """A round's figures in words."""
    count = int(figures["server_near_ties"] + figures["server_clear"])
    return (
        f"{count} of {int(figures['states'])} tokens of the server are not Q's own choice: {int(figures['server_near_ties'])} "
        f"near ties (below {NEAR_TIE} logits), {int(figures['server_clear'])} clear"
    )
