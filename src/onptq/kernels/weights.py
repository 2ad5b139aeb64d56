"""`quantizer.weights.fake_quantize_weight` in one pass over memory each way, operation for operation.

Forward values are those of the plain function bit for bit: the same order of operations, a division that is one, every
intermediate rounded to the dtype the plain tensor would have. Gradients differ by the order of fp32 sums only.
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
from onptq.kernels.tiles import WARPS, in_steps, rounded, rows_here, saturated, sign, tiles
from onptq.quantizer.integer import code_range
from onptq.quantizer.weights import OFF_TIE

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def fake_quantize_rows(
    weight: Tensor,
    ratio: Tensor,
    offset: Tensor | None,
    bits: int,
    symmetric: bool,
    storage: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """Smoothed fp32 weights [O, G, I / G] with step ratios [O, G] and offsets like the weights, to `dtype`."""
    return _Rows.apply(weight, ratio, offset, bits, symmetric, storage, dtype)  # type: ignore[no-any-return]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ratio: Tensor,
        offset: Tensor | None,
        bits: int,
        symmetric: bool,
        storage: torch.dtype,
        dtype: torch.dtype,
    ) -> Tensor:
        weight, ratio = weight.contiguous(), ratio.contiguous()
        offset = None if offset is None else offset.contiguous()
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
            "OFFSET": offset is not None,
        }
        grid, shape = tiles(weight)
        with launching_on(weight):
            _rows_forward[grid](weight, ratio, offset, out, top, bottom, **shape, **ctx.grid, num_warps=WARPS)
        ctx.save_for_backward(weight, ratio, offset, top, bottom)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, ratio, offset, top, bottom = ctx.saved_tensors
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[0] else None
        grad_offset = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        grad_ratio = torch.empty_like(ratio)
        grid, shape = tiles(weight)
        with launching_on(weight):
            _rows_backward[grid](
                grad.contiguous(),
                weight,
                ratio,
                offset,
                top,
                bottom,
                grad_weight,
                grad_ratio,
                grad_offset,
                **shape,
                **ctx.grid,
                WANT_WEIGHT=grad_weight is not None,
                WANT_OFFSET=grad_offset is not None,
                num_warps=WARPS,
            )
        return grad_weight, grad_ratio, grad_offset, None, None, None, None


@triton.jit
def _row_grid(
    ratio,
    top,
    bottom,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    PER_TOP: tl.constexpr,
    EPS: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """As `weight_grid`: span, whether the step is the span's and not the smallest allowed, step and zero point of each row."""
    span, zero = top * PER_TOP, tl.zeros_like(top)
    if not SYMMETRIC:
        span = tl.div_rn(top - bottom, tl.full(top.shape, HIGH - LOW, tl.float32))
    step = (ratio * span).to(STORAGE).to(tl.float32)
    free = step != 0
    step = tl.where(free, step, EPS)
    if not SYMMETRIC:
        zero = saturated(rounded(LOW - tl.div_rn(ratio * bottom, step)), LOW, HIGH)
    return span, free, step, zero


@triton.jit
def _placed(scaled, offset_ptr, at, inside, zero, SYMMETRIC: tl.constexpr, OFFSET: tl.constexpr):
    """Where weights in steps lie on the grid of codes, before they are rounded."""
    v = scaled
    if OFFSET:
        v = v + (tl.load(offset_ptr + at, mask=inside, other=0.0) + zero[:, None])
    elif not SYMMETRIC:
        v = v + zero[:, None]
    return v


