"""Codes of a gated product, silu(gate) * up, in one pass over memory: what `quantizer.integer.quantize_tokens` makes of it.

Exponentials are the GPU's fast ones, since at these widths exact ones would take longer than memory does.
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
from onptq.kernels.codes import BITS, magnitude, step_of, store_codes
from onptq.kernels.packets import empty_packet, unpacked
from onptq.kernels.tiles import token_grid

WARPS = 16
LEAST = 16  # columns of a part


def gated_codes(pairs: Tensor) -> Tensor:
    """Gates and what they multiply side by side, [rows, 2 x width]: the codes of their product as a packet."""
    rows, width = pairs.shape[0], pairs.shape[1] // 2
    packet = empty_packet(rows, width, pairs)
    with launching_on(pairs):
        _gated[(rows,)](
            pairs.contiguous(),
            *unpacked(packet, width),
            width,
            **token_grid(pairs, BITS),
            **_parts(width),
            num_warps=WARPS,
        )
    return packet


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
def operator() -> Callable[[Tensor], Tensor]:
    """The same, such that torch.compile need not look into it."""
    found = torch.library.custom_op(
        "onptq::gated_codes", gated_codes, mutates_args=(), schema="(Tensor pairs) -> Tensor"
    )

    @found.register_fake
    def shape(pairs: Tensor) -> Tensor:
        return empty_packet(pairs.shape[0], pairs.shape[1] // 2, pairs)

    return found


@triton.jit
def _product(pairs_ptr, column, width):
    inside = column < width
    gate = tl.load(pairs_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pairs_ptr + width + column, mask=inside, other=0.0).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(pairs_ptr.dtype.element_ty)


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
    """A row, whose products stay in registers between its largest and its codes, as narrow as they are."""
    row = tl.program_id(0).to(tl.int64)
    pairs_ptr, codes_ptr = pairs_ptr + 2 * row * width, codes_ptr + row * width
    a, b, c = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND), FIRST + SECOND + tl.arange(0, THIRD)
    x, y, z = _product(pairs_ptr, a, width), _product(pairs_ptr, b, width), _product(pairs_ptr, c, width)
    top = tl.maximum(tl.maximum(tl.max(magnitude(x), 0), tl.max(magnitude(y), 0)), tl.max(magnitude(z), 0))
    step = step_of(top.to(tl.float32), HALF, EPS, pairs_ptr.dtype.element_ty)
    tl.store(steps_ptr + row, step)
    per_step = 1.0 / step
    store_codes(codes_ptr, a, width, x.to(tl.float32) * per_step, LOW, HIGH)
    store_codes(codes_ptr, b, width, y.to(tl.float32) * per_step, LOW, HIGH)
    store_codes(codes_ptr, c, width, z.to(tl.float32) * per_step, LOW, HIGH)
