"""The Triton side of `kernels.weights`: each program takes some rows of a weight, or some of its input channels."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from onptq.kernels.tiles import divided, rounded, rows_here, saturated, sign


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
    """Span, whether the scale comes from it, scale and zero point of each row, as `weight_grid` computes them."""
    span, zero = top * PER_TOP, tl.zeros_like(top)
    if not SYMMETRIC:
        span = tl.div_rn(top - bottom, tl.full(top.shape, HIGH - LOW, tl.float32))
    scale = (ratio * span).to(STORAGE).to(tl.float32)
    free = scale != 0
    scale = tl.where(free, scale, EPS)
    if not SYMMETRIC:
        zero = saturated(rounded(LOW - tl.div_rn(ratio * bottom, scale)), LOW, HIGH)
    return span, free, scale, zero


@triton.jit
def _scaled(weight_ptr, scale_in_ptr, at, channel, inside, IN: tl.constexpr):
    """Weights times the scales of their input channels."""
    w = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if IN:
        w = w * tl.load(scale_in_ptr + channel, mask=inside, other=0.0)
    return w


@triton.jit
def _placed(scaled, offset_ptr, at, inside, zero, SYMMETRIC: tl.constexpr, OFFSET: tl.constexpr):
    """The place on the grid of codes, before rounding, of weights in units of their scale."""
    v = scaled
    if OFFSET:
        v = v + (tl.load(offset_ptr + at, mask=inside, other=0.0) + zero)
    elif not SYMMETRIC:
        v = v + zero
    return v


@triton.jit(do_not_specialize=["rows"])
def rows_forward_kernel(
    weight_ptr,
    scale_in_ptr,
    scale_out_ptr,
    ratio_ptr,
    offset_ptr,
    out_ptr,
    top_ptr,
    bottom_ptr,
    groups,
    rows,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    PER_TOP: tl.constexpr,
    EPS: tl.constexpr,
    STORAGE: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, row_in, start, column = rows_here(rows, width, ROWS, COLUMNS)
    first_channel = (row % groups)[:, None] * width
    tops = tl.zeros([ROWS, COLUMNS], tl.float32)  # a range always holds 0, so 0 is neutral to both ends of it
    bottoms = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        w = _scaled(weight_ptr, scale_in_ptr, start + first + column, first_channel + first + column, inside, IN)
        if SYMMETRIC:
            tops = tl.maximum(tops, tl.abs(w))
        else:
            tops, bottoms = tl.maximum(tops, w), tl.minimum(bottoms, w)
    top, bottom = tl.max(tops, 1), tl.min(bottoms, 1)
    scale_out = tl.full([ROWS], 1.0, tl.float32)
    if OUT:  # a division keeps the order, so the largest stays the largest
        scale_out = tl.load(scale_out_ptr + row // groups, mask=row_in, other=1.0)
        top, bottom = tl.div_rn(top, scale_out), tl.div_rn(bottom, scale_out)
    tl.store(top_ptr + row, top, mask=row_in)
    if not SYMMETRIC:
        tl.store(bottom_ptr + row, bottom, mask=row_in)
    ratio = tl.load(ratio_ptr + row, mask=row_in, other=1.0)
    _, _, scale, zero = _row_grid(ratio, top, bottom, LOW, HIGH, SYMMETRIC, PER_TOP, EPS, STORAGE)
    dtype = out_ptr.dtype.element_ty
    factor = scale.to(dtype).to(tl.float32)[:, None]
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        at = start + first + column
        w = _scaled(weight_ptr, scale_in_ptr, at, first_channel + first + column, inside, IN)
        if OUT:
            w = divided(w, scale_out[:, None])
        v = _placed(divided(w, scale[:, None]), offset_ptr, at, inside, zero[:, None], SYMMETRIC, OFFSET)
        code = rounded(saturated(v, LOW, HIGH)) - zero[:, None]
        out = code.to(dtype).to(tl.float32) * factor
        tl.store(out_ptr + at, out.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def rows_backward_kernel(
    grad_ptr,
    weight_ptr,
    scale_in_ptr,
    scale_out_ptr,
    ratio_ptr,
    offset_ptr,
    top_ptr,
    bottom_ptr,
    grad_ratio_ptr,
    per_top_ptr,
    per_bottom_ptr,
    per_out_ptr,
    grad_offset_ptr,
    groups,
    rows,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    PER_TOP: tl.constexpr,
    EPS: tl.constexpr,
    STORAGE: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    OFFSET: tl.constexpr,
    WANT_IN: tl.constexpr,
    WANT_OUT: tl.constexpr,
    WANT_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums along rows: gradients of ratios, the gradient that the largest and smallest weights of a row get beside
    their own, and gradients of smoothed weights times these weights."""
    row, row_in, start, column = rows_here(rows, width, ROWS, COLUMNS)
    first_channel = (row % groups)[:, None] * width
    ratio = tl.load(ratio_ptr + row, mask=row_in, other=1.0)
    top = tl.load(top_ptr + row, mask=row_in, other=0.0)
    bottom = tl.load(bottom_ptr + row, mask=row_in, other=0.0)
    scale_out = tl.full([ROWS], 1.0, tl.float32)
    if OUT:
        scale_out = tl.load(scale_out_ptr + row // groups, mask=row_in, other=1.0)
    span, free, scale, zero = _row_grid(ratio, top, bottom, LOW, HIGH, SYMMETRIC, PER_TOP, EPS, STORAGE)
    grad_scales = tl.zeros([ROWS, COLUMNS], tl.float32)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    tops = tl.zeros([ROWS, COLUMNS], tl.float32)  # several weights may be the largest, and share its gradient
    bottoms = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        at = start + first + column
        w = _scaled(weight_ptr, scale_in_ptr, at, first_channel + first + column, inside, IN)
        if OUT:
            w = divided(w, scale_out[:, None])
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scaled = divided(w, scale[:, None])
        v = _placed(scaled, offset_ptr, at, inside, zero[:, None], SYMMETRIC, OFFSET)
        free_code = (v >= LOW) & (v <= HIGH)
        code = rounded(saturated(v, LOW, HIGH)) - zero[:, None]
        grad_scales += grad * tl.where(free_code, code - scaled, code)
        passed = tl.where(free_code, grad, 0.0)
        if WANT_OUT:
            products += passed * w
        if WANT_OFFSET:
            tl.store(grad_offset_ptr + at, passed * scale[:, None], mask=inside)
        if WANT_IN:
            if SYMMETRIC:
                tops += tl.where(inside & (tl.abs(w) == top[:, None]), 1.0, 0.0)
            else:
                tops += tl.where(inside & (w == top[:, None]), 1.0, 0.0)
                bottoms += tl.where(inside & (w == bottom[:, None]), 1.0, 0.0)
    grad_scale = tl.where(free, tl.sum(grad_scales, 1), 0.0)
    tl.store(grad_ratio_ptr + row, grad_scale * span, mask=row_in)
    per_span = grad_scale * ratio
    if SYMMETRIC:
        per_top = per_span * PER_TOP
        per_bottom = per_top
        at_ends = per_top * top
    else:
        per_top = per_span / (HIGH - LOW)
        per_bottom = -per_top
        at_ends = per_top * (top - bottom)
    if WANT_OUT:
        tl.store(per_out_ptr + row, tl.sum(products, 1) + at_ends, mask=row_in)
    if WANT_IN:
        tl.store(per_top_ptr + row, per_top / tl.maximum(tl.sum(tops, 1), 1.0), mask=row_in)
        if not SYMMETRIC:
            tl.store(per_bottom_ptr + row, per_bottom / tl.maximum(tl.sum(bottoms, 1), 1.0), mask=row_in)


@triton.jit
def channels_backward_kernel(
    grad_ptr,
    weight_ptr,
    scale_in_ptr,
    scale_out_ptr,
    ratio_ptr,
    offset_ptr,
    top_ptr,
    bottom_ptr,
    per_top_ptr,
    per_bottom_ptr,
    part_ptr,
    groups,
    outputs,
    channels,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    PER_TOP: tl.constexpr,
    EPS: tl.constexpr,
    STORAGE: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUPED: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WALKED: tl.constexpr,
):
    """Sums along columns, over some outputs: gradients of smoothed weights times these weights."""
    channel = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    total = tl.zeros([OUTPUTS, CHANNELS], tl.float32)
    for walked in range(0, WALKED, OUTPUTS):
        output = (tl.program_id(1) * WALKED + walked + tl.arange(0, OUTPUTS))[:, None]
        output_in, inside = output < outputs, (output < outputs) & (channel < channels)
        if GROUPED:
            row, row_in = output * groups + channel // (channels // groups), inside
        else:
            row, row_in = output, output_in
        ratio = tl.load(ratio_ptr + row, mask=row_in, other=1.0)
        top = tl.load(top_ptr + row, mask=row_in, other=0.0)
        bottom = tl.load(bottom_ptr + row, mask=row_in, other=0.0)
        per_top = tl.load(per_top_ptr + row, mask=row_in, other=0.0)
        _, _, scale, zero = _row_grid(ratio, top, bottom, LOW, HIGH, SYMMETRIC, PER_TOP, EPS, STORAGE)
        at = output.to(tl.int64) * channels + channel
        w = _scaled(weight_ptr, scale_in_ptr, at, channel, inside, IN)
        if OUT:
            w = divided(w, tl.load(scale_out_ptr + output, mask=output_in, other=1.0))
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        v = _placed(divided(w, scale), offset_ptr, at, inside, zero, SYMMETRIC, OFFSET)
        grad_weight = tl.where((v >= LOW) & (v <= HIGH), grad, 0.0)
        if SYMMETRIC:
            grad_weight += tl.where(tl.abs(w) == top, sign(w) * per_top, 0.0)
        else:
            per_bottom = tl.load(per_bottom_ptr + row, mask=row_in, other=0.0)
            grad_weight += tl.where(w == top, per_top, 0.0)
            grad_weight += tl.where(w == bottom, per_bottom, 0.0)
        total += tl.where(inside, grad_weight * w, 0.0)
    at = part_ptr + tl.program_id(1).to(tl.int64) * channels + channel
    tl.store(at, tl.sum(total, 0)[None, :], mask=channel < channels)


@triton.jit(do_not_specialize=["rows"])
def rows_dequantized_kernel(
    code_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    rows,
    width,
    SYMMETRIC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, row_in, start, column = rows_here(rows, width, ROWS, COLUMNS)
    dtype = out_ptr.dtype.element_ty
    scale = tl.load(scale_ptr + row, mask=row_in, other=0.0).to(dtype).to(tl.float32)[:, None]
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        code = tl.load(code_ptr + start + first + column, mask=inside, other=0).to(tl.float32)
        if not SYMMETRIC:
            code -= tl.load(zero_ptr + row, mask=row_in, other=0).to(tl.float32)[:, None]
        tl.store(out_ptr + start + first + column, (code * scale).to(dtype), mask=inside)