@triton.jit(do_not_specialize=["rows"])
def _rows_forward(
    weight_ptr,
    ratio_ptr,
    offset_ptr,
    out_ptr,
    top_ptr,
    bottom_ptr,
    rows,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    PER_TOP: tl.constexpr,
    EPS: tl.constexpr,
    STORAGE: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, row_in, start, column = rows_here(rows, width, ROWS, COLUMNS)
    tops = tl.zeros([ROWS, COLUMNS], tl.float32)  # a range always holds 0, so 0 is neutral to both ends of it
    bottoms = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        w = tl.load(weight_ptr + start + first + column, mask=inside, other=0.0)
        if SYMMETRIC:
            tops = tl.maximum(tops, tl.abs(w))
        else:
            tops, bottoms = tl.maximum(tops, w), tl.minimum(bottoms, w)
    top, bottom = tl.max(tops, 1), tl.min(bottoms, 1)
    tl.store(top_ptr + row, top, mask=row_in)
    if not SYMMETRIC:
        tl.store(bottom_ptr + row, bottom, mask=row_in)
    ratio = tl.load(ratio_ptr + row, mask=row_in, other=1.0)
    _, _, step, zero = _row_grid(ratio, top, bottom, LOW, HIGH, SYMMETRIC, PER_TOP, EPS, STORAGE)
    dtype = out_ptr.dtype.element_ty
    factor = step.to(dtype).to(tl.float32)[:, None]
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        w = tl.load(weight_ptr + start + first + column, mask=inside, other=0.0)
        v = _placed(in_steps(w, step), offset_ptr, start + first + column, inside, zero, SYMMETRIC, OFFSET)
        code = rounded(saturated(v, LOW, HIGH)) - zero[:, None]
        out = code.to(dtype).to(tl.float32) * factor
        tl.store(out_ptr + start + first + column, out.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rows_backward(
    grad_ptr,
    weight_ptr,
    ratio_ptr,
    offset_ptr,
    top_ptr,
    bottom_ptr,
    grad_weight_ptr,
    grad_ratio_ptr,
    grad_offset_ptr,
    rows,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    PER_TOP: tl.constexpr,
    EPS: tl.constexpr,
    STORAGE: tl.constexpr,
    OFFSET: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, row_in, start, column = rows_here(rows, width, ROWS, COLUMNS)
    ratio = tl.load(ratio_ptr + row, mask=row_in, other=1.0)
    top = tl.load(top_ptr + row, mask=row_in, other=0.0)
    bottom = tl.load(bottom_ptr + row, mask=row_in, other=0.0)
    span, free, step, zero = _row_grid(ratio, top, bottom, LOW, HIGH, SYMMETRIC, PER_TOP, EPS, STORAGE)
    grad_steps = tl.zeros([ROWS, COLUMNS], tl.float32)
    tops = tl.zeros([ROWS, COLUMNS], tl.float32)  # several weights may be the largest, and share its gradient
    bottoms = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        w = tl.load(weight_ptr + start + first + column, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + start + first + column, mask=inside, other=0.0).to(tl.float32)
        scaled = in_steps(w, step)
        v = _placed(scaled, offset_ptr, start + first + column, inside, zero, SYMMETRIC, OFFSET)
        free_code = (v >= LOW) & (v <= HIGH)
        code = rounded(saturated(v, LOW, HIGH)) - zero[:, None]
        grad_steps += grad * tl.where(free_code, code - scaled, code)
        if WANT_OFFSET:
            grad_offset = tl.where(free_code, grad, 0.0) * step[:, None]
            tl.store(grad_offset_ptr + start + first + column, grad_offset, mask=inside)
        if SYMMETRIC:
            tops += tl.where(inside & (tl.abs(w) == top[:, None]), 1.0, 0.0)
        else:
            tops += tl.where(inside & (w == top[:, None]), 1.0, 0.0)
            bottoms += tl.where(inside & (w == bottom[:, None]), 1.0, 0.0)
    grad_step = tl.where(free, tl.sum(grad_steps, 1), 0.0)
    tl.store(grad_ratio_ptr + row, grad_step * span, mask=row_in)
    if WANT_WEIGHT:
        per_span = grad_step * ratio
        if SYMMETRIC:
            per_top = per_span * PER_TOP / tl.maximum(tl.sum(tops, 1), 1.0)
            per_bottom = per_top
        else:
            per_top = per_span / (HIGH - LOW) / tl.maximum(tl.sum(tops, 1), 1.0)
            per_bottom = -per_span / (HIGH - LOW) / tl.maximum(tl.sum(bottoms, 1), 1.0)
        for first in range(0, width, COLUMNS):
            inside = row_in[:, None] & (first + column < width)
            w = tl.load(weight_ptr + start + first + column, mask=inside, other=0.0)
            grad = tl.load(grad_ptr + start + first + column, mask=inside, other=0.0).to(tl.float32)
            v = _placed(in_steps(w, step), offset_ptr, start + first + column, inside, zero, SYMMETRIC, OFFSET)
            grad_weight = tl.where((v >= LOW) & (v <= HIGH), grad, 0.0)
            if SYMMETRIC:
                grad_weight += tl.where(tl.abs(w) == top[:, None], sign(w) * per_top[:, None], 0.0)
            else:
                grad_weight += tl.where(w == top[:, None], per_top[:, None], 0.0)
                grad_weight += tl.where(w == bottom[:, None], per_bottom[:, None], 0.0)
            tl.store(grad_weight_ptr + start + first + column, grad_weight, mask=inside)
