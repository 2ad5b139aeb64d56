"""`quantizer.norms.rms_norm` in one pass over memory each way: each program holds whole rows in registers."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from torch.autograd.function import once_differentiable

from onptq.kernels import launching_on
from onptq.kernels.tiles import whole_rows

WALKED = 16  # rows of a program where the gain's gradient is summed
PER_WARP = 512  # elements of a row


def rms_norm_rows(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x is [..., channels], the gain [channels] of the same dtype; both may have a gradient."""
    if torch.is_grad_enabled() and (x.requires_grad or gain.requires_grad):
        return _Norm.apply(x, gain, eps)  # type: ignore[no-any-return]
    return _forward(x.contiguous(), gain.contiguous(), eps)[0]


def _rows(x: Tensor) -> tuple[int, dict[str, int]]:
    width = x.shape[-1]
    return x.numel() // width, whole_rows(width, PER_WARP)


def _forward(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows, and the factor of each row."""
    rows, shape = _rows(x)
    out, rate = torch.empty_like(x), torch.empty(rows, device=x.device)
    with launching_on(x):
        _norm_forward[(rows,)](x, gain, out, rate, eps, **shape)
    return out, rate


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        x, gain = x.contiguous(), gain.contiguous()
        out, rate = _forward(x, gain, eps)
        ctx.save_for_backward(x, gain, rate)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, gain, rate = ctx.saved_tensors
        want_gain = ctx.needs_input_grad[1]
        rows, shape = _rows(x)
        walked = WALKED if want_gain else 1
        programs = triton.cdiv(rows, walked)
        grad_x = torch.empty_like(x)
        parts = torch.empty(programs, len(gain), device=x.device) if want_gain else None
        with launching_on(x):
            _norm_backward[(programs,)](
                grad.contiguous(), x, gain, rate, grad_x, parts, rows, WANT_GAIN=want_gain, WALKED=walked, **shape
            )
        return grad_x, None if parts is None else parts.sum(0).to(gain.dtype), None


@triton.jit
def _norm_forward(x_ptr, gain_ptr, out_ptr, rate_ptr, eps, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    rate = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(rate_ptr + row, rate)
    normed = (x * rate).to(dtype).to(tl.float32)
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, (gain * normed).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    grad_ptr,
    x_ptr,
    gain_ptr,
    rate_ptr,
    grad_x_ptr,
    part_ptr,
    rows,
    width,
    WANT_GAIN: tl.constexpr,
    WALKED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """With n = x r and r = (mean x^2 + eps)^(-1/2): dx = r (dn - n mean(dn n)), dgain = sum of dy n over rows."""
    column = tl.arange(0, WIDTH)
    inside = column < width
    dtype = x_ptr.dtype.element_ty
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    first = tl.program_id(0).to(tl.int64) * WALKED
    for row in range(first, tl.minimum(first + WALKED, rows)):
        at = row * width + column
        rate = tl.load(rate_ptr + row)
        normed = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * rate
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad_normed = (grad * gain).to(dtype).to(tl.float32)
        along = tl.sum(grad_normed * normed, 0) / width
        tl.store(grad_x_ptr + at, (rate * (grad_normed - normed * along)).to(dtype), mask=inside)
        if WANT_GAIN:
            total += grad * normed.to(dtype).to(tl.float32)
    if WANT_GAIN:
        tl.store(part_ptr + tl.program_id(0).to(tl.int64) * width + column, total, mask=inside)
