"""A weight under theta: smoothed, put on its grid, rounded. The training graph and the fold share every operation."""

from __future__ import annotations

import torch
from torch import Tensor

from onptq import kernels
from onptq.kernels.grid import OFF_TIE, code_range
from onptq.quantizer.numerics import FakeQuantize, cast_through, round_to_codes
from onptq.schemes import Scheme


def smoothed(weight: Tensor, log_in: Tensor | None, log_out: Tensor | None) -> Tensor:
    """W' = diag(1 / s_out) W diag(s_in), fp32 [O, I]."""
    weight = weight.float() if log_in is None else weight.float() * log_in.exp()
    return weight if log_out is None else weight / log_out.exp()[:, None]


def weight_grid(
    weight: Tensor, log_ratio: Tensor, scheme: Scheme, storage: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scale [O, G, 1], rounded to the dtype it is stored in, and zero point [O, G, 1] of weights [O, G, I / G]."""
    low, high = code_range(scheme.weight_bits)
    ratio = log_ratio.exp()[..., None]
    if scheme.symmetric:
        span = weight.abs().amax(dim=-1, keepdim=True) * (OFF_TIE / ((high - low) / 2))
    else:
        floor = weight.amin(dim=-1, keepdim=True).clamp(max=0)
        reach = weight.amax(dim=-1, keepdim=True).clamp(min=0) - floor
        span = reach / reach.new_full((), high - low)  # a division on a GPU too, as for activations
    scale = cast_through(ratio * span, storage)
    scale = torch.where(scale == 0, torch.finfo(storage).eps, scale)
    if scheme.symmetric:
        return scale, None
    return scale, (low - ratio.detach() * floor.detach() / scale.detach()).round().clamp(low, high)


def fake_quantize_weight(
    weight: Tensor,
    log_in: Tensor | None,
    log_out: Tensor | None,
    log_ratio: Tensor,
    offset: Tensor | None,
    scheme: Scheme,
    storage: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [O, I] of the deployed linear, in the compute dtype; differentiable in theta."""
    if not scheme.quantizes_weights:
        return cast_through(smoothed(weight, log_in, log_out), storage).to(dtype)
    theta, dtypes = (log_in, log_out, log_ratio, offset), {weight.dtype, storage, dtype}
    constant = not weight.requires_grad and dtypes <= kernels.DTYPES
    if constant and kernels.fit(weight) and kernels.fit(*theta, dtypes={torch.float32}):
        from onptq.kernels.weights import fake_quantize_rows

        scale_in, scale_out = (None if log is None else log.exp() for log in (log_in, log_out))
        grid = scheme.weight_bits, scheme.symmetric, storage, dtype
        return fake_quantize_rows(weight, scale_in, scale_out, log_ratio.exp(), offset, *grid)
    grouped = _grouped(smoothed(weight, log_in, log_out), log_ratio)
    offset = None if offset is None else _grouped(offset, log_ratio)
    scale, zero = weight_grid(grouped, log_ratio, scheme, storage)
    shift = offset if zero is None else zero if offset is None else offset + zero
    bits = scheme.weight_bits
    out: Tensor = FakeQuantize.apply(grouped, scale, shift, zero, bits, dtype)  # type: ignore[no-untyped-call]
    return out.view_as(weight)


@torch.no_grad()
def weight_codes(
    weight: Tensor, log_ratio: Tensor, offset: Tensor | None, scheme: Scheme, storage: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same weight as codes int8 [O, I], scale [O, G] in the storage dtype, and zero point int8 [O, G] or None."""
    grouped, offset = _grouped(weight, log_ratio), None if offset is None else _grouped(offset, log_ratio)
    scale, zero = weight_grid(grouped, log_ratio, scheme, storage)
    shift = offset if zero is None else zero if offset is None else offset + zero
    codes = round_to_codes(grouped, scale, scheme.weight_bits, shift).to(torch.int8).view_as(weight)
    return codes, scale[..., 0].to(storage), None if zero is None else zero[..., 0].to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(codes - zero) * scale in the compute dtype, [O, I]."""
    if dtype in kernels.DTYPES and kernels.fit(scale) and kernels.fit(codes, zero, dtypes={torch.int8}):
        from onptq.kernels.weights import dequantize_rows

        return dequantize_rows(codes, scale, zero, dtype)
    grouped = codes.to(dtype).view(*scale.shape, -1)
    if zero is not None:
        grouped = grouped - zero.to(dtype)[..., None]
    return (grouped * scale.to(dtype)[..., None]).view_as(codes)


def _grouped(matrix: Tensor, log_ratio: Tensor) -> Tensor:
    return matrix.reshape(*log_ratio.shape, -1)
