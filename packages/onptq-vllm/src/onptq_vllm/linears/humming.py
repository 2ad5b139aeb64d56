"""The product of a low-bit linear by humming-kernels, on an NVIDIA GPU. The package is imported by the first linear."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onptq import kernels
from onptq.errors import OnPTQError
from onptq.quantizer.integers import LowBitLinear, quantize_rows
from onptq.quantizer.numerics import STEP_ROWS, code_range

PADDED_OUTPUTS, PADDED_COLUMNS = 256, 128  # multiples its kernels are tuned for
PACKED_COLUMNS = 32  # of which packing wants a multiple


class HummingLinear(nn.Module):
    """The same codes and steps as the low-bit linear it is made of; weights of at most 4 bits are packed."""

    def __init__(self, linear: LowBitLinear) -> None:
        super().__init__()
        check_device(linear.codes.device, linear.step.dtype, linear.in_features)
        from humming import ops  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from humming.layer import HummingLayer  # type: ignore[import-not-found, import-untyped, unused-ignore]

        low, high = code_range(4)
        narrow = bool(((linear.codes >= low) & (linear.codes <= high)).all())
        bits, dtype = 4 if narrow else 8, linear.step.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.activation_bits, self.operands = linear.activation_bits, f"int8 x int{bits}"
        with torch.cuda.device(linear.codes.device):
            self.layer = HummingLayer(
                shape_n=self.out_features,
                shape_k=self.in_features,
                weight_config={"dtype": f"int{bits}"},
                input_config={"dtype": "int8"},
                pad_n_to_multiple=PADDED_OUTPUTS,
                pad_k_to_multiple=PADDED_COLUMNS,
                has_bias=linear.bias is not None,
                torch_dtype=dtype,
            ).to(linear.codes.device)
            packed = ops.pack_weight(linear.codes.int() - code_range(bits)[0], bits)  # it counts codes from zero
            tensors = {"weight": packed, "weight_scale": linear.step[:, None]}
            self.layer.load_from_tensors(tensors if linear.bias is None else tensors | {"bias": linear.bias})
            self.layer.transform()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        codes, step = rows_with_room(x.view(-1, self.in_features), self.activation_bits)
        product: Tensor = self.layer(codes, input_scale=step)
        return product.view(*x.shape[:-1], self.out_features)


def rows_with_room(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [T, I] and steps [T, 1], these with room behind them, as packets have: the kernel reads some at a time."""
    codes, step = quantize_rows(x, bits)
    if kernels.fit(x):
        return codes, step
    return codes, F.pad(step.float(), (0, 0, 0, -len(step) % STEP_ROWS))[: len(codes)]


def check_device(device: torch.device, dtype: torch.dtype, inputs: int) -> None:
    if device.type != "cuda":
        raise OnPTQError(f"humming multiplies on an NVIDIA GPU alone; the linear is on {device}")
    if find_spec("humming") is None:
        raise OnPTQError("humming is not installed: pip install humming-kernels")
    if dtype not in (torch.float16, torch.bfloat16):
        raise OnPTQError(f"humming computes in float16 or bfloat16; the model is {dtype}")
    if inputs % PACKED_COLUMNS:
        raise OnPTQError(f"humming wants a multiple of {PACKED_COLUMNS} input columns; got {inputs}")
