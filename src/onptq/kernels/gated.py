"""Codes of a gated product, silu(gate) * up, in one pass over memory: what `quantizer.integer.quantize_tokens` makes of it.

A code may differ by one from that of the plain function where a value lies between two: exponentials and divisions are the
GPU's fast ones here, since at these widths exact ones would take longer than memory does.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from onptq.kernels import launching_on
from onptq.kernels.tiles import rounded
from onptq.quantizer.integer import code_range

BITS = 8
STEP_ROWS = 4  # steps are read so many at a time by those who multiply
VARIANT, COLUMNS, WARPS = "held", 4096, 16


def gated_codes(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Gates and what they multiply side by side, [rows, 2 x width]: codes int8 [rows, width] and steps float32 [rows, 1]."""
    rows, width = pairs.shape[0], pairs.shape[1] // 2
    codes = torch.empty(rows, width, dtype=torch.int8, device=pairs.device)
    steps = torch.empty(-(-rows // STEP_ROWS) * STEP_ROWS, 1, device=pairs.device)[:rows]
    low, high = code_range(BITS)
    grid = {"LOW": low, "HIGH": high, "HALF": (2**BITS - 1) / 2, "EPS": torch.finfo(pairs.dtype).eps}
    with launching_on(pairs):
        if VARIANT == "held":
            first = 1 << (width.bit_length() - 1)
            second = max(16, 1 << ((width - first).bit_length() - 1)) if width > first else 16
            third = max(16, triton.next_power_of_2(max(1, width - first - second)))
            _held[(rows,)](pairs, codes, steps, width, **grid, A=first, B=second, C=third, num_warps=WARPS)
        else:
            _twice[(rows,)](pairs, codes, steps, width, **grid, COLUMNS=COLUMNS, num_warps=WARPS)
    return codes, steps


@cache
def operator() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The same, such that torch.compile need not look into it."""
    found = torch.library.custom_op(
        "onptq::gated_codes", gated_codes, mutates_args=(), schema="(Tensor pairs) -> (Tensor, Tensor)"
    )

    @found.register_fake
    def shapes(pairs: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = pairs.shape[0], pairs.shape[1] // 2
        return pairs.new_empty(rows, width, dtype=torch.int8), pairs.new_empty(rows, 1, dtype=torch.float32)

    return found


@triton.jit
def _product(pairs_ptr, start, column, width):
    inside = column < width
    gate = tl.load(pairs_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pairs_ptr + start + width + column, mask=inside, other=0.0).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(pairs_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _step(top, HALF: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr):
    step = tl.div_rn(top, top * 0 + HALF).to(DTYPE).to(tl.float32)
    return tl.where(step == 0, EPS, step)


@triton.jit
def _store(codes_ptr, at, column, width, product, per_step, LOW: tl.constexpr, HIGH: tl.constexpr):
    code = tl.minimum(tl.maximum(rounded(product * per_step), LOW), HIGH)
    tl.store(codes_ptr + at + column, code.to(tl.int8), mask=column < width)


@triton.jit
def _held(
    pairs_ptr, codes_ptr, steps_ptr, width,
    LOW: tl.constexpr, HIGH: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start, at = 2 * row * width, row * width
    a, b, c = tl.arange(0, A), A + tl.arange(0, B), A + B + tl.arange(0, C)
    x = _product(pairs_ptr, start, a, width)
    y = _product(pairs_ptr, start, b, width)
    z = _product(pairs_ptr, start, c, width)
    top = tl.maximum(tl.maximum(tl.max(tl.abs(x), 0), tl.max(tl.abs(y), 0)), tl.max(tl.abs(z), 0))
    step = _step(top, HALF, EPS, pairs_ptr.dtype.element_ty)
    tl.store(steps_ptr + row, step)
    per_step = 1.0 / step
    _store(codes_ptr, at, a, width, x, per_step, LOW, HIGH)
    _store(codes_ptr, at, b, width, y, per_step, LOW, HIGH)
    _store(codes_ptr, at, c, width, z, per_step, LOW, HIGH)


@triton.jit
def _twice(
    pairs_ptr, codes_ptr, steps_ptr, width,
    LOW: tl.constexpr, HIGH: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start, at, column = 2 * row * width, row * width, tl.arange(0, COLUMNS)
    tops = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        tops = tl.maximum(tops, tl.abs(_product(pairs_ptr, start, first + column, width)))
    step = _step(tl.max(tops, 0), HALF, EPS, pairs_ptr.dtype.element_ty)
    tl.store(steps_ptr + row, step)
    per_step = 1.0 / step
    for first in range(0, width, COLUMNS):
        product = _product(pairs_ptr, start, first + column, width)
        _store(codes_ptr, at, first + column, width, product, per_step, LOW, HIGH)
