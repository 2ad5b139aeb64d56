"""Integer weights as they are stored, tensor by tensor against compressed-tensors' own compressors."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from test_floats import DTYPES, args_of, normal

from onptq.checkpoint.packing import compress_linear, storage_format
from onptq.kernels.grid import OFF_TIE
from onptq.quantizer.folded import FoldedLinear
from onptq.quantizer.numerics import quantize_inputs
from onptq.quantizer.weights import dequantize, to_groups, weight_codes
from onptq.schemes import Scheme

SYMMETRIC = ("W4A16", "W4A8", "W8A8", "W8A16", "W2A16", "W3A8", "W4A16-g128", "W4A8-g32", "W4AFP8")
ASYMMETRIC = ("W4A16-asym", "W8A16-g128-asym", "W4A16-g32-asym")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*SYMMETRIC, *ASYMMETRIC])
def test_stored_tensors_are_those_that_compressed_tensors_makes_of_the_same_scales(
    name: str, dtype: torch.dtype
) -> None:
    scheme, weight = Scheme.parse(name), normal(256, 384).to(dtype)
    weight[5] *= 100
    ratio = torch.zeros(scheme.scale_shape(*weight.shape))
    codes, scale, zero = weight_codes(weight.float(), ratio, None, scheme, dtype)
    found, theirs = compress_linear(FoldedLinear(codes, scale, zero, None), scheme), args_of(scheme)
    compressor = BaseCompressor.get_value_from_registry(storage_format(scheme))
    given = {"weight": weight.float(), "weight_scale": scale.float()}
    wanted = compressor.compress(given | ({} if zero is None else {"weight_zero_point": zero}), theirs)
    wanted["weight_scale"] = wanted["weight_scale"].to(dtype)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    unpacked = compressor.decompress(found, theirs)["weight"]
    assert torch.equal(unpacked, dequantize(codes, scale, zero, dtype))


@pytest.mark.parametrize("name", [*SYMMETRIC, *ASYMMETRIC])
def test_full_range_scales_are_those_of_compressed_tensors_but_for_the_step_off_ties(name: str) -> None:
    scheme, weight = Scheme.parse(name), normal(256, 384)
    args = args_of(scheme).weights
    assert args is not None
    _, scale, zero = weight_codes(weight, torch.zeros(scheme.scale_shape(256, 384)), None, scheme, torch.float32)
    groups = to_groups(weight, scale)
    theirs, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    torch.testing.assert_close(scale, theirs * (OFF_TIE if scheme.symmetric else 1), rtol=1e-6, atol=0)
    assert zero is None or torch.equal(zero, zeros)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["W8A8", "W4A8", "W4A6", "W4A4", "W4AFP8"])
def test_activations_are_rounded_as_compressed_tensors_rounds_them(name: str, dtype: torch.dtype) -> None:
    scheme = Scheme.parse(name)
    x = (normal(2, 9, 256) * torch.logspace(-3, 2, 256)).to(dtype)
    x[0, 0] = 0
    args = args_of(scheme).input_activations
    assert args is not None
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    assert torch.equal(quantize_inputs(x, scheme), fake_quantize(x, scale, zero, args))
