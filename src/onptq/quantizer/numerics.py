"""Integer rounding and its gradients: the only numerics in the house.

The forward values are, operation for operation, those of compressed-tensors, so that a reloaded checkpoint computes what the
training graph computed. The gradients are straight-through, with the step inside the graph: d(step)/d(input) is what teaches
smoothing and step ratios that a smaller step makes less noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onptq import kernels

STEP_ROWS = 4  # tokens' steps that a product of integers may read at a time: what holds them has room for a multiple


def code_range(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


class FakeQuantize(torch.autograd.Function):
    """(clamp(round(x / step + offset)) - zero) * step, with LSQ gradients.

    With code c, inside the range dx = 1, dstep = c - zero - x / step, doffset = step; where the code saturates dx = 0,
    dstep = c - zero, doffset = 0. The product is formed in `dtype`, as the reloaded checkpoint forms it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Tensor, offset: Tensor | None, zero: Tensor | None, bits: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, step, offset, zero)
        ctx.bits = bits
        codes = round_to_codes(x, step, bits, offset)
        if zero is not None:
            codes = codes - zero
        return codes.to(dtype) * step.to(dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, step, offset, zero = ctx.saved_tensors
        low, high = code_range(ctx.bits)
        scaled = x / step
        v = scaled if offset is None else scaled + offset
        inside = (v >= low) & (v <= high)
        grad_inside = torch.where(inside, grad, 0).to(x.dtype)
        codes = v.clamp(low, high).round()
        if zero is not None:
            codes = codes - zero
        grad_step = (grad.to(step.dtype) * torch.where(inside, codes - scaled, codes)).sum_to_size(step.shape)
        grad_offset = grad_inside * step if offset is not None and ctx.needs_input_grad[2] else None
        return grad_inside, grad_step, grad_offset, None, None, None


def round_to_codes(x: Tensor, step: Tensor, bits: int, offset: Tensor | None = None) -> Tensor:
    low, high = code_range(bits)
    scaled = x / step
    if offset is not None:
        scaled = scaled + offset
    return scaled.clamp(low, high).round()


class CastThrough(torch.autograd.Function):
    """Round to a narrower dtype and back; the gradient passes."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def cast_through(x: Tensor, dtype: torch.dtype) -> Tensor:
    return CastThrough.apply(x, dtype) if x.dtype != dtype else x  # type: ignore[no-untyped-call, no-any-return]


def fake_quantize_activations(x: Tensor, bits: int) -> Tensor:
    """Dynamic, symmetric, one step per token; x is [..., tokens, channels]."""
    if kernels.fit(x):
        from onptq.kernels.activations import fake_quantize_tokens

        return fake_quantize_tokens(x, bits)
    return FakeQuantize.apply(x, token_steps(x, bits), None, None, bits, x.dtype)  # type: ignore[no-untyped-call, no-any-return]


def quantize_tokens(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., tokens, channels] and steps [..., tokens, 1], whose product is `fake_quantize_activations`."""
    step = token_steps(x, bits)
    return round_to_codes(x, step, bits).to(torch.int8).contiguous(), step


def token_steps(x: Tensor, bits: int) -> Tensor:
    absmax = x.abs().amax(dim=-1, keepdim=True)
    # A tensor: a Python scalar would be multiplied by its reciprocal on a GPU.
    step = absmax / absmax.new_full((), (2**bits - 1) / 2)
    return torch.where(step == 0, torch.finfo(x.dtype).eps, step)
