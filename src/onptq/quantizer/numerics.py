"""Integer rounding and its gradients.

The forward values are, operation for operation, those of compressed-tensors, so that a reloaded checkpoint computes
what the training graph computed. The gradients are straight-through, with the scale inside the graph: d(scale)/d(input)
teaches smoothing and scale ratios that a smaller scale makes less noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onptq import kernels
from onptq.kernels.grid import code_range


class FakeQuantize(torch.autograd.Function):
    """(clamp(round(x / scale + offset)) - zero) * scale, with LSQ gradients.

    With code c, inside the range dx = 1, dscale = c - zero - x / scale, doffset = scale; where the code saturates
    dx = 0, dscale = c - zero, doffset = 0. The product is formed in `dtype`, as the reloaded checkpoint forms it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, offset: Tensor | None, zero: Tensor | None, bits: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, scale, offset, zero)
        ctx.bits = bits
        codes = round_to_codes(x, scale, bits, offset)
        if zero is not None:
            codes = codes - zero
        return codes.to(dtype) * scale.to(dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, offset, zero = ctx.saved_tensors
        low, high = code_range(ctx.bits)
        scaled = x / scale
        v = scaled if offset is None else scaled + offset
        inside = (v >= low) & (v <= high)
        grad_inside = torch.where(inside, grad, 0).to(x.dtype)
        codes = v.clamp(low, high).round()
        if zero is not None:
            codes = codes - zero
        grad_scale = (grad.to(scale.dtype) * torch.where(inside, codes - scaled, codes)).sum_to_size(scale.shape)
        grad_offset = grad_inside * scale if offset is not None and ctx.needs_input_grad[2] else None
        return grad_inside, grad_scale, grad_offset, None, None, None


def round_to_codes(x: Tensor, scale: Tensor, bits: int, offset: Tensor | None = None) -> Tensor:
    """Signed codes of x, in the dtype of x."""
    low, high = code_range(bits)
    scaled = x / scale
    if offset is not None:
        scaled = scaled + offset
    return scaled.clamp(low, high).round()


class CastThrough(torch.autograd.Function):
    """Rounding to a narrower dtype and back, with a gradient of one."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def cast_through(x: Tensor, dtype: torch.dtype) -> Tensor:
    return CastThrough.apply(x, dtype) if x.dtype != dtype else x  # type: ignore[no-untyped-call, no-any-return]


def fake_quantize_activations(x: Tensor, bits: int) -> Tensor:
    """Dynamic, symmetric, one scale per token; x is [..., tokens, channels]."""
    if kernels.fit(x):
        from onptq.kernels.activations import fake_quantize_tokens

        return fake_quantize_tokens(x, bits)
    scale = token_scales(x, bits)
    return FakeQuantize.apply(x, scale, None, None, bits, x.dtype)  # type: ignore[no-untyped-call, no-any-return]


def quantize_tokens(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., tokens, channels] and scales [..., tokens, 1], whose product is `fake_quantize_activations`."""
    scale = token_scales(x, bits)
    return round_to_codes(x, scale, bits).to(torch.int8).contiguous(), scale


def token_scales(x: Tensor, bits: int) -> Tensor:
    """The scale [..., tokens, 1] of every token, in the dtype of x; never zero."""
    absmax = x.abs().amax(dim=-1, keepdim=True)
    # A tensor: a Python scalar would be multiplied by its reciprocal on a GPU.
    scale = absmax / absmax.new_full((), (2**bits - 1) / 2)
    return torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
