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
from onptq.quantizer.integer import STEP_ROWS, code_range

BITS = 8
WARPS = 16
LEAST = 16  # columns of a part


def gated_codes(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Gates and what they multiply side by side, [rows, 2 x width]: codes int8 [rows, width] and steps float32 [rows, 1]."""
    rows, width = pairs.shape[0], pairs.shape[1] // 2
    codes = torch.empty(rows, width, dtype=torch.int8, device=pairs.device)
    steps = torch.empty(-(-rows // STEP_ROWS) * STEP_ROWS, 1, device=pairs.device)[:rows]
    low, high = code_range(BITS)
    grid = {"LOW": low, "HIGH": high, "HALF": (2**BITS - 1) / 2, "EPS": torch.finfo(pairs.dtype).eps}
    with launching_on(pairs):
        _gated[(rows,)](pairs, codes, steps, width, **grid, **_parts(width), num_warps=WARPS)
    return codes, steps


def _parts(width: int) -> dict[str, int]:
    """Three powers of two that hold a row: 18,944 columns are 16,384 and 2,048 and 512."""
    first = max(LEAST, 1 << (width.bit_length() - 1))
    second = max(LEAST, 1 << (max(1, width - first).bit_length() - 1))
    return {
        "FIRST": first,
        "SECOND": second,
        "THIRD": max(LEAST, triton.next_power_of_2(max(1, width - first - second))),
    }


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
def _product(pairs_ptr, column, width):
    inside = column < width
    gate = tl.load(pairs_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pairs_ptr + width + column, mask=inside, other=0.0).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(pairs_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _store_codes(codes_ptr, column, width, product, per_step, LOW: tl.constexpr, HIGH: tl.constexpr):
    code = tl.minimum(tl.maximum(rounded(product * per_step), LOW), HIGH)
    tl.store(codes_ptr + column, code.to(tl.int8), mask=column < width)


@triton.jit
def _gated(
    pairs_ptr,
    codes_ptr,
    steps_ptr,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
):
    """A row, whose products stay in registers between its largest and its codes."""
    row = tl.program_id(0).to(tl.int64)
    pairs_ptr, codes_ptr = pairs_ptr + 2 * row * width, codes_ptr + row * width
    a, b, c = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND), FIRST + SECOND + tl.arange(0, THIRD)
    x, y, z = _product(pairs_ptr, a, width), _product(pairs_ptr, b, width), _product(pairs_ptr, c, width)
    top = tl.maximum(tl.maximum(tl.max(tl.abs(x), 0), tl.max(tl.abs(y), 0)), tl.max(tl.abs(z), 0))
    step = tl.div_rn(top, top * 0 + HALF).to(pairs_ptr.dtype.element_ty).to(tl.float32)
    step = tl.where(step == 0, EPS, step)
    tl.store(steps_ptr + row, step)
    _store_codes(codes_ptr, a, width, x, 1.0 / step, LOW, HIGH)
    _store_codes(codes_ptr, b, width, y, 1.0 / step, LOW, HIGH)
    _store_codes(codes_ptr, c, width, z, 1.0 / step, LOW, HIGH)
