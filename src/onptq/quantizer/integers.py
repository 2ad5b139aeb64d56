"""A linear of integer codes: the GEMM that the simulation computes with rounded floats, in integers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onptq import kernels
from onptq.errors import OnPTQError
from onptq.kernels.packets import SCALE_SPACE, unpacked
from onptq.quantizer.numerics import quantize_tokens

INT8 = frozenset({torch.int8})
CUDA_ROWS = 17  # the fewest that torch._int_mm takes on a GPU
CUDA_MULTIPLE = 8  # of which it wants columns and outputs there


class LowBitLinear(nn.Module):
    """int8 weight codes with a scale per output row, times inputs rounded to `activation_bits`, dynamically and per
    token.

    Both are stored in int8 however few bits they use. Sums are exact; the two scales and the bias follow in float32.
    """

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None, activation_bits: int) -> None:
        """Codes int8 [O, I]; scale and bias [O], in the dtype the simulation multiplies with."""
        super().__init__()
        outputs = codes.shape[0]
        for what, shape in (("scale", scale.shape), ("bias", (outputs,) if bias is None else bias.shape)):
            if tuple(shape) != (outputs,):
                raise OnPTQError(f"the {what} of a low-bit linear has shape {list(shape)}; expected [{outputs}]")
        if codes.dtype != torch.int8 or not 2 <= activation_bits <= 8:
            got = f"{codes.dtype} and {activation_bits} bits"
            raise OnPTQError(f"a low-bit linear has int8 codes and activations of 2 to 8 bits; got {got}")
        self.activation_bits = activation_bits
        self.codes: Tensor
        self.scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", scale.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def operands(self) -> str:
        """The operands of its GEMM."""
        multiplies = kernels.fit(self.codes, dtypes=INT8) or has_integer_product(self.codes)
        return "int8 x int8" if multiplies else "int8 as float64"

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        codes, scale = quantize_rows(x.reshape(-1, self.in_features), self.activation_bits)
        product = scaled_product(codes, scale, self.codes, self.scale, self.bias, x.dtype)
        return product.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.operands}, activation_bits={self.activation_bits}"


def quantize_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [T, I] and scales [T, 1] of activations [T, I]."""
    if kernels.fit(x) and x.shape[1] % SCALE_SPACE == 0:
        from onptq.kernels.codes import token_codes

        return unpacked(token_codes(x, bits), x.shape[1])
    return quantize_tokens(x, bits)


def scaled_product(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Codes int8 [T, I] and scales [T, 1] times codes int8 [O, I] and scales [O], plus bias [O]: [T, O] in `dtype`."""
    if dtype in kernels.DTYPES and kernels.fit(scale, weight_scale, bias) and kernels.fit(codes, weight, dtypes=INT8):
        from onptq.kernels.products import scaled_rows

        return scaled_rows(codes, scale, weight, weight_scale, bias, dtype)
    product = integer_product(codes, weight).to(torch.promote_types(dtype, torch.float32))
    product = product.mul_(scale).mul_(weight_scale)  # narrower scales are widened first
    return (product if bias is None else product.add_(bias)).to(dtype)


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I] times weight [O, I], both int8: exact int32 [T, O]."""
    if not has_integer_product(weight):
        return (x.double() @ weight.double().t()).int()
    rows = len(x)
    if weight.is_cuda and rows < CUDA_ROWS:
        x = F.pad(x, (0, 0, 0, CUDA_ROWS - rows))
    return torch._int_mm(x, weight.t())[:rows]


def has_integer_product(weight: Tensor) -> bool:
    """Whether torch._int_mm takes int8 weights [O, I] of this shape on this device, and is exact there."""
    if weight.is_cuda:
        return not any(size % CUDA_MULTIPLE for size in weight.shape)
    return weight.device.type == "cpu" and _exact_on_cpu()


@cache
def _exact_on_cpu() -> bool:
    """Without VNNI, pairs of products are summed in 16 bits and saturate."""
    largest = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, 64).contiguous()
    return torch._int_mm(largest, largest.t()).tolist() == [
        [64 * 127**2, -64 * 127 * 128],
        [-64 * 127 * 128, 64 * 128**2],
    ]
