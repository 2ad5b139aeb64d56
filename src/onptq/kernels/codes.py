"""Codes of activations, `quantizer.numerics.quantize_tokens`, in one pass over memory, as packets; and the parts of
every kernel that ends in codes.

A kernel that gates or norms first multiplies with the reciprocal of the scale, so its codes may differ by one from
those of the plain functions where a value lies between two codes. `token_codes` divides, and has the same codes.
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
    """The packet of activations [rows, width]."""
    rows, width = x.shape
    packet = empty_packet(rows, width, x)
    with launching_on(x):
        shape = whole_rows(min(width, WIDEST), PER_WARP) | {"width": width}
        _tokens[(rows,)](x.contiguous(), *unpacked(packet, width), **shape, **token_grid(x, bits))
    return packet


@triton.jit
def magnitude(x):
    """The absolute value, infinite for a NaN: no code shows a NaN, but an infinite scale does."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def scale_of(top, HALF: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr):
    """The scale of a token whose largest magnitude is `top`, in the activations' dtype."""
    scale = tl.div_rn(top, top * 0 + HALF).to(DTYPE).to(tl.float32)
    return tl.where(scale == 0, EPS, scale)


@triton.jit
def store_codes(codes_ptr, column, width, placed, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Round values in units of their scale, and store the codes."""
    code = tl.minimum(tl.maximum(rounded(placed), LOW), HIGH)
    tl.store(codes_ptr + column, code.to(tl.int8), mask=column < width)


@triton.jit
def _tokens(
    x_ptr,
    codes_ptr,
    scales_ptr,
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
    scale = scale_of(tl.max(tops, 0), HALF, EPS, dtype)
    tl.store(scales_ptr + row, scale)
    for first in range(0, width, WIDTH):
        x = tl.load(x_ptr + row * width + first + column, mask=first + column < width, other=0.0).to(tl.float32)
        placed = divided(x, scale).to(dtype).to(tl.float32)
        store_codes(codes_ptr + row * width, first + column, width, placed, LOW, HIGH)
