"""The share of every linear in the erosion, against finite differences and against what all of them lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from conftest import Tiny
from naive import scene

from onptq.bank import States, Trajectory
from onptq.cycle.compare import compare
from onptq.engine.prefixes import Prefixes
from onptq.evaluate.attribution import margin_losses
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.modules import QuantLinear
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta

LENGTH = 4
Made = tuple[Policy, Theta, list[EncodedPrompt], list[Trajectory], States]


def make(tiny: Tiny, scheme: str) -> Made:
    scenery = scene(tiny, scheme, torch.float64)
    policy, theta = scenery.policy, scenery.theta
    prompts = scenery.encoded(policy)
    rollouts = [scenery.rollout(ordinal, LENGTH) for ordinal in scenery.ordinals]
    states = compare(Prefixes(policy, prompts, max_tokens=LENGTH, batch_tokens=10**6), rollouts)
    return policy, theta, prompts, rollouts, states


def mean_margin(made: Made, path: str, share: float) -> float:
    """The mean margin of Q over the candidates where that linear has only so large a share of its error."""
    policy, theta, prompts, rollouts, states = made
    [linear] = [one for one in policy.wrapped if isinstance(one, QuantLinear) and one.path == path]

    def soften(module: torch.nn.Module, entering: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        if not policy.switch.quantized:
            return output
        exact = linear.unrounded(entering[0], theta)
        return exact + share * (output - exact)

    with ExitStack() as stack:
        stack.callback(linear.register_forward_hook(soften).remove)
        moved = compare(Prefixes(policy, prompts, max_tokens=LENGTH, batch_tokens=10**6), rollouts)
    rows = np.flatnonzero(states.candidates)
    same = (moved.reference == states.reference) & (moved.competitor == states.competitor)
    assert same[rows].all()
    return float(moved.margin_quant[rows].astype(np.float64).mean())


@pytest.mark.parametrize("family", ["qwen2.5-omni"])
def test_a_share_is_the_derivative_of_the_margins_by_the_error_of_that_linear(
    family: str, tiny: Callable[[str], Tiny]
) -> None:
    made = make(tiny(family), "W4A16")
    losses = margin_losses(*made)
    assert losses.states == int(made[-1].candidates.sum()) > 3
    assert len(losses.by_linear) == 7 * made[0].blocks
    step = 1e-2
    paths = [one.path for one in made[0].wrapped if isinstance(one, QuantLinear)]
    for path, (_, _, lost) in list(zip(paths, losses.by_linear, strict=True))[::3]:
        slope = (mean_margin(made, path, 1 + step) - mean_margin(made, path, 1 - step)) / (2 * step)
        assert lost == pytest.approx(-slope, rel=0.02, abs=2e-3), path


def test_small_errors_add_up_to_what_the_margins_lost(tiny: Callable[[str], Tiny]) -> None:
    losses = margin_losses(*make(tiny("qwen2.5-vl"), "W8A16"))
    assert losses.lost > 0
    assert sum(lost for _, _, lost in losses.by_linear) == pytest.approx(losses.lost, rel=0.1)  # gains are rounded too


def test_only_the_responses_that_lost_most_are_read_and_the_policy_is_left_as_it_was(
    tiny: Callable[[str], Tiny],
) -> None:
    made = make(tiny("llama"), "W4A16")
    policy, states = made[0], made[-1]
    by_prompt = {p: states.erosion[(states.prompt == p) & states.candidates].sum() for p in np.unique(states.prompt)}
    worst = max(by_prompt, key=lambda prompt: by_prompt[prompt])
    before = policy.generation
    losses = margin_losses(*made, responses=1)
    chosen = (states.prompt == worst) & states.candidates
    assert losses.states == chosen.sum() < states.candidates.sum()
    assert losses.lost == pytest.approx((states.margin_dense - states.margin_quant)[chosen].mean(), rel=1e-5)
    assert policy.generation == before
    assert not any(getattr(module, "_forward_hooks", None) for module in policy.wrapped)
