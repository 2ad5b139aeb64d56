"""Codes of a block's normed residual stream in one pass over memory.

The pass adds to the stream, then computes `quantizer.norms.rms_norm` and `quantizer.numerics.quantize_tokens`.
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
from onptq.kernels.codes import BITS, PER_WARP, magnitude, scale_of, store_codes
from onptq.kernels.packets import empty_packet, unpacked
from onptq.kernels.tiles import token_grid, whole_rows


def normed_codes(x: Tensor, stream: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The packet of the norm of x + stream, both [rows, width], and the sum, which is the new stream."""
    rows, width = x.shape
    packet, total = empty_packet(rows, width, x), stream.new_empty(stream.shape)
    with launching_on(x):
        _normed[(rows,)](
            x.contiguous(),
            stream.contiguous(),
            gain,
            total,
            *unpacked(packet, width),
            eps,
            **whole_rows(width, PER_WARP),
            **token_grid(x, BITS),
        )
    return packet, total


@cache
def operator() -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """`normed_codes` as an operator that is opaque to torch.compile."""
    schema = "(Tensor x, Tensor stream, Tensor gain, float eps) -> (Tensor, Tensor)"
    operation = torch.library.custom_op("onptq::normed_codes", normed_codes, mutates_args=(), schema=schema)

    @operation.register_fake
    def shapes(x: Tensor, stream: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return empty_packet(x.shape[0], x.shape[1], x), stream.new_empty(stream.shape)

    return operation


@triton.jit
def _normed(
    x_ptr,
    stream_ptr,
    gain_ptr,
    total_ptr,
    codes_ptr,
    scales_ptr,
    eps,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One row, rounded where PyTorch rounds: the sum, the norm before its gain and after it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    at = row * width + column
    dtype = x_ptr.dtype.element_ty
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = (x + tl.load(stream_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(total_ptr + at, total, mask=inside)
    x = total.to(tl.float32)
    rate = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    normed = (gain * (x * rate).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    scale = scale_of(tl.max(magnitude(normed), 0), HALF, EPS, dtype)
    tl.store(scales_ptr + row, scale)
    store_codes(codes_ptr + row * width, column, width, normed * (1.0 / scale), LOW, HIGH)
