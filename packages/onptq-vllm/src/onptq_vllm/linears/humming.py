"""Low-bit linears by humming-kernels on an NVIDIA GPU. The package is imported by the first linear."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onptq import kernels
from onptq.errors import OnPTQError
from onptq.kernels.grid import code_range
from onptq.kernels.packets import SCALE_ROWS
from onptq.quantizer.integers import LowBitLinear, quantize_rows

PADDED_OUTPUTS, PADDED_COLUMNS = 256, 128  # multiples its kernels are tuned for
PACKED_COLUMNS = 32  # packing needs a multiple of them


class HummingLinear(nn.Module):
    """A low-bit linear with the same codes and scales; weights of at most 4 bits are packed."""

    def __init__(self, linear: LowBitLinear) -> None:
        super().__init__()
        check_device(linear.codes.device, linear.scale.dtype, linear.in_features)
        from humming import ops  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from humming.layer import HummingLayer  # type: ignore[import-not-found, import-untyped, unused-ignore]

        low, high = code_range(4)
        narrow = bool(((linear.codes >= low) & (linear.codes <= high)).all())
        bits, dtype = 4 if narrow else 8, linear.scale.dtype
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
            packed = ops.pack_weight(linear.codes.int() - code_range(bits)[0], bits)  # its codes begin at zero
            tensors = {"weight": packed, "weight_scale": linear.scale[:, None]}
            self.layer.load_from_tensors(tensors if linear.bias is None else tensors | {"bias": linear.bias})
            self.layer.transform()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        codes, scale = codes_with_padded_scales(x.view(-1, self.in_features), self.activation_bits)
        result: Tensor = self.layer(codes, input_scale=scale)
        return result.view(*x.shape[:-1], self.out_features)


def codes_with_padded_scales(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [T, I] and scales [T, 1]. Memory after the scales is padded, as in packets: the kernel reads several at a
    time."""
    codes, scale = quantize_rows(x, bits)
    if kernels.fit(x):
        return codes, scale
    return codes, F.pad(scale.float(), (0, 0, 0, -len(scale) % SCALE_ROWS))[: len(codes)]


def check_device(device: torch.device, dtype: torch.dtype, inputs: int) -> None:
    if device.type != "cuda":
        raise OnPTQError(f"humming needs an NVIDIA GPU; the linear is on {device}")
    if find_spec("humming") is None:
        raise OnPTQError("humming is not installed: pip install humming-kernels")
    if dtype not in (torch.float16, torch.bfloat16):
        raise OnPTQError(f"humming computes in float16 or bfloat16; the model is {dtype}")
    if inputs % PACKED_COLUMNS:
        raise OnPTQError(f"humming needs a multiple of {PACKED_COLUMNS} input columns; got {inputs}")
