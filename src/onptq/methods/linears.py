"""One linear under theta, taken out of the policy: its dense weight, its rounded weight, and what it multiplies with."""

from __future__ import annotations

from torch import Tensor

from onptq.models.structure import Block
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.quantizer.weights import fake_quantize_weight
from onptq.schemes import Scheme


def dense_weight(block: Block, name: str) -> Tensor:
    weight: Tensor = block.child(name).weight  # type: ignore[assignment]
    return weight


def rounded_weight(
    policy: Policy, theta: Theta, block: Block, name: str, log_in: Tensor, log_out: Tensor | None = None
) -> Tensor:
    """The linear's weight [O, I], smoothed by these scales, on the grid of its step ratios."""
    weight, ratio = dense_weight(block, name), theta.linears[block.path(name)].ratio
    return fake_quantize_weight(weight, log_in, log_out, ratio, None, policy.scheme, policy.storage, policy.dtype)


def entering(scheme: Scheme, log_in: Tensor, x: Tensor) -> Tensor:
    """What the smoothed and quantized consumers of D's input x [..., I] multiply with."""
    x = (x.float() / log_in.exp()).to(x.dtype)
    return fake_quantize_activations(x, scheme.activation_bits) if scheme.quantizes_activations else x


def by_query_head(values: Tensor, block: Block, pair: str) -> Tensor:
    """Statistics of a pair's input channels as [query heads that share a scale, scales]: more than one only for v -> o."""
    if pair != "v_o":
        return values[None]
    return values.view(block.kv_heads, -1, block.head_dim).transpose(0, 1).flatten(1)
