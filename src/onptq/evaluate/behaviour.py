"""How a model behaves on prompts: its own greedy rollouts, held against the dense model on exactly the same token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from onptq.bank import AGREE, MISMATCH, NEAR_MISS, Column, States, Trajectory
from onptq.cycle.compare import decide, padded_responses, state_rows
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError

Advance = Callable[[int], None]


@torch.no_grad()
def compare_rollouts(
    dense: Prefixes, candidate: Prefixes, trajectories: Sequence[Trajectory], advance: Advance = lambda prompts: None
) -> States:
    """Teacher-forced on the candidate's rollouts: one row per state, as `cycle.compare` has them.

    Both may be the same prefixes, of one policy that speaks as D and as Q, or those of two models with their own
    embeddings and heads.
    """
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    if candidate is not dense:
        dense.batch_like(candidate)

    def compare_batch(index: int) -> States:
        batch = dense.batches[index]
        ordinals = [prompt.ordinal for prompt in batch.prompts]
        if ordinals != [prompt.ordinal for prompt in candidate.batches[index].prompts]:
            raise ValueError("the two models' prompts are batched differently")
        response = padded_responses(batch, by_prompt)
        lengths = torch.tensor([len(by_prompt[ordinal].tokens) for ordinal in ordinals], device=response.device)
        visited = torch.arange(response.shape[1], device=response.device) < lengths[:, None]  # [B, T]
        rows, steps = visited.nonzero(as_tuple=True)
        columns = _decisions(
            dense,
            candidate,
            dense.teacher_force(index, "D", response)[1],
            candidate.teacher_force(index, "Q", response)[1],
            visited,
        )
        return States.compared(
            prompt=np.array(ordinals, np.int32)[rows.cpu().numpy()],
            t=steps.int().cpu().numpy() + 1,
            token=response[visited].int().cpu().numpy(),
            **columns,
        )

    parts = []
    for part in dense.map_batches(compare_batch, *([] if candidate is dense else [candidate])):
        parts.append(part)
        advance(len(np.unique(part.prompt)))
    return States.concatenate(parts)


def _decisions(
    dense: Prefixes, candidate: Prefixes, hidden_dense: Tensor, hidden_quant: Tensor, visited: Tensor
) -> dict[str, Column]:
    """Every column that two rows of logits decide, chunk by chunk: [states x vocabulary] never exists whole."""
    size = state_rows(dense.policy.vocabulary)
    found: dict[str, list[Column]] = {}
    chunks = zip(hidden_dense[visited].split(size), hidden_quant[visited].split(size), strict=True)
    for rows_dense, rows_quant in chunks:
        z_quant = candidate.policy.logits(rows_quant)
        if not bool(torch.isfinite(z_quant).all()):
            raise OnPTQError("the model gives logits that are not finite: its weights or its settings are broken")
        decisions = decide(dense.policy.logits(rows_dense), z_quant)
        for name in ("reference", "competitor", "quantized"):
            found.setdefault(name, []).append(getattr(decisions, name).int().cpu().numpy())
        for name in ("margin_dense", "margin_quant", "erosion", "js", "kl"):
            found.setdefault(name, []).append(getattr(decisions, name).float().cpu().numpy())
    columns = {name: np.concatenate(chunks) for name, chunks in found.items()}
    mismatch = columns["quantized"] != columns["reference"]
    kind = np.where(mismatch, MISMATCH, np.where(columns["erosion"] > 0, NEAR_MISS, AGREE))
    return columns | {"kind": kind.astype(np.int8)}


def per_prompt(states: States, prompts: Sequence[int]) -> dict[str, Column]:
    """Sums over each prompt's states, in the order of `prompts`: what a cluster bootstrap by prompt resamples.

    The first fork is the first state whose decision differs; up to it both models, answering alone, say the same.
    States before it, the fork itself and states after it are summed apart.
    """
    order = {prompt: place for place, prompt in enumerate(prompts)}
    place = np.array([order[prompt] for prompt in states.prompt.tolist()], np.int64)
    count = len(prompts)

    def total(values: Column) -> Column:
        return np.bincount(place, values.astype(np.float64), minlength=count)

    mismatch = states.kind == MISMATCH
    fork = np.full(count, np.inf)
    np.minimum.at(fork, place[mismatch], states.t[mismatch])
    lengths = total(np.ones(len(states)))
    sides = {
        "before_fork": states.t < fork[place],
        "at_fork": states.t == fork[place],
        "after_fork": states.t > fork[place],
    }
    sums = {
        "states": lengths,
        "mismatches": total(mismatch),
        "erosion": total(states.erosion),
        "js": total(states.js),
        "kl": total(states.kl),
        "common": np.where(np.isfinite(fork), fork - 1, lengths),
        "forked": np.isfinite(fork).astype(np.float64),
    }
    for side, chosen in sides.items():
        sums |= {
            f"states_{side}": total(chosen),
            f"js_{side}": total(states.js * chosen),
            f"kl_{side}": total(states.kl * chosen),
        }
    return sums
