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
from onptq.schemes import E4M3, Floats, Grid, ScaleType, Scheme

FLOAT32_EXPONENT = 0x7F800000  # the bits that make a power of two of a positive float32
FLOAT32_QUARTER = 0x00200000  # added to one, it makes the next power of two of a mantissa from 1.75 on
LEAST_POWER = 2.0**-120  # of a scale
ZERO_SCALE = 0.125  # the E4M3 code in place of 0


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
    return (_power(bits) * 2.0**-floats.mantissa).to(x.dtype)


def _power(bits: Tensor) -> Tensor:
    """The power of two that a positive float32, given by its bits, is at least."""
    return (bits & FLOAT32_EXPONENT).view(torch.float32)


class CastThrough(torch.autograd.Function):
    """Rounding to a narrower dtype and back, with a gradient of one."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class Through(torch.autograd.Function):
    """A rounded value in place of x, with a gradient of one."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    return Through.apply(x, rounded)  # type: ignore[no-untyped-call, no-any-return]


def cast_through(x: Tensor, dtype: torch.dtype) -> Tensor:
    return CastThrough.apply(x, dtype) if x.dtype != dtype else x  # type: ignore[no-untyped-call, no-any-return]


def full_range(absmax: Tensor, grid: Floats, scales: ScaleType) -> Tensor:
    """The scale, not yet stored, under which the largest value meets the largest code; a power of two can only come near."""
    return absmax / absmax.new_full((), grid.power if scales == "E8M0" else grid.largest)


def stored_scale(scale: Tensor, scales: ScaleType, dtype: torch.dtype, tensor_scale: Tensor | None = None) -> Tensor:
    """The scale as it is stored, with a gradient of one; never zero."""
    if scales == "dtype":
        scale = cast_through(scale, dtype)
        return torch.where(scale == 0, torch.finfo(dtype).eps, scale)
    if scales == "E4M3":
        assert tensor_scale is not None
        code = nearest((scale.detach() * tensor_scale).clamp(max=E4M3.largest), E4M3)
        return _through(scale, torch.where(code == 0, ZERO_SCALE, code) / tensor_scale)
    bits = scale.detach().float().clamp(min=LEAST_POWER).view(torch.int32)
    return _through(scale, _power(bits + FLOAT32_QUARTER).to(scale.dtype))


def fitting_scale(absmax: Tensor) -> Tensor:
    """The tensor scale of E4M3 scales for values up to `absmax`: a power of two, so that dividing by it rounds nothing.

    The largest group's scale becomes 10 to 22 of 448: there is room for values 20 times as large, and a group 700 times
    smaller is still stored with all three bits of the mantissa.
    """
    return 64 / _power(absmax.float().clamp(min=LEAST_POWER).view(torch.int32))


def product_dtype(scheme: Scheme, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which codes meet scales. Those of few bits meet in float32, where nothing is lost."""
    return dtype if scheme.scales == "dtype" else torch.promote_types(dtype, torch.float32)


def quantize_inputs(x: Tensor, scheme: Scheme, tensor_scale: Tensor | None = None) -> Tensor:
    """x [..., tokens, channels] as a linear of the scheme multiplies it. Without a tensor scale it has the one that fits."""
    if not scheme.quantizes_activations:
        return x
    grid = scheme.activation_grid
    if not isinstance(grid, Floats):
        return fake_quantize_activations(x, grid)
    groups = x.unflatten(-1, (-1, scheme.activation_group or x.shape[-1]))
    full = full_range(groups.abs().amax(dim=-1, keepdim=True), grid, scheme.scales)
    dtype = product_dtype(scheme, x.dtype)
    if tensor_scale is None and scheme.scales_inputs:
        tensor_scale = fitting_scale(x.detach().abs().amax())
    scale = stored_scale(full.to(dtype), scheme.scales, x.dtype, tensor_scale)
    out: Tensor = FakeQuantize.apply(groups.to(dtype), scale, None, None, grid, dtype)  # type: ignore[no-untyped-call]
    return out.to(x.dtype).flatten(-2)


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
