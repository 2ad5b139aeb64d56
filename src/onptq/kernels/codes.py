"""Codes of activations, `quantizer.integer.quantize_tokens`, in one pass over memory, as packets; and what all kernels that end
in codes share.

What is gated or normed first may have codes that differ by one from the plain functions' where a value lies between two: it is
multiplied by the reciprocal of its step. Activations that are there already are divided, and have the same codes.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from onptq.kernels import launching_on
from onptq.kernels.packets import empty_packet, unpacked
from onptq.kernels.tiles import divided, rounded, token_grid, whole_rows

BITS = 8
PER_WARP = 256  # elements of a row
WIDEST = 4096  # elements of a row that are held at once; longer rows are read twice


def token_codes(x: Tensor, bits: int = BITS) -> Tensor:
    """[rows, width] as a packet."""
    rows, width = x.shape
    packet = empty_packet(rows, width, x)
    with launching_on(x):
        shape = whole_rows(min(width, WIDEST), PER_WARP) | {"width": width}
        _tokens[(rows,)](x.contiguous(), *unpacked(packet, width), **shape, **token_grid(x, bits))
    return packet


@triton.jit
def magnitude(x):
    """No code shows a NaN, but its token's step does: it is no number then."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def step_of(top, HALF: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr):
    """Of a token whose largest magnitude is `top`, in the activations' dtype."""
    step = tl.div_rn(top, top * 0 + HALF).to(DTYPE).to(tl.float32)
    return tl.where(step == 0, EPS, step)


@triton.jit
def store_codes(codes_ptr, column, width, placed, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Of values in steps."""
    code = tl.minimum(tl.maximum(rounded(placed), LOW), HIGH)
    tl.store(codes_ptr + column, code.to(tl.int8), mask=column < width)


@triton.jit
def _tokens(
    x_ptr,
    codes_ptr,
    steps_ptr,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    dtype = x_ptr.dtype.element_ty
    tops = tl.zeros([WIDTH], tl.float32)
    for first in range(0, width, WIDTH):
        x = tl.load(x_ptr + row * width + first + column, mask=first + column < width, other=0.0).to(tl.float32)
        tops = tl.maximum(tops, magnitude(x))
    step = step_of(tl.max(tops, 0), HALF, EPS, dtype)
    tl.store(steps_ptr + row, step)
    for first in range(0, width, WIDTH):
        x = tl.load(x_ptr + row * width + first + column, mask=first + column < width, other=0.0).to(tl.float32)
        placed = divided(x, step).to(dtype).to(tl.float32)
        store_codes(codes_ptr + row * width, first + column, width, placed, LOW, HIGH)
