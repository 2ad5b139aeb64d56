"""Rollouts of either side, greedy or sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from onptq.bank import Trajectory
from onptq.engine.decoding import Decoding
from onptq.engine.prefixes import Prefixes
from onptq.engine.sampling import Sampling
from onptq.models.encoding import PromptBatch
from onptq.models.language_model import Side

END_CHECK_TOKENS = {"cpu": 1, "cuda": 8}  # between checks whether every row has ended: on a GPU each check waits for it


def rollouts(
    prefixes: Prefixes,
    side: Side,
    advance: Callable[[int], None] = lambda prompts: None,
    sampling: Sampling | None = None,
) -> list[Trajectory]:
    """The responses to every prompt, greedy without `sampling`, at most `prefixes.max_tokens` long, by ordinal."""
    trajectories: list[Trajectory] = []

    def roll_batch(index: int) -> list[tuple[int, list[int], bool]]:
        responses = rollout(prefixes, index, side, sampling)
        return list(cut_responses(prefixes.batches[index], responses, prefixes.policy.eos))

    for batch in prefixes.map_batches(roll_batch):
        trajectories += [Trajectory(prompt, tuple(tokens), finished) for prompt, tokens, finished in batch]
        advance(len(batch))
    return sorted(trajectories, key=lambda trajectory: trajectory.prompt)


@torch.no_grad()
def rollout(prefixes: Prefixes, index: int, side: Side, sampling: Sampling | None = None) -> Tensor:
    """y_t, argmax z(s_t) or drawn, [B, T]; a row that has ended goes on being fed its last token until all have ended."""
    policy, limit = prefixes.policy, prefixes.max_tokens
    eos = torch.tensor(sorted(policy.eos), device=policy.device)
    interval = END_CHECK_TOKENS.get(policy.device.type, 1)
    prefix = prefixes.prompt(index, side)
    with policy.speaking(side):
        decoding = Decoding(policy, prefixes.batches[index], prefix, limit, sampling)
        while decoding.written < limit:
            written = decoding.tokens[:, : decoding.written]
            if decoding.written % interval == 0 and bool(torch.isin(written, eos).any(1).all()):
                return written
            decoding.step()
    return decoding.tokens


def cut_responses(batch: PromptBatch, responses: Tensor, eos: frozenset[int]) -> Iterator[tuple[int, list[int], bool]]:
    """Prompt, tokens, and whether they ended by themselves. The emission of an end-of-sequence token is itself a decision,
    so it stays; what follows it does not exist."""
    for prompt, response in zip(batch.prompts, responses.tolist(), strict=True):
        end = next((t for t, token in enumerate(response, start=1) if token in eos), None)
        yield prompt.ordinal, response[:end], end is not None
