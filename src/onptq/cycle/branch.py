"""Branch (Eq. 8): force the two competing tokens, let Q continue both, measure how far apart D sees the two futures.

All branches of a trajectory form a tree on its cached prefix: a branch token sees the prompt, the response tokens
before its state, and its own branch. Nothing is prefilled again. Where blocks carry states, `cycle.forks` takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onptq.bank import Column, States, Trajectory
from onptq.cycle.compare import padded_responses
from onptq.cycle.forks import Followed, common_horizon, divergences, forks, greedy
from onptq.engine.prefixes import Prefix, Prefixes
from onptq.models.decoder import Tokens, TreeCache
from onptq.models.encoding import PromptBatch
from onptq.models.language_model import LanguageModel, Side

TREE_TOKENS = 16384  # branch tokens that are alive at a time, over the whole batch
ROW_TOKENS = 512  # and in one row: they attend to one another under a mask, so more would cost quadratically
FARTHEST = math.log(2)  # the largest JS divergence

# What is seen of branches: rows of the states, both futures' tokens [rows, 2, H], forced ones first, reference before
# competitor, and the divergence of D behind each of them [rows, H], 0 beyond the common valid horizon.
Seen = Callable[[Column, Column, Column], None]
Branched = tuple[Column, ...]  # rows of the states, their A_t and their H_t; tokens and divergence where they are seen


@dataclass(frozen=True)
class Forest:
    """The forks of a batch of trajectories. Each row holds its R branches first, then its C branches, N in all."""

    forced: Tensor  # [B, N] the forced tokens
    state: Tensor  # [B, N] t of the branch's state, 1-based
    real: Tensor  # [B, N] False where a row has fewer forks than the widest

    @classmethod
    def of(cls, batch: PromptBatch, states: States, rows: Sequence[np.ndarray]) -> Forest:
        """`rows[b]`: the states of prompt b that fork here."""
        device, width = batch.embeds.device, max(len(row) for row in rows)
        forced = torch.zeros(len(rows), 2, width, dtype=torch.long)
        state = torch.ones(len(rows), 2, width, dtype=torch.long)
        real = torch.zeros(len(rows), 2, width, dtype=torch.bool)
        for index, row in enumerate(rows):
            count = len(row)
            forced[index, 0, :count] = torch.from_numpy(states.reference[row])
            forced[index, 1, :count] = torch.from_numpy(states.competitor[row])
            state[index, :, :count] = torch.from_numpy(states.t[row])
            real[index, :, :count] = True
        return cls(*(tensor.flatten(1).to(device) for tensor in (forced, state, real)))

    @property
    def branches(self) -> int:
        return self.forced.shape[1]

    def positions(self, batch: PromptBatch, depth: int) -> Tensor:
        """Positions [A, B, depth * N] of the branch tokens at depths 0..depth-1, depth-major: b_0 has that of y_t."""
        place = batch.next_position[:, None] + self.state - 1
        levels = place[:, None] + torch.arange(depth, device=place.device)[:, None]
        return levels.flatten(1).expand(batch.positions.shape[0], -1, -1)

    def mask(self, batch: PromptBatch, response: int, first: int, stop: int) -> Tensor:
        """The mask of branch tokens at depths first..stop-1 over the prompt, `response` cached tokens and all branches.

        Each sees the prompt, the response up to y_{t-1}, and its own branch."""
        device, branches = self.state.device, self.branches
        before = torch.arange(1, response + 1, device=device) < self.state[..., None]  # [B, N, response]
        prompt = batch.real[:, None].expand(-1, branches, -1)
        prefix = torch.cat((prompt, before), dim=-1).repeat(1, stop - first, 1)
        query = torch.arange(first * branches, stop * branches, device=device)[:, None]
        key = torch.arange(stop * branches, device=device)
        own = (query % branches == key % branches) & (key <= query)
        return torch.cat((prefix, own.expand(len(prefix), -1, -1)), dim=-1)[:, None]


@torch.no_grad()
def branch(
    prefixes: Prefixes,
    trajectories: Sequence[Trajectory],
    states: States,
    *,
    horizon: int = 4,
    side: Side = "Q",
    divergence: str = "js",
    eos_as_max: bool = False,
    count_forced: bool = False,
    everywhere: bool = False,
    seen: Seen | None = None,
    advance: Callable[[int], None] = lambda candidates: None,
) -> States:
    """A_t and H_t of every candidate, or with `everywhere` of every state; the other columns are passed on.

    Eq. 8 lets Q continue the forced tokens; with another `side`, D does. `seen` is called with the futures, on every rank with
    those of all.
    """
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    consequence, valid = states.consequence.copy(), states.horizon.copy()
    forked = np.ones(len(states), np.bool_) if everywhere else states.candidates
    done = shown = 0

    def show(count: int) -> None:
        nonlocal shown
        advance(max(0, count - shown))  # a batch that did not fit is branched again, but not counted again
        shown = max(shown, count)

    def branch_batch(index: int) -> list[Branched]:
        batch, here = prefixes.batches[index], 0
        results: list[Branched] = []
        rows_of = [np.flatnonzero((states.prompt == prompt.ordinal) & forked) for prompt in batch.prompts]
        if not any(map(len, rows_of)):
            return []
        response = padded_responses(batch, by_prompt)
        follow = forks if prefixes.policy.structure.recurrent else trees
        for rows, tokens, apart, reach in follow(prefixes, index, states, rows_of, response, horizon, side, divergence):
            distance = apart.sum(1) / reach.clamp(min=1)
            if count_forced:
                distance = (distance * reach + FARTHEST) / (reach + 1)
            elif eos_as_max:
                distance = torch.where(reach == 0, FARTHEST, distance)
            looked: tuple[np.ndarray, ...] = ()
            if seen is not None:
                looked = tokens.unflatten(2, (2, -1)).permute(0, 3, 2, 1).cpu().numpy(), apart.mT.cpu().numpy()
            for row, chosen in enumerate(rows):
                count = len(chosen)
                far, common = (column[row, :count].cpu().numpy() for column in (distance, reach))
                results.append((chosen, far, common, *(column[row, :count] for column in looked)))
            here += sum(len(chosen) for chosen in rows)
            show(done + here)
        return results

    for results in prefixes.map_batches(branch_batch):
        for rows, distance, reach, *futures in results:
            consequence[rows], valid[rows] = distance, reach
            if seen is not None:
                seen(rows, *futures)
            done += len(rows)
        show(done)
    return states.with_columns(consequence=consequence, horizon=valid)


def trees(
    prefixes: Prefixes,
    index: int,
    states: States,
    rows_of: Sequence[np.ndarray],
    response: Tensor,
    horizon: int,
    side: Side,
    divergence: str,
) -> Iterator[Followed]:
    """The forks of a batch, many at a time, as trees on its cached responses."""
    policy, batch = prefixes.policy, prefixes.batches[index]
    prefix = {one: prefixes.at_response(index, one, response) for one in dict.fromkeys((side, "D"))}
    for rows in _forests(rows_of, horizon):
        forest = Forest.of(batch, states, rows)
        tokens = continuations(policy, batch, prefix[side], forest, horizon, side)
        yield rows, tokens, *separation(policy, batch, prefix["D"], forest, tokens, divergence)


def continuations(
    policy: LanguageModel, batch: PromptBatch, prefix: Prefix, forest: Forest, horizon: int, side: Side = "Q"
) -> Tensor:
    """Every forced token and the greedy continuation of `side` by horizon - 1 more, [B, horizon, N]."""
    cache, cached = TreeCache(prefix.cache), prefix.cache.length - batch.width
    positions = forest.positions(batch, horizon)
    levels = [forest.forced]
    with policy.speaking(side):
        for depth in range(horizon - 1):
            here = slice(depth * forest.branches, (depth + 1) * forest.branches)
            level = Tokens(policy.embed(levels[-1]), positions[..., here], forest.mask(batch, cached, depth, depth + 1))
            levels.append(greedy(policy, policy.run(level, cache)))
    return torch.stack(levels, dim=1)


def separation(
    policy: LanguageModel, batch: PromptBatch, prefix: Prefix, forest: Forest, tokens: Tensor, divergence: str
) -> tuple[Tensor, Tensor]:
    """The divergence of D at every step of the common valid horizon, 0 beyond it, [B, H, N / 2], and H_t, [B, N / 2].

    D reads all branch tokens in one forward.
    """
    horizon, cached = tokens.shape[1], prefix.cache.length - batch.width
    reach = common_horizon(tokens, policy.eos)
    branches = Tokens(
        policy.embed(tokens.flatten(1)), forest.positions(batch, horizon), forest.mask(batch, cached, 0, horizon)
    )
    with policy.speaking("D"):
        hidden = policy.run(branches, TreeCache(prefix.cache)).unflatten(1, (horizon, 2, -1))  # [B, H, 2, N/2, d]
    return divergences(policy, hidden, reach, forest.real.unflatten(1, (2, -1))[:, 0], divergence), reach


def _forests(rows: Sequence[np.ndarray], horizon: int) -> list[list[np.ndarray]]:
    """The forked states of each prompt, by forest: as many at a time as the two limits allow."""
    share = max(1, min(TREE_TOKENS // len(rows), ROW_TOKENS) // (2 * horizon))
    return [[row[start : start + share] for row in rows] for start in range(0, max(map(len, rows)), share)]
