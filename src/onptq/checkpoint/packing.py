"""Codes as compressed-tensors stores them: which format a scheme has, and the tensors of a linear in it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onptq.quantizer.folded import FoldedLinear
from onptq.schemes import Scheme

# compressed-tensors 0.17 (vLLM's) fills each int32 with whole codes and pads it; 0.20 lets codes straddle two words.
# They agree only on widths that divide 32; every other width is stored one code a byte, which all versions read alike.
PACKABLE_BITS = (2, 4, 8)
FLOAT_FORMATS = {
    (8, "dtype"): "float-quantized",
    (4, "E4M3"): "nvfp4-pack-quantized",
    (4, "E8M0"): "mxfp4-pack-quantized",
    (8, "E8M0"): "mxfp8-quantized",
}
E8M0_BIAS = 126  # of the exponent that frexp gives: one more than that of a power of two
PACKED_ROWS = 128


def storage_format(scheme: Scheme) -> str:
    """How compressed-tensors stores a scheme: W8A8 as int8, which int8 kernels read; narrower weights packed, where
    packing means the same to every reader."""
    if not scheme.quantizes_weights:
        return "dense"
    if scheme.weight_floats is not None:
        return FLOAT_FORMATS[scheme.weight_bits, scheme.scales]
    int8_kernel = scheme.weight_bits == 8 and scheme.quantizes_activations
    return "int-quantized" if int8_kernel or scheme.weight_bits not in PACKABLE_BITS else "pack-quantized"


def compress_linear(linear: FoldedLinear, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors that stand for one linear's weight, by their names below the module."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    if not scheme.quantizes_weights:
        return {"weight": linear.codes * linear.scale.to(linear.codes.dtype)}
    bits = scheme.weight_bits
    if scheme.scales != "dtype":
        return _compress_floats(linear, scheme)
    if storage_format(scheme) in ("int-quantized", "float-quantized"):
        tensors = {"weight": linear.codes, "weight_scale": linear.scale}
        return tensors if linear.zero is None else tensors | {"weight_zero_point": linear.zero}
    tensors = {
        "weight_packed": _pack_rows(linear.codes, bits),
        "weight_scale": linear.scale,
        "weight_shape": torch.tensor(linear.codes.shape, dtype=torch.int64),
    }
    if linear.zero is not None:
        tensors["weight_zero_point"] = pack_to_int32(linear.zero, bits, packed_dim=0)
    return tensors


def _compress_floats(linear: FoldedLinear, scheme: Scheme) -> dict[str, Tensor]:
    """Codes of floats whose scales have few bits themselves."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    codes = (
        {"weight_packed": pack_fp4_to_uint8(linear.codes.float())}
        if scheme.weight_bits == 4
        else {"weight": linear.codes}
    )
    if scheme.scales == "E8M0":
        return codes | {"weight_scale": (torch.frexp(linear.scale).exponent + E8M0_BIAS).to(torch.uint8)}
    assert linear.tensor_scale is not None
    common = linear.tensor_scale.reshape(1)
    tensors = codes | {
        "weight_scale": (linear.scale * common).to(torch.float8_e4m3fn),
        "weight_global_scale": common,
    }
    return tensors | ({} if linear.input_scale is None else {"input_global_scale": linear.input_scale.reshape(1)})


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    """[O, I] int8 -> [O, ceil(I * bits / 32)] int32, some rows at a time: packing wants 16 bytes of scratch per code."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    outputs, inputs = codes.shape
    packed = torch.empty(outputs, math.ceil(inputs * bits / 32), dtype=torch.int32)
    for start in range(0, outputs, PACKED_ROWS):
        packed[start : start + PACKED_ROWS] = pack_to_int32(codes[start : start + PACKED_ROWS], bits)
    return packed
