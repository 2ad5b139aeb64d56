"""Codes of silu(gate) * up in one pass over memory: `quantizer.numerics.quantize_tokens` of the gated MLP.

Exponentials are the GPU's fast ones: at these widths exact ones would take longer than memory.
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
from onptq.kernels.codes import BITS, magnitude, scale_of, store_codes
from onptq.kernels.packets import empty_packet, unpacked
from onptq.kernels.tiles import token_grid

WARPS = 16
LEAST = 16  # columns of a part


def gated_codes(pairs: Tensor) -> Tensor:
    """The packet of silu(gate) * up; `pairs` [rows, 2 x width] has gate and up side by side."""
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
    """Three powers of two that cover a row: 18,944 columns are 16,384 and 2,048 and 512."""
    first = max(LEAST, 1 << (width.bit_length() - 1))
    second = max(LEAST, 1 << (max(1, width - first).bit_length() - 1))
    return {
        "FIRST": first,
        "SECOND": second,
        "THIRD": max(LEAST, triton.next_power_of_2(max(1, width - first - second))),
    }


@cache
def operator() -> Callable[[Tensor], Tensor]:
    """`gated_codes` as an operator that is opaque to torch.compile."""
    operation = torch.library.custom_op(
        "onptq::gated_codes", gated_codes, mutates_args=(), schema="(Tensor pairs) -> Tensor"
    )

    @operation.register_fake
    def shape(pairs: Tensor) -> Tensor:
        return empty_packet(pairs.shape[0], pairs.shape[1] // 2, pairs)

    return operation


@triton.jit
def _gate(pairs_ptr, column, width):
    inside = column < width
    gate = tl.load(pairs_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pairs_ptr + width + column, mask=inside, other=0.0).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(pairs_ptr.dtype.element_ty)


@triton.jit
def _gated(
    pairs_ptr,
    codes_ptr,
    scales_ptr,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
):
    """One row. Its values stay in registers, in 16 bits, between their maximum and their codes."""
    row = tl.program_id(0).to(tl.int64)
    pairs_ptr, codes_ptr = pairs_ptr + 2 * row * width, codes_ptr + row * width
    a, b, c = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND), FIRST + SECOND + tl.arange(0, THIRD)
    x, y, z = _gate(pairs_ptr, a, width), _gate(pairs_ptr, b, width), _gate(pairs_ptr, c, width)
    top = tl.maximum(tl.maximum(tl.max(magnitude(x), 0), tl.max(magnitude(y), 0)), tl.max(magnitude(z), 0))
    scale = scale_of(top.to(tl.float32), HALF, EPS, pairs_ptr.dtype.element_ty)
    tl.store(scales_ptr + row, scale)
    inverse = 1.0 / scale
    store_codes(codes_ptr, a, width, x.to(tl.float32) * inverse, LOW, HIGH)
    store_codes(codes_ptr, b, width, y.to(tl.float32) * inverse, LOW, HIGH)
    store_codes(codes_ptr, c, width, z.to(tl.float32) * inverse, LOW, HIGH)
