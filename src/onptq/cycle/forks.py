"""Both futures of forks: what they are judged by, and how blocks that carry states follow them.

Such a block forgets no token, so a fork is a row of its own: it begins with the states before its forced token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from onptq.bank import States
from onptq.cycle.compare import state_rows
from onptq.cycle.divergence import DIVERGENCES
from onptq.engine.prefixes import Prefixes, causal_mask
from onptq.models.decoder import KVCache, Tokens
from onptq.models.language_model import LanguageModel, Side

# Rows of the states, an array for each row of the tensors; both branches' tokens [B, H, N]; their divergences
# [B, H, N / 2]; and H_t [B, N / 2].
Followed = tuple[Sequence[np.ndarray], Tensor, Tensor, Tensor]


def forks(
    prefixes: Prefixes,
    index: int,
    states: States,
    rows_of: Sequence[np.ndarray],
    response: Tensor,
    horizon: int,
    side: Side,
    divergence: str,
) -> Iterator[Followed]:
    """The forks of a batch whose blocks carry states, those of equal t together.

    The responses are fed token by token. Where some fork, the caches of their rows are copied, one copy for each branch."""
    policy, batch = prefixes.policy, prefixes.batches[index]
    at: dict[int, list[tuple[int, int]]] = {}  # t -> row of the batch, row of the states
    for place, rows in enumerate(rows_of):
        for row in rows.tolist():
            at.setdefault(int(states.t[row]), []).append((place, row))
    positions = batch.response_positions(max(at) + horizon - 1)
    caches = {one: prefixes.prompt(index, one).cache for one in dict.fromkeys((side, "D"))}
    for t in range(1, max(at) + 1):
        if t > 1:
            for one, cache in caches.items():
                _feed(policy, one, cache, batch.real, response[:, t - 2 : t - 1], positions[..., t - 2 : t - 1])
        if t not in at:
            continue
        chosen = np.array([row for _, row in at[t]])
        places = torch.tensor([place for place, _ in at[t]], device=policy.device).repeat_interleave(2)
        here, real = positions[:, places, t - 1 :], batch.real[places]
        forced = np.stack((states.reference[chosen], states.competitor[chosen]), 1).reshape(-1, 1)
        tokens, cache = torch.from_numpy(forced).long().to(policy.device), caches[side].fork(places, horizon)
        for depth in range(horizon - 1):
            hidden = _feed(policy, side, cache, real, tokens[:, -1:], here[..., depth : depth + 1])
            tokens = torch.cat((tokens, greedy(policy, hidden)), dim=1)
        hidden = _feed(policy, "D", caches["D"].fork(places, horizon), real, tokens, here[..., :horizon])
        tokens = tokens.unflatten(0, (-1, 2)).transpose(1, 2)  # [F, H, 2]
        reach = common_horizon(tokens, policy.eos)
        streams = hidden.unflatten(0, (-1, 2)).transpose(1, 2)[:, :, :, None]  # [F, H, 2, 1, d]
        apart = divergences(policy, streams, reach, torch.ones_like(reach, dtype=torch.bool), divergence)
        yield list(chosen[:, None]), tokens, apart, reach


def _feed(
    policy: LanguageModel, side: Side, cache: KVCache, prompt: Tensor, tokens: Tensor, positions: Tensor
) -> Tensor:
    """The residual stream behind tokens [B, S] that follow everything in the cache; `prompt` [B, P] says what is padding."""
    real = torch.nn.functional.pad(prompt, (0, cache.length + tokens.shape[1] - prompt.shape[1]), value=True)
    with policy.speaking(side):
        return policy.run(Tokens(policy.embed(tokens), positions, causal_mask(real, cache.length)), cache)


def divergences(policy: LanguageModel, hidden: Tensor, reach: Tensor, real: Tensor, divergence: str) -> Tensor:
    """Of D's residual streams [B, H, 2, N / 2, d] of both branches, [B, H, N / 2]; 0 beyond the common valid horizon."""
    counted = torch.arange(hidden.shape[1], device=reach.device)[:, None] < reach[:, None]  # [B, H, N/2]
    counted &= real[:, None]
    reference, competitor = hidden[:, :, 0][counted], hidden[:, :, 1][counted]
    rows = state_rows(policy.vocabulary)
    each = torch.zeros(counted.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    each[counted] = torch.cat(
        [
            DIVERGENCES[divergence](
                policy.logits(reference[start : start + rows]), policy.logits(competitor[start : start + rows])
            )
            for start in range(0, max(1, len(reference)), rows)
        ]
    )
    return each


def common_horizon(tokens: Tensor, eos: frozenset[int]) -> Tensor:
    """H_t: s_{t+h} exists iff neither branch ended before it, the forced token included. [B, H, N] to [B, N / 2]."""
    ended = torch.isin(tokens, torch.tensor(sorted(eos), device=tokens.device, dtype=tokens.dtype))
    alive: Tensor = (ended.cumsum(1) == 0).unflatten(2, (2, -1))
    return alive.all(2).sum(1)


def greedy(policy: LanguageModel, hidden: Tensor) -> Tensor:
    """The likeliest tokens [B, S] behind residual streams [B, S, d]."""
    flat, rows = hidden.flatten(0, 1), state_rows(policy.vocabulary, models=1)
    parts = [policy.logits(flat[start : start + rows]).argmax(-1) for start in range(0, len(flat), rows)]
    return torch.cat(parts).view(hidden.shape[:2])
