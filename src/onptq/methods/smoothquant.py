"""SmoothQuant: s_j = amax|x_j|^alpha / amax|W_j|^(1 - alpha), alpha 0.5, behind the two norms; then plain rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onptq.methods.guards import run_finite
from onptq.methods.layerwise import observing
from onptq.methods.linears import by_query_head, dense_weight
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, pair_key

ALPHA = 0.5
SMOOTHED = ("norm_qkv", "norm_gate_up")  # inputs of o_proj and down_proj are not smoothed, as in the authors' code
FLOOR = 1e-5
REACH = 8.0  # largest |log s|


@torch.no_grad()
def smoothquant(
    policy: Policy, prompts: Sequence[EncodedPrompt], advance: Callable[[int], None] = lambda blocks: None
) -> Theta:
    """SmoothQuant's theta on the prompts."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    largest = input_maxima(policy, prompts)
    for block in policy.gathered_blocks():
        for pair in (pair for pair in SMOOTHED if pair in block.producers):
            key = pair_key(block, pair)
            theta.smoothing[key] = migrated(largest[key], weight_maxima(block, pair), ALPHA)
        advance(1)
    return theta


def migrated(x_max: Tensor, w_max: Tensor, alpha: float) -> Tensor:
    """log s, in the zero-mean gauge."""
    u = alpha * x_max.clamp(min=FLOOR).log() - (1 - alpha) * w_max.clamp(min=FLOOR).log()
    return (u - u.mean()).clamp(-REACH, REACH)


def weight_maxima(block: Block, pair: str) -> Tensor:
    """amax over the rows of all consumers of every weight column that one scale multiplies."""
    columns = [dense_weight(block, name).abs().amax(0).float() for name in block.consumers(pair)]
    return by_query_head(torch.stack(columns).amax(0), block, pair).amax(0)


def input_maxima(policy: Policy, prompts: Sequence[EncodedPrompt]) -> dict[str, Tensor]:
    """amax|x| over all tokens of all prompts at the input of a pair's consumers under D: pair key -> [I]."""
    largest: dict[str, Tensor] = {}

    def observe(block: Block, pair: str, x: Tensor) -> None:
        key, x_max = pair_key(block, pair), x.abs().flatten(0, -2).amax(0).float()
        largest[key] = torch.maximum(largest[key], x_max) if key in largest else x_max

    with observing(policy.structure.blocks, observe, SMOOTHED), policy.speaking("D"):
        for prompt in prompts:
            run_finite(policy, prompt)
    return largest
