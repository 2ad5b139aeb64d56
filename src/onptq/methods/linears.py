"""Linears of one block outside of the policy: dense and rounded weights, inputs, and quantized linears put in their place.

Quantized linears are simulated in the dense model's coordinates, Q(x / s) Q(W diag(s))^T. Folding gives the same values, and
nothing has to be folded back between two candidates. The policy is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional as F

from onptq.models.structure import Block
from onptq.quantizer.numerics import quantize_inputs
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, log_scales_in
from onptq.quantizer.weights import fake_quantize_weight
from onptq.schemes import Scheme

LinearFunction = Callable[[Tensor], Tensor]


def dense_weight(block: Block, name: str) -> Tensor:
    weight: Tensor = block.child(name).weight  # type: ignore[assignment]
    return weight


def tensor_scale(block: Block, name: str) -> Tensor | None:
    """The scale that all scales of the linear's weight have in common, if there is one."""
    scale: Tensor | None = block.child(name).tensor_scale  # type: ignore[assignment]
    return scale


def rounded_weight(
    policy: Policy, theta: Theta, block: Block, name: str, log_in: Tensor | None, log_out: Tensor | None = None
) -> Tensor:
    """The linear's weight [O, I], smoothed by these scales, on the grid of its ratios."""
    weight, ratio = dense_weight(block, name), theta.linears[block.path(name)].ratio
    grid = policy.scheme.of(block.path(name)), policy.storage, policy.dtype, tensor_scale(block, name)
    return fake_quantize_weight(weight, log_in, log_out, ratio, None, *grid)


def divided(x: Tensor, log_in: Tensor | None) -> Tensor:
    """x [..., I] over the smoothing of its channels; x itself where nothing is folded."""
    return x if log_in is None else x / log_in.exp()


def quantized_input(scheme: Scheme, log_in: Tensor | None, x: Tensor) -> Tensor:
    """The dense input x [..., I] after smoothing and rounding, as the quantized linear multiplies it."""
    return quantize_inputs(divided(x.float(), log_in).to(x.dtype), scheme)


def by_query_head(values: Tensor, block: Block, pair: str) -> Tensor:
    """Statistics of a pair's input channels as [query heads that share a scale, scales]: more than one only for v -> o."""
    if pair != "v_o":
        return values[None]
    return values.view(block.kv_heads, -1, block.head_dim).transpose(0, 1).flatten(1)


def quantized_linear(
    policy: Policy, theta: Theta, block: Block, name: str, *, activations: bool = True
) -> LinearFunction:
    """The linear as theta deploys it; without `activations` only its weight is quantized."""
    log_in = log_scales_in(theta, block, name)
    weight = rounded_weight(policy, theta, block, name, log_in)
    bias: Tensor | None = block.child(name).bias  # type: ignore[assignment]
    scheme = policy.scheme.of(block.path(name))

    def linear(x: Tensor) -> Tensor:
        x = divided(x, log_in).to(x.dtype)
        return F.linear(quantize_inputs(x, scheme) if activations else x, weight, bias)

    return linear


def quantized_linears(
    policy: Policy, theta: Theta, block: Block, pairs: Iterable[str], *, activations: bool = True
) -> dict[str, LinearFunction]:
    """The consumers of some pairs, as theta deploys them."""
    names = [name for pair in pairs for name in block.consumers(pair)]
    return {name: quantized_linear(policy, theta, block, name, activations=activations) for name in names}


class _FunctionModule(nn.Module):
    def __init__(self, function: LinearFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@contextmanager
def replaced(block: Block, functions: Mapping[str, LinearFunction]) -> Iterator[None]:
    """A context in which the named linears of the block compute these functions."""
    before = {name: block.child(name) for name in functions}
    try:
        for name, function in functions.items():
            block.replace(name, _FunctionModule(function))
        yield
    finally:
        for name, module in before.items():
            block.replace(name, module)
