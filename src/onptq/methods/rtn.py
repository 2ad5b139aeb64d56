"""RTN: rounding to nearest, without data, without smoothing, over the full range of every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.caches import QuantCache
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, pair_key

CACHE_SCALE = 1.0  # without data: what servers take where a checkpoint has none
INPUT_SCALE = 1.0  # without data: groups whose largest value is between 0.09 and 2688 have scales with all bits


def rtn(
    policy: Policy, prompts: Sequence[EncodedPrompt] = (), advance: Callable[[int], None] = lambda blocks: None
) -> Theta:
    """The theta of plain rounding; prompts are not used."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    if policy.scheme.scales_inputs:
        keys = [pair_key(block, pair) for block in policy.structure.blocks for pair in block.pairs]
        theta.inputs = {key: torch.full((1,), INPUT_SCALE, device=policy.device) for key in keys}
    if policy.scheme.quantizes_cache:
        caches = [module.key for module in policy.wrapped if isinstance(module, QuantCache)]
        theta.caches = {key: torch.full((2,), CACHE_SCALE, device=policy.device) for key in caches}
    return theta
