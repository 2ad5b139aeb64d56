"""Rounding to integers and to floats of few bits, and its gradients.

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
from onptq.schemes import Floats, Grid, Scheme

FLOAT32_EXPONENT = 0x7F800000  # the bits that make a power of two of a positive float32


class FakeQuantize(torch.autograd.Function):
    """(clamp(round(x / scale + offset)) - zero) * scale, with LSQ gradients.

    With code c, inside the range dx = 1, dscale = c - zero - x / scale, doffset = scale; where the code saturates
    dx = 0, dscale = c - zero, doffset = 0. Among floats an offset counts in units of the spacing d of the codes around
    x / scale: it is multiplied with d, and so is doffset. The product is formed in `dtype`, as the reloaded checkpoint
    forms it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, offset: Tensor | None, zero: Tensor | None, grid: Grid, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, scale, offset, zero)
        ctx.grid = grid
        codes = round_to_codes(x, scale, grid, offset)
        if zero is not None:
            codes = codes - zero
        return codes.to(dtype) * scale.to(dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, offset, zero = ctx.saved_tensors
        low, high = limits(ctx.grid)
        scaled = x / scale
        v = scaled if offset is None else scaled + in_codes(offset, scaled, ctx.grid)
        inside = (v >= low) & (v <= high)
        grad_inside = torch.where(inside, grad, 0).to(x.dtype)
        codes = nearest(v.clamp(low, high), ctx.grid)
        if zero is not None:
            codes = codes - zero
        grad_scale = (grad.to(scale.dtype) * torch.where(inside, codes - scaled, codes)).sum_to_size(scale.shape)
        grad_offset = (
            in_codes(grad_inside, scaled, ctx.grid) * scale if offset is not None and ctx.needs_input_grad[2] else None
        )
        return grad_inside, grad_scale, grad_offset, None, None, None


def round_to_codes(x: Tensor, scale: Tensor, grid: Grid, offset: Tensor | None = None) -> Tensor:
    """Signed codes of x, in the dtype of x."""
    scaled = x / scale
    if offset is not None:
        scaled = scaled + in_codes(offset, scaled, grid)
    return nearest(scaled.clamp(*limits(grid)), grid)


def limits(grid: Grid) -> tuple[float, float]:
    """The smallest and the largest code."""
    return (-grid.largest, grid.largest) if isinstance(grid, Floats) else code_range(grid)


def nearest(x: Tensor, grid: Grid) -> Tensor:
    """The code next to each value of x, which lie within the limits; ties go to the even one."""
    if not isinstance(grid, Floats):
        return x.round()
    distance = spacing(x, grid)
    return (x / distance).round() * distance


def in_codes(offset: Tensor, scaled: Tensor, grid: Grid) -> Tensor:
    """Offsets in units of the distance between the codes around `scaled`, as distances."""
    return offset * spacing(scaled, grid) if isinstance(grid, Floats) else offset


def in_offsets(difference: Tensor, scaled: Tensor, grid: Grid) -> Tensor:
    """The inverse of `in_codes`."""
    return difference / spacing(scaled, grid) if isinstance(grid, Floats) else difference


def spacing(x: Tensor, floats: Floats) -> Tensor:
    """The distance between the neighbours of x in the grid, in the dtype of x."""
    bits = x.abs().float().clamp(2.0**floats.least, floats.largest).view(torch.int32)
    return ((bits & FLOAT32_EXPONENT).view(torch.float32) * 2.0**-floats.mantissa).to(x.dtype)


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


def quantize_inputs(x: Tensor, scheme: Scheme) -> Tensor:
    """x [..., tokens, channels] as a linear of the scheme multiplies it."""
    if not scheme.quantizes_activations:
        return x
    grid = scheme.activation_grid
    if not isinstance(grid, Floats):
        return fake_quantize_activations(x, grid)
    groups = x.unflatten(-1, (-1, scheme.activation_group or x.shape[-1]))
    absmax = groups.abs().amax(dim=-1, keepdim=True)
    scale = absmax / absmax.new_full((), grid.largest)
    scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    return FakeQuantize.apply(groups, scale, None, None, grid, x.dtype).flatten(-2)  # type: ignore[no-untyped-call, no-any-return]


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
