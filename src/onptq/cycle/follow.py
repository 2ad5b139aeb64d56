"""Follow: on-policy trajectories. Q answers greedily; every prefix it writes is a state it will meet when deployed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from onptq.bank import Trajectory
from onptq.cycle.decoding import Decoding
from onptq.cycle.prefixes import Prefixes
from onptq.models.encoding import PromptBatch
from onptq.policy import Side

LOOKS = {"cpu": 1, "cuda": 8}  # tokens between looks at whether every row has ended: on a GPU each look waits for it


def follow(
    prefixes: Prefixes, *, side: Side = "Q", advance: Callable[[int], None] = lambda prompts: None
) -> list[Trajectory]:
    """Greedy rollouts of Q (D where it is asked) for every prompt, at most `prefixes.max_tokens` long, by ordinal."""
    trajectories: list[Trajectory] = []
    for part in prefixes.each(lambda index: _rollout_batch(prefixes, index, side)):
        trajectories += part
        advance(len(part))
    return sorted(trajectories, key=lambda trajectory: trajectory.prompt)


def _rollout_batch(prefixes: Prefixes, index: int, side: Side) -> list[Trajectory]:
    return list(_cut(prefixes.batches[index], rollout(prefixes, index, side), prefixes.policy.eos))


@torch.no_grad()
def rollout(prefixes: Prefixes, index: int, side: Side = "Q") -> Tensor:
    """y_t = argmax z(s_t), [B, T]; a row that has ended goes on being fed its last token until all have ended."""
    policy, limit = prefixes.policy, prefixes.max_tokens
    eos = torch.tensor(sorted(policy.eos), device=policy.device)
    look = LOOKS.get(policy.device.type, 1)
    prefix = prefixes.prompt(index, side)
    with policy.speaking(side):
        decoding = Decoding(policy, prefixes.batches[index], prefix, limit)
        while decoding.written < limit:
            written = decoding.tokens[:, : decoding.written]
            if decoding.written % look == 0 and bool(torch.isin(written, eos).any(1).all()):
                return written
            decoding.step()
    return decoding.tokens


def _cut(batch: PromptBatch, responses: Tensor, eos: frozenset[int]) -> Iterator[Trajectory]:
    """The emission of an end-of-sequence token is itself a decision, so it stays; what follows it does not exist."""
    for prompt, response in zip(batch.prompts, responses.tolist(), strict=True):
        end = next((t for t, token in enumerate(response, start=1) if token in eos), None)
        yield Trajectory(prompt.ordinal, tuple(response[:end]), finished=end is not None)
