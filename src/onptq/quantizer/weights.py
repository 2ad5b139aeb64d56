"""A weight under theta: smoothed, put on its grid, rounded. The training graph and the fold share every operation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onptq import kernels
from onptq.kernels.grid import OFF_TIE, code_range
from onptq.quantizer.numerics import (
    FakeQuantize,
    cast_through,
    full_range,
    product_dtype,
    round_to_codes,
    stored_scale,
)
from onptq.schemes import Floats, Scheme


def smoothed(weight: Tensor, log_in: Tensor | None, log_out: Tensor | None) -> Tensor:
    """W' = diag(1 / s_out) W diag(s_in), fp32 [O, I]."""
    weight = weight.float() if log_in is None else weight.float() * log_in.exp()
    return weight if log_out is None else weight / log_out.exp()[:, None]


def weight_grid(
    weight: Tensor, log_ratio: Tensor, scheme: Scheme, storage: torch.dtype, tensor_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scale [O, G, 1], rounded to the dtype it is stored in, and zero point [O, G, 1] of weights [O, G, I / G]."""
    grid, ratio = scheme.weight_grid, log_ratio.exp()[..., None]
    if isinstance(grid, Floats):
        full = full_range(weight.abs().amax(dim=-1, keepdim=True), grid, scheme.scales)
        return stored_scale(ratio * full, scheme.scales, storage, tensor_scale), None
    low, high = code_range(grid)
    if scheme.symmetric:
        span = weight.abs().amax(dim=-1, keepdim=True) * (OFF_TIE / ((high - low) / 2))
    else:
        floor = weight.amin(dim=-1, keepdim=True).clamp(max=0)
        reach = weight.amax(dim=-1, keepdim=True).clamp(min=0) - floor
        span = reach / reach.new_full((), high - low)  # a division on a GPU too, as for activations
    scale = stored_scale(ratio * span, "dtype", storage)
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
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """The weight [O, I] of the deployed linear, in the compute dtype; differentiable in theta."""
    if not scheme.quantizes_weights:
        return cast_through(smoothed(weight, log_in, log_out), storage).to(dtype)
    theta, dtypes = (log_in, log_out, log_ratio, offset), {weight.dtype, storage, dtype}
    constant = not weight.requires_grad and dtypes <= kernels.DTYPES and scheme.weight_floats is None
    if constant and kernels.fit(weight) and kernels.fit(*theta, dtypes={torch.float32}):
        from onptq.kernels.weights import fake_quantize_rows

        scale_in, scale_out = (None if log is None else log.exp() for log in (log_in, log_out))
        grid = scheme.weight_bits, scheme.symmetric, storage, dtype
        return fake_quantize_rows(weight, scale_in, scale_out, log_ratio.exp(), offset, *grid)
    grouped = to_groups(smoothed(weight, log_in, log_out), log_ratio, scheme.block_rows)
    offset = None if offset is None else to_groups(offset, log_ratio, scheme.block_rows)
    scale, zero = weight_grid(grouped, log_ratio, scheme, storage, tensor_scale)
    shift = offset if zero is None else zero if offset is None else offset + zero
    product = product_dtype(scheme, dtype)
    out: Tensor = FakeQuantize.apply(grouped, scale, shift, zero, scheme.weight_grid, product)  # type: ignore[no-untyped-call]
    return of_groups(out.to(dtype), weight.shape, scheme.block_rows)


@torch.no_grad()
def weight_codes(
    weight: Tensor,
    log_ratio: Tensor,
    offset: Tensor | None,
    scheme: Scheme,
    storage: torch.dtype,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same weight as codes [O, I], int8 or E4M3, scale [O, G], and zero point int8 [O, G] or None.

    The scale is in the storage dtype; one of few bits, divided by the tensor scale, is in float32."""
    grouped = to_groups(weight, log_ratio, scheme.block_rows)
    offset = None if offset is None else to_groups(offset, log_ratio, scheme.block_rows)
    scale, zero = weight_grid(grouped, log_ratio, scheme, storage, tensor_scale)
    shift = offset if zero is None else zero if offset is None else offset + zero
    codes = of_groups(round_to_codes(grouped, scale, scheme.weight_grid, shift), weight.shape, scheme.block_rows)
    codes = codes.to(torch.int8 if scheme.weight_floats is None else torch.float8_e4m3fn)
    stored = scale[..., 0].to(product_dtype(scheme, storage))
    return codes, stored, None if zero is None else zero[..., 0].to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype, block_rows: int = 1) -> Tensor:
    """(codes - zero) * scale in the dtype, [O, I]."""
    if dtype in kernels.DTYPES and kernels.fit(scale) and kernels.fit(codes, zero, dtypes={torch.int8}):
        from onptq.kernels.weights import dequantize_rows

        return dequantize_rows(codes, scale, zero, dtype)
    grouped = to_groups(codes.to(dtype), scale, block_rows)
    if zero is not None:
        grouped = grouped - zero.to(dtype)[..., None]
    return of_groups(grouped * scale.to(dtype)[..., None], codes.shape, block_rows)


def to_groups(matrix: Tensor, scale: Tensor, block_rows: int = 1) -> Tensor:
    """What lies under each scale of a matrix [O, I]: [*scale.shape, N]. A last block with too few rows is filled with
    zeros."""
    if block_rows == 1:
        return matrix.reshape(*scale.shape, -1)
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % block_rows))
    blocks = padded.reshape(scale.shape[0], block_rows, scale.shape[1], -1)
    return blocks.transpose(1, 2).flatten(2)


def of_groups(groups: Tensor, shape: torch.Size, block_rows: int = 1) -> Tensor:
    """The matrix [O, I] of `to_groups`."""
    if block_rows == 1:
        return groups.reshape(shape)
    blocks = groups.view(*groups.shape[:2], block_rows, -1).transpose(1, 2)
    return blocks.flatten(2).flatten(0, 1)[: shape[0]]


def per_weight(scale: Tensor, shape: torch.Size, block_rows: int = 1) -> Tensor:
    """Scales as a matrix [O, I]."""
    columns = scale.repeat_interleave(shape[1] // scale.shape[1], dim=1)
    return columns if block_rows == 1 else columns.repeat_interleave(block_rows, dim=0)[: shape[0]]
