"""A linear of integer codes: what the simulation computes with rounded floats, multiplied and summed as integers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onptq import kernels
from onptq.errors import OnPTQError
from onptq.kernels.packets import ROOM, unpacked
from onptq.quantizer.numerics import quantize_tokens

INT8 = frozenset({torch.int8})
CUDA_ROWS = 17  # the fewest that torch._int_mm takes on a GPU
CUDA_MULTIPLE = 8  # of which it wants columns and outputs there


class LowBitLinear(nn.Module):
    """Weights are int8 codes with a step per output row, inputs are rounded to `activation_bits`, dynamically and per token.

    Both are kept in int8 however few bits they use. Accumulation is exact; the two steps and the bias follow in float32.
    """

    def __init__(self, codes: Tensor, step: Tensor, bias: Tensor | None, activation_bits: int) -> None:
        """Codes int8 [O, I]; step and bias [O], in the dtype the simulation multiplies with."""
        super().__init__()
        outputs = codes.shape[0]
        for what, shape in (("step", step.shape), ("bias", (outputs,) if bias is None else bias.shape)):
            if tuple(shape) != (outputs,):
                raise OnPTQError(f"the {what} of a low-bit linear has shape {list(shape)}; expected [{outputs}]")
        if codes.dtype != torch.int8 or not 2 <= activation_bits <= 8:
            got = f"{codes.dtype} and {activation_bits} bits"
            raise OnPTQError(f"a low-bit linear has int8 codes and activations of 2 to 8 bits; got {got}")
        self.activation_bits = activation_bits
        self.codes: Tensor
        self.step: Tensor
        self.bias: Tensor | None
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("step", step.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def operands(self) -> str:
        """What is multiplied."""
        multiplies = kernels.fit(self.codes, dtypes=INT8) or has_integer_product(self.codes)
        return "int8 x int8" if multiplies else "int8 as float64"

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        codes, step = quantize_rows(x.reshape(-1, self.in_features), self.activation_bits)
        product = scaled_product(codes, step, self.codes, self.step, self.bias, x.dtype)
        return product.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.operands}, activation_bits={self.activation_bits}"


def quantize_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [T, I] and steps [T, 1] of activations [T, I]."""
    if kernels.fit(x) and x.shape[1] % ROOM == 0:
        from onptq.kernels.codes import token_codes

        return unpacked(token_codes(x, bits), x.shape[1])
    return quantize_tokens(x, bits)


def scaled_product(
    codes: Tensor, step: Tensor, weight: Tensor, weight_step: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Codes int8 [T, I] and steps [T, 1] times codes int8 [O, I] and steps [O], plus bias [O]: [T, O] in `dtype`."""
    if dtype in kernels.DTYPES and kernels.fit(step, weight_step, bias) and kernels.fit(codes, weight, dtypes=INT8):
        from onptq.kernels.products import scaled_rows

        return scaled_rows(codes, step, weight, weight_step, bias, dtype)
    product = integer_product(codes, weight).to(torch.promote_types(dtype, torch.float32))
    product = product.mul_(step).mul_(weight_step)  # narrower steps are widened first
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
