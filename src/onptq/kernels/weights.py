"""`quantizer.weights.fake_quantize_weight` in one pass over memory each way, operation for operation.

Forward values are those of the plain function bit for bit: the same order of operations, true divisions, every
intermediate rounded to the dtype of the plain tensor. Gradients differ by the order of fp32 sums only. The result and,
where offsets are learned, their gradient are the only tensors of a weight's size that are written.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from torch.autograd.function import once_differentiable

from onptq.kernels import launching_on
from onptq.kernels.grid import OFF_TIE, code_range
from onptq.kernels.rows import (
    channels_backward_kernel,
    rows_backward_kernel,
    rows_dequantized_kernel,
    rows_forward_kernel,
)
from onptq.kernels.tiles import WARPS, tiles

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CHANNELS, OUTPUTS = 128, 16  # the tile over which gradients of input channels are summed
WALKED = 256  # outputs that one program walks, tile by tile


def fake_quantize_rows(
    weight: Tensor,
    scale_in: Tensor | None,
    scale_out: Tensor | None,
    ratio: Tensor,
    offset: Tensor | None,
    bits: int,
    symmetric: bool,
    storage: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """Weights [O, I] times smoothing [I], over smoothing [O], with scale ratios [O, G] and offsets [O, I], in `dtype`.

    The weights are constants; all else has a gradient."""
    theta = scale_in, scale_out, ratio, offset
    return _Rows.apply(weight, *theta, bits, symmetric, storage, dtype)  # type: ignore[no-any-return]


def dequantize_rows(codes: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Codes int8 [O, I] less zero points int8 [O, G], times scales [O, G], as `quantizer.weights.dequantize` has it."""
    codes, scale = codes.contiguous(), scale.contiguous()
    out = torch.empty_like(codes, dtype=dtype)
    grid, shape = tiles(codes.view(scale.numel(), -1))
    with launching_on(codes):
        zeros = None if zero is None else zero.contiguous()
        rows_dequantized_kernel[grid](codes, scale, zeros, out, **shape, SYMMETRIC=zero is None, num_warps=WARPS)
    return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale_in: Tensor | None,
        scale_out: Tensor | None,
        ratio: Tensor,
        offset: Tensor | None,
        bits: int,
        symmetric: bool,
        storage: torch.dtype,
        dtype: torch.dtype,
    ) -> Tensor:
        weight, ratio = weight.contiguous(), ratio.contiguous()
        scale_in, scale_out, offset = (
            one if one is None else one.contiguous() for one in (scale_in, scale_out, offset)
        )
        out = torch.empty_like(weight, dtype=dtype)
        top = torch.empty_like(ratio)
        bottom = top if symmetric else torch.empty_like(ratio)
        low, high = code_range(bits)
        ctx.grid = {
            "LOW": low,
            "HIGH": high,
            "SYMMETRIC": symmetric,
            "PER_TOP": OFF_TIE / ((high - low) / 2),
            "EPS": torch.finfo(storage).eps,
            "STORAGE": TRITON_DTYPES[storage],
            "IN": scale_in is not None,
            "OUT": scale_out is not None,
            "OFFSET": offset is not None,
        }
        tensors = weight, scale_in, scale_out, ratio, offset
        grid, shape = tiles(weight.view(ratio.numel(), -1))
        with launching_on(weight):
            launch = rows_forward_kernel[grid]
            launch(*tensors, out, top, bottom, ratio.shape[1], **shape, **ctx.grid, num_warps=WARPS)
        ctx.save_for_backward(*tensors, top, bottom)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, top, bottom = ctx.saved_tensors
        weight, scale_in, scale_out, ratio, _ = tensors
        want_in, want_out, _, want_offset = ctx.needs_input_grad[1:5]
        grad, groups = grad.contiguous(), ratio.shape[1]
        grad_ratio, per_top, per_bottom, per_out = (torch.empty_like(ratio) for _ in range(4))
        grad_offset = torch.empty_like(weight, dtype=torch.float32) if want_offset else None
        rows = (*tensors, top, bottom)
        grid, shape = tiles(weight.view(ratio.numel(), -1))
        with launching_on(weight):
            rows_backward_kernel[grid](
                grad,
                *rows,
                grad_ratio,
                per_top,
                per_bottom,
                per_out,
                grad_offset,
                groups,
                **shape,
                **ctx.grid,
                WANT_IN=want_in,
                WANT_OUT=want_out,
                WANT_OFFSET=want_offset,
                num_warps=WARPS,
            )
            grad_in = _channel_sums(grad, rows, per_top, per_bottom, ctx.grid) / scale_in if want_in else None
        grad_out = per_out.sum(1) / -scale_out if want_out else None
        return None, grad_in, grad_out, grad_ratio, grad_offset, None, None, None, None


def _channel_sums(
    grad: Tensor, rows: tuple[Tensor, ...], per_top: Tensor, per_bottom: Tensor, grid: dict[str, Any]
) -> Tensor:
    """Gradients of smoothed weights times these weights, summed over the outputs of each input channel, [I]."""
    outputs, channels = grad.shape
    groups = per_top.shape[1]
    parts = torch.empty(triton.cdiv(outputs, WALKED), channels, device=grad.device)
    channels_backward_kernel[triton.cdiv(channels, CHANNELS), len(parts)](
        grad,
        *rows,
        per_top,
        per_bottom,
        parts,
        groups,
        outputs,
        channels,
        **grid,
        GROUPED=groups > 1,
        CHANNELS=CHANNELS,
        OUTPUTS=OUTPUTS,
        WALKED=WALKED,
        num_warps=WARPS,
    )
    return parts.sum(0)
