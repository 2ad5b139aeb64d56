"""A linear whose codes are settled: they no longer follow the weight, and only their scales [O, G] change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from onptq.kernels.grid import code_range
from onptq.quantizer.numerics import cast_through, product_dtype, stored_scale
from onptq.quantizer.weights import dequantize, of_groups, to_groups
from onptq.schemes import Scheme

ROWS = Scheme(4)  # whatever the bits: one scale per row or group


def settled_linear(
    x: Tensor,
    levels: Tensor,
    scale: Tensor,
    log_ratio: Tensor,
    bias: Tensor | None,
    storage: torch.dtype,
    scheme: Scheme = ROWS,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """x times levels [O, I] times their scales times the ratio, with a gradient for x and the ratio and no rounding."""
    effective = _effective_scale(scale, log_ratio, scheme, storage, tensor_scale)
    if bias is None and effective.shape == (len(levels), 1):
        return _ScaledRows.apply(x, levels, effective)  # type: ignore[no-untyped-call, no-any-return]
    dtype = product_dtype(scheme, x.dtype)
    groups = to_groups(levels.to(dtype), scale, scheme.block_rows)
    weight = of_groups(groups * effective.to(dtype)[..., None], levels.shape, scheme.block_rows)
    return F.linear(x, weight.to(x.dtype), bias)


@torch.no_grad()
def settled_codes(
    levels: Tensor,
    scale: Tensor,
    log_ratio: Tensor,
    scheme: Scheme,
    storage: torch.dtype,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same weight as `weight_codes` returns it; the zero point is the smallest that fits every level."""
    effective = _effective_scale(scale, log_ratio, scheme, storage, tensor_scale).to(product_dtype(scheme, storage))
    if scheme.symmetric:
        return levels, effective, None
    grouped = levels.view(*scale.shape, -1)
    zero = code_range(scheme.weight_bits)[0] - grouped.amin(-1).clamp(max=0)
    return (grouped + zero[..., None]).view_as(levels).to(torch.int8), effective, zero.to(torch.int8)


def _effective_scale(
    scale: Tensor, log_ratio: Tensor, scheme: Scheme, storage: torch.dtype, tensor_scale: Tensor | None
) -> Tensor:
    scale = scale * log_ratio.exp()
    if scheme.scales == "dtype":
        return cast_through(scale, storage)
    return stored_scale(scale, scheme.scales, storage, tensor_scale)


class _ScaledRows(torch.autograd.Function):
    """y = (x levels^T) scale, with one scale a row: the scale's gradient is dy y / scale, summed over tokens.

    The gradient of the weight, a GEMM as large as the linear itself, is not needed. A bias inside y would drown the
    sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: Tensor, scale: Tensor) -> Tensor:
        weight = dequantize(levels, scale, None, x.dtype)
        out = F.linear(x, weight)
        ctx.save_for_backward(weight, scale, out)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        weight, scale, out = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return grad_x, None, None
        total = (grad * out).flatten(0, -2).sum(0, dtype=scale.dtype)[:, None]
        return grad_x, None, total / torch.where(scale == 0, 1, scale)
