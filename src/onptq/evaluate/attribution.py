"""Where margins are lost: the share of every linear in the erosion of a quantized model's decisions, to first order.

A linear of Q errs by delta = y_Q - y, where y is its output for the same input without rounding. The margins of Eq. 5
then move by g * delta, where g is their gradient at that output. Summed over all linears this is m_Q - m_D up to terms
of second order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onptq.bank import States, Trajectory
from onptq.engine.memory import free_memory
from onptq.engine.prefixes import whole_prompts
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.structure import EXPERTS
from onptq.quantizer.modules import QuantLinear
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta

RESPONSES = 16  # those with the largest erosion; more would say little more
SPARE = 2  # of the free memory, one part in so many may be taken
HELD = 4  # values per input and output of a linear: those that backward reads, its error, and what is made on the way


@dataclass(frozen=True)
class MarginLosses:
    """Mean logits of margin that each linear loses per state, over so many candidate states, and all that they lost."""

    states: int
    lost: float  # mean of m_D - m_Q
    by_linear: tuple[tuple[int, str, float], ...]  # block, name of the linear, its share

    def to_dict(self) -> dict[str, Any]:
        linears = [{"block": block, "linear": name, "lost": lost} for block, name, lost in self.by_linear]
        return {"states": self.states, "lost": self.lost, "linears": linears}


def margin_losses(
    policy: Policy,
    theta: Theta,
    prompts: Sequence[EncodedPrompt],
    trajectories: Sequence[Trajectory],
    states: States,
    *,
    responses: int = RESPONSES,
    advance: Callable[[int], None] = lambda responses: None,
) -> MarginLosses:
    """The share of each linear in the erosion of the candidate states; Q of the policy is frozen at `theta`.

    Responses that are too long for the memory that is free are left out.
    """
    by_prompt = {prompt.ordinal: prompt for prompt in prompts}
    tokens = {trajectory.prompt: trajectory.tokens for trajectory in trajectories}
    candidates = states.take(np.flatnonzero(states.candidates))
    rows = candidates.rows_by_prompt()
    longest = free_memory(policy.device) // (SPARE * _bytes_per_token(policy))
    fitting = [one for one in rows if by_prompt[one].length + len(tokens[one]) <= longest]
    worst = sorted(fitting, key=lambda ordinal: (-float(candidates.erosion[rows[ordinal]].sum()), ordinal))[:responses]
    total: dict[str, float] = {}
    for ordinal in worst:
        here = candidates.take(rows[ordinal])
        for path, lost in _losses(policy, theta, by_prompt[ordinal], tokens[ordinal], here).items():
            total[path] = total.get(path, 0.0) + lost
        advance(1)
    chosen = candidates.take(np.flatnonzero(np.isin(candidates.prompt, worst)))
    count = max(1, len(chosen))
    linears = [module for module in policy.wrapped if isinstance(module, QuantLinear)]
    shares: dict[tuple[int, str], float] = {}
    for one in linears:
        place = one.block.index, one.name.rpartition(".")[2]  # those of all experts are one
        shares[place] = shares.get(place, 0.0) + total.get(one.path, 0.0) / count
    lost = float((chosen.margin_dense - chosen.margin_quant).sum()) / count
    return MarginLosses(len(chosen), lost, tuple((*place, share) for place, share in shares.items()))


def _bytes_per_token(policy: Policy) -> int:
    """The memory that a forward pass with gradients holds for one token."""
    linears = [module for module in policy.wrapped if isinstance(module, QuantLinear)]
    chosen: int = getattr(policy.structure.decoder.config, "num_experts_per_tok", 0)  # type: ignore[union-attr]

    def share(module: QuantLinear) -> float:
        routed = module.block.experts is not None and module.name.startswith(EXPERTS)
        return chosen / len(module.block.experts or ()) if routed else 1.0

    held = (share(one) * sum(one.weight.shape) * one.weight.element_size() for one in linears)
    return ceil(HELD * sum(held))


def _losses(
    policy: Policy, theta: Theta, prompt: EncodedPrompt, response: Sequence[int], states: States
) -> dict[str, float]:
    """By the path of a linear, the sum over the states of what it takes from their margins."""
    fed = torch.tensor(response[: int(states.t.max()) - 1], dtype=torch.long, device=policy.device)
    batch = PromptBatch.of([prompt.extended(fed, policy.embed(fed))])
    batch = replace(batch, embeds=batch.embeds.detach().requires_grad_())
    at = torch.from_numpy(states.t).long().to(policy.device) + prompt.length - 2
    with torch.enable_grad(), policy.speaking("Q"), _watched(policy, theta) as lost:
        hidden = policy.run(whole_prompts(batch))[0, at]
        _margins(policy, hidden, states).sum().backward()
    return {path: float(value) for path, value in lost.items()}


def _margins(policy: Policy, hidden: Tensor, states: States) -> Tensor:
    """m_Q of each state (Eq. 5) from the residual stream [C, d]."""
    norm, head = policy.structure.decoder.norm, policy.structure.head
    reference, competitor = (
        torch.from_numpy(ids).long().to(hidden.device) for ids in (states.reference, states.competitor)
    )
    wide = torch.promote_types(hidden.dtype, torch.float32)
    normed: Tensor = norm(hidden)  # type: ignore[operator]

    def logits(tokens: Tensor) -> Tensor:
        each = (normed.to(wide) * head.weight[tokens].to(wide)).sum(-1)
        return policy.structure.capped(each if head.bias is None else each + head.bias[tokens].to(wide))

    return logits(reference) - logits(competitor)


@contextmanager
def _watched(policy: Policy, theta: Theta) -> Iterator[dict[str, Tensor]]:
    """A context in which every backward pass adds, by the path of a linear, minus its error times the gradient."""
    lost: dict[str, Tensor] = {}

    def watch(module: nn.Module, entering: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, QuantLinear)
        with torch.no_grad():
            error = output - module.unrounded(entering[0], theta)

        def add(gradient: Tensor) -> None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            lost[module.path] = (
                lost.get(module.path, torch.zeros((), dtype=wide, device=gradient.device))
                - (gradient.to(wide) * error.to(wide)).sum()
            )

        output.register_hook(add)

    hooks = [module.register_forward_hook(watch) for module in policy.wrapped if isinstance(module, QuantLinear)]
    try:
        yield lost
    finally:
        for hook in hooks:
            hook.remove()
