"""Shared by the checks of kernels: the device, fixes of Triton's interpreter, inputs and tolerances."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from onptq.kernels.packets import SCALE_SPACE, unpacked
from onptq.quantizer.numerics import quantize_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

if DEVICE == "cpu":
    import triton.language as tl
    from triton.runtime import interpreter

    plain_convert, plain_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data: Any, source: tl.dtype, target: tl.dtype, mode: object) -> Any:
        """Round fp32 to bf16, as a GPU does; the interpreter truncates."""
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(data.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return plain_convert(data, source, target, mode)

    def dot(self: Any, a: Any, b: Any, *rest: object) -> Any:
        """Multiply bf16 as numbers; the interpreter multiplies their bits as integers."""
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(factor, tl.float32) for factor in (a, b))
        return plain_dot(self, a, b, *rest)

    interpreter._convert_float, interpreter.InterpreterBuilder.create_dot = convert, dot


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(results: Tensor | None, expected: Tensor | None, relative: float) -> None:
    """Compare with a tolerance relative to the largest entry."""
    assert results is not None
    assert expected is not None
    assert results.dtype == expected.dtype
    atol = relative * float(expected.abs().max())
    torch.testing.assert_close(results, expected, rtol=0, atol=atol)


GRADIENTS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # the twin also rounds every product


def token_batch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = normal(*shape, seed=len(shape))
    x[..., 0] *= 20
    x[..., 1] = -x[..., 0]  # two channels share the largest magnitude
    x.view(-1, shape[-1])[0] = 0
    return x.to(dtype)


def check_codes(packet: Tensor, exact: Tensor, roundings: int, plain: Tensor | None = None) -> None:
    """Compare with float64, up to half a scale and `roundings` roundings of the kernel's dtype at the largest values.

    The codes are also compared with those of the plain twin, from `plain` where the kernel rounds other values than
    `exact`.
    """
    rows, width = exact.shape
    dtype = packet.dtype
    assert packet.shape == (rows, (width + SCALE_SPACE) // dtype.itemsize)
    codes, scale = unpacked(packet, width)
    plain_codes, plain_scale = quantize_tokens(exact.to(dtype) if plain is None else plain, 8)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (rows, 1))
    torch.testing.assert_close(scale, plain_scale.float(), rtol=roundings * torch.finfo(dtype).eps, atol=0)
    assert int((codes.int() - plain_codes.int()).abs().max()) <= 1  # the last digits of a value between two codes
    assert bool(
        ((codes.double() * scale - exact).abs() <= (0.5 + roundings * 64 * torch.finfo(dtype).eps) * scale).all()
    )


SIZES = [(1, 48), (3, 1184), (5, 96), (2, 4096), (6, 2992)]
