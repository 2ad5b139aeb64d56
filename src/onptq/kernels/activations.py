"""`quantizer.numerics.fake_quantize_activations` in one pass over memory each way, as exactly as `kernels.weights`."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from torch.autograd.function import once_differentiable

from onptq.kernels import launching_on
from onptq.kernels.tiles import WARPS, divided, rounded, rows_here, saturated, sign, tiles, token_grid


def fake_quantize_tokens(x: Tensor, bits: int) -> Tensor:
    """Dynamic, symmetric, one scale per token; x is [..., tokens, channels]."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Tokens.apply(x, bits)  # type: ignore[no-any-return]
    return _forward(x.contiguous(), bits)[0]


def _forward(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The rounded activations, and the largest magnitude of each token."""
    out, top = torch.empty_like(x), x.new_empty(x.shape[:-1])
    grid, shape = tiles(x)
    with launching_on(x):
        _tokens_forward[grid](x, out, top, **shape, **token_grid(x, bits), num_warps=WARPS)
    return out, top


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        x = x.contiguous()
        out, top = _forward(x, bits)
        ctx.bits = bits
        ctx.save_for_backward(x, top)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, top = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grid, shape = tiles(x)
        with launching_on(x):
            launch = _tokens_backward[grid]
            launch(grad.contiguous(), x, top, grad_x, **shape, **token_grid(x, ctx.bits), num_warps=WARPS)
        return grad_x, None


@triton.jit
def _token_scale(top, HALF: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr):
    """Scale of each token in the activations' dtype, and whether it follows from the token."""
    scale = tl.div_rn(top, tl.full(top.shape, HALF, tl.float32)).to(DTYPE).to(tl.float32)
    return tl.where(scale == 0, EPS, scale), scale != 0


@triton.jit
def _placed(x, scale, DTYPE: tl.constexpr):
    """The place of activations on the grid of codes, before rounding."""
    return divided(x, scale[:, None]).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _tokens_forward(
    x_ptr,
    out_ptr,
    top_ptr,
    rows,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, row_in, start, column = rows_here(rows, width, ROWS, COLUMNS)
    dtype = x_ptr.dtype.element_ty
    tops = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        x = tl.load(x_ptr + start + first + column, mask=inside, other=0.0).to(tl.float32)
        tops = tl.maximum(tops, tl.abs(x))
    top = tl.max(tops, 1)
    tl.store(top_ptr + row, top.to(dtype), mask=row_in)
    scale, _ = _token_scale(top, HALF, EPS, dtype)
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        x = tl.load(x_ptr + start + first + column, mask=inside, other=0.0).to(tl.float32)
        v = _placed(x, scale, dtype)
        out = rounded(saturated(v, LOW, HIGH)) * scale[:, None]
        tl.store(out_ptr + start + first + column, out.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _tokens_backward(
    grad_ptr,
    x_ptr,
    top_ptr,
    grad_x_ptr,
    rows,
    width,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, row_in, start, column = rows_here(rows, width, ROWS, COLUMNS)
    dtype = x_ptr.dtype.element_ty
    top = tl.load(top_ptr + row, mask=row_in, other=0.0).to(tl.float32)
    scale, free = _token_scale(top, HALF, EPS, dtype)
    grad_scales = tl.zeros([ROWS, COLUMNS], tl.float32)
    tops = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        x = tl.load(x_ptr + start + first + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + start + first + column, mask=inside, other=0.0).to(tl.float32)
        v = _placed(x, scale, dtype)
        code = rounded(saturated(v, LOW, HIGH))
        grad_scales += grad * tl.where((v >= LOW) & (v <= HIGH), code - v, code)
        tops += tl.where(inside & (tl.abs(x) == top[:, None]), 1.0, 0.0)
    per_top = tl.where(free, tl.sum(grad_scales, 1) / HALF, 0.0) / tl.maximum(tl.sum(tops, 1), 1.0)
    for first in range(0, width, COLUMNS):
        inside = row_in[:, None] & (first + column < width)
        x = tl.load(x_ptr + start + first + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + start + first + column, mask=inside, other=0.0).to(tl.float32)
        v = _placed(x, scale, dtype)
        grad_x = tl.where((v >= LOW) & (v <= HIGH), grad, 0.0)
        grad_x += tl.where(tl.abs(x) == top[:, None], sign(x) * per_top[:, None], 0.0)
        tl.store(grad_x_ptr + start + first + column, grad_x.to(dtype), mask=inside)
