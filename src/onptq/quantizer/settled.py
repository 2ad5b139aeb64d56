"""A linear whose codes are settled: they no longer follow the weight, and only their steps are scaled, [O, G] of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from onptq.quantizer.numerics import cast_through, code_range
from onptq.quantizer.weights import dequantize
from onptq.schemes import Scheme


def settled_linear(
    x: Tensor, levels: Tensor, step: Tensor, log_ratio: Tensor, bias: Tensor | None, storage: torch.dtype
) -> Tensor:
    """x times levels [O, I] times their scaled steps: differentiable in x and in the ratio, without any rounding in between."""
    scaled = _scaled_step(step, log_ratio, storage)
    if bias is None and scaled.shape[1] == 1:
        return _ScaledRows.apply(x, levels, scaled)  # type: ignore[no-untyped-call, no-any-return]
    weight = (levels.to(x.dtype).view(*step.shape, -1) * scaled.to(x.dtype)[..., None]).view_as(levels)
    return F.linear(x, weight, bias)


@torch.no_grad()
def settled_codes(
    levels: Tensor, step: Tensor, log_ratio: Tensor, scheme: Scheme, storage: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same as integers, as `weight_codes` has them; the zero point is the smallest that holds every level."""
    scaled = _scaled_step(step, log_ratio, storage).to(storage)
    if scheme.symmetric:
        return levels, scaled, None
    grouped = levels.view(*step.shape, -1)
    zero = code_range(scheme.weight_bits)[0] - grouped.amin(-1).clamp(max=0)
    return (grouped + zero[..., None]).view_as(levels).to(torch.int8), scaled, zero.to(torch.int8)


def _scaled_step(step: Tensor, log_ratio: Tensor, storage: torch.dtype) -> Tensor:
    return cast_through(step * log_ratio.exp(), storage)


class _ScaledRows(torch.autograd.Function):
    """With one step a row, y = (x levels^T) step: the step's gradient is dy y / step, summed over tokens. The gradient of the
    weight, a product as large as the linear itself, is not needed; a bias inside y would drown what is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: Tensor, step: Tensor) -> Tensor:
        weight = dequantize(levels, step, None, x.dtype)
        out = F.linear(x, weight)
        ctx.save_for_backward(weight, step, out)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        weight, step, out = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return grad_x, None, None
        total = (grad * out).flatten(0, -2).sum(0, dtype=step.dtype)[:, None]
        return grad_x, None, total / torch.where(step == 0, 1, step)
