"""Floats of few bits: rounding against an oracle, every scheme against compressed-tensors, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from conftest import Tiny, in_turn
from naive import extended, make_policy, random_theta
from test_policy import inputs_of, speak
from torch import Tensor

from onptq.checkpoint.packing import compress_linear, storage_format
from onptq.checkpoint.write import quantization_config
from onptq.cycle.calibrate import Progress
from onptq.engine.prefixes import whole_prompts
from onptq.methods.inputs import fitting_inputs
from onptq.methods.layerwise import observing
from onptq.methods.rtn import rtn
from onptq.models.encoding import PromptBatch
from onptq.models.structure import PAIRS, Block
from onptq.quantizer.folded import FoldedLinear
from onptq.quantizer.numerics import FakeQuantize, fitting_scale, nearest, quantize_inputs, spacing, stored_scale
from onptq.quantizer.theta import SETTLED_RANGE, Learned, Settled, Theta, pair_key
from onptq.quantizer.weights import dequantize, of_groups, to_groups, weight_codes
from onptq.schemes import E2M1, E4M3, NAMED, Floats, Scheme

GRIDS = (E4M3, E2M1)
DTYPES = (torch.float32, torch.bfloat16)


def codes_of(grid: Floats) -> list[float]:
    return oracles.float_codes(grid.mantissa, grid.least, grid.largest)


def args_of(scheme: Scheme) -> QuantizationScheme:
    config = quantization_config(scheme, [])
    assert config is not None
    return QuantizationScheme.model_validate(config["config_groups"]["group_0"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the grid -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_values_go_to_the_nearest_code_and_ties_to_the_even_one(grid: Floats) -> None:
    codes = codes_of(grid)
    assert len(codes) == 2 ** (grid.bits - 1) - (grid is E4M3), "one of E4M3 means NaN"
    between = [(a + b) / 2 for a, b in pairwise(codes)]
    near = [value * (1 + sign * 2**-20) for value in between for sign in (-1, 1)]
    values = torch.tensor([sign * value for value in (*codes, *between, *near) for sign in (1, -1)])
    found = nearest(values, grid)
    assert found.tolist() == [oracles.nearest_float(value, codes) for value in values.tolist()]
    assert torch.equal(nearest(values.bfloat16(), grid), nearest(values.bfloat16().float(), grid).bfloat16())


def test_e4m3_is_that_of_pytorch() -> None:
    values = normal(4096) * torch.logspace(-4, 2.3, 4096)
    for dtype in (*DTYPES, torch.float16):
        given = values.to(dtype).clamp(-448, 448)
        assert torch.equal(nearest(given, E4M3), given.to(torch.float8_e4m3fn).to(dtype))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_the_spacing_is_the_distance_of_the_codes_around_a_value(grid: Floats) -> None:
    codes = codes_of(grid)
    for low, high in pairwise(codes):
        for value in (low, low + 0.3 * (high - low)):
            assert float(spacing(torch.tensor(value), grid)) == high - low
    assert torch.equal(spacing(torch.tensor([1e9]), grid), spacing(torch.tensor([grid.largest]), grid))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
@pytest.mark.parametrize("offset", [False, True])
def test_the_gradients_are_straight_through(grid: Floats, offset: bool) -> None:
    """dx = 1, dscale = c - x / scale, doffset = scale * spacing; where the code saturates dx = 0, dscale = c, doffset = 0."""
    x, scale = (normal(6, 16).double() * 3).requires_grad_(), torch.full((6, 1), 0.37).double().requires_grad_()
    with torch.no_grad():
        x[0] *= 1e4 / 3
    shift = (torch.rand(6, 16).double() - 0.5).requires_grad_() if offset else None
    grad = normal(6, 16, seed=1).double()
    out = FakeQuantize.apply(x, scale, shift, None, grid, torch.float64)
    out.backward(grad)

    codes, wanted = codes_of(grid), {"x": np.zeros((6, 16)), "scale": np.zeros(6), "offset": np.zeros((6, 16))}
    for row, column in np.ndindex(6, 16):
        scaled, weight = float(x[row, column].detach()) / 0.37, float(grad[row, column])
        scaled = float(x[row, column].detach() / scale[row, 0].detach())
        exponent = max(math.floor(math.log2(min(abs(scaled), grid.largest))), grid.least) if scaled else grid.least
        distance = 2.0 ** (exponent - grid.mantissa)
        v = scaled + (float(shift[row, column].detach()) * distance if shift is not None else 0.0)
        code = oracles.nearest_float(v, codes)
        assert float(out[row, column].detach()) == pytest.approx(code * float(scale[row, 0].detach()), rel=1e-12)
        if abs(v) <= grid.largest:
            wanted["x"][row, column] = weight
            wanted["scale"][row] += weight * (code - scaled)
            wanted["offset"][row, column] = weight * float(scale[row, 0].detach()) * distance
        else:
            wanted["scale"][row] += weight * code
    assert x.grad is not None
    assert scale.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), wanted["x"])
    np.testing.assert_allclose(scale.grad[:, 0].numpy(), wanted["scale"], rtol=1e-9)
    if shift is not None:
        assert shift.grad is not None
        np.testing.assert_allclose(shift.grad.numpy(), wanted["offset"])


@pytest.mark.parametrize("factor", [1.0, 1.3, 1.7499, 1.75, 1.99])
def test_powers_of_two_grow_from_a_mantissa_of_1_75_on(factor: float) -> None:
    scale = torch.tensor([factor * 2.0**k for k in range(-20, 9)], requires_grad=True)
    stored = stored_scale(scale, "E8M0", torch.bfloat16)
    assert stored.tolist() == [2.0 ** (k + (factor >= 1.75)) for k in range(-20, 9)]
    stored.sum().backward()
    assert torch.equal(scale.grad, torch.ones_like(scale))  # type: ignore[arg-type]


def test_scales_in_e4m3_are_codes_under_a_power_of_two() -> None:
    codes, common = codes_of(E4M3), torch.tensor(2.0**5)
    scale = (normal(512).abs() * torch.logspace(-6, 1.3, 512)).requires_grad_()
    stored = stored_scale(scale, "E4M3", torch.bfloat16, common)
    wanted = [oracles.nearest_float(value * 32, codes) or 0.125 for value in scale.tolist()]
    assert (stored * 32).tolist() == wanted
    assert max(wanted) == 448 > 0.125 >= wanted[0]
    stored.sum().backward()
    assert torch.equal(scale.grad, torch.ones_like(scale))  # type: ignore[arg-type]


def test_a_settled_scale_of_few_bits_changes_only_with_a_ratio_beyond_half_a_spacing() -> None:
    """Within the range of ratios: 3.2% for E4M3, 13% down for powers of two, which cannot grow at all."""
    ratios = torch.linspace(*SETTLED_RANGE, 4001)
    for scales, codes, least, most in (
        ("E4M3", torch.arange(8, 16) / 8, -0.0318, 0.0328),
        ("E8M0", 2.0 ** torch.arange(-4, 5), -0.1336, None),
    ):
        stored = stored_scale(codes[:, None] * ratios.exp(), scales, torch.float32, torch.tensor(1.0))  # type: ignore[arg-type]
        moved = ratios[(stored != codes[:, None]).any(0)]
        assert moved[moved < 0].max() == pytest.approx(least, abs=5e-4)
        assert not len(moved[moved > 0]) if most is None else moved[moved > 0].min() == pytest.approx(most, abs=5e-4)


@pytest.mark.parametrize("absmax", [1e-6, 0.7, 1.0, 63.9, 64.0, 2e4])
def test_the_fitting_scale_is_a_power_of_two_that_leaves_room(absmax: float) -> None:
    scale = float(fitting_scale(torch.tensor(absmax)))
    assert math.frexp(scale)[0] == 0.5
    assert 10.6 < absmax / E2M1.largest * scale < 21.4


# --- every scheme -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 384), (200, 256)])
def test_blocks_are_taken_apart_and_put_together_again(shape: tuple[int, int]) -> None:
    matrix = normal(*shape)
    scale = torch.zeros(Scheme.parse("FP8-block").scale_shape(*shape))
    groups = to_groups(matrix, scale, 128)
    assert groups.shape == (*scale.shape, 128 * 128)
    assert torch.equal(of_groups(groups, matrix.shape, 128), matrix)
    last = matrix[128:, 128:256].flatten()
    assert torch.equal(groups[1, 1, : len(last)], last)
    assert not groups[1, 1, len(last) :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, scheme in NAMED.items() if scheme.quantizes_activations])
def test_activations_are_rounded_as_compressed_tensors_rounds_them(name: str, dtype: torch.dtype) -> None:
    scheme = Scheme.parse(name)
    x = (normal(2, 9, 256) * torch.logspace(-3, 2, 256)).to(dtype)
    x[0, 0] = 0
    args = args_of(scheme).input_activations
    assert args is not None
    common = torch.tensor([4.0]) if scheme.scales_inputs else None
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), global_scale=common)
    assert torch.equal(quantize_inputs(x, scheme, common), fake_quantize(x, scale, zero, args, global_scale=common))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, scheme in NAMED.items() if scheme.weight_floats])
def test_stored_tensors_are_those_of_compressed_tensors(name: str, dtype: torch.dtype) -> None:
    """Full-range scales, codes and packing of plain rounding, tensor by tensor."""
    scheme, weight = Scheme.parse(name), normal(256, 384).to(dtype)
    weight[5] *= 100
    weight[7] = 0 if scheme.scales == "E4M3" else 1  # elsewhere zeros have another scale here
    ratio = torch.zeros(scheme.scale_shape(*weight.shape))
    common = fitting_scale(weight.abs().amax()) if scheme.scales == "E4M3" else None
    codes = weight_codes(weight.float(), ratio, None, scheme, dtype, common)
    found = compress_linear(FoldedLinear(*codes, None, common), scheme)
    theirs = args_of(scheme)
    assert theirs.weights is not None
    groups = to_groups(weight, ratio, scheme.block_rows)
    scale, _ = calculate_qparams(groups.amin(-1).float(), groups.amax(-1).float(), theirs.weights, common)
    compressor = BaseCompressor.get_value_from_registry(storage_format(scheme))
    given = {"weight": weight.float(), "weight_scale": scale.to(dtype) if scheme.scales == "dtype" else scale}
    wanted = compressor.compress(given | ({} if common is None else {"weight_global_scale": common.reshape(1)}), theirs)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].float(), tensor.float()), key
    unpacked = compressor.decompress(found, theirs)["weight"]
    product = dequantize(codes[0], codes[1], None, torch.float32, scheme.block_rows)
    assert torch.equal(unpacked.float(), product.to(unpacked.dtype).float())
    assert unpacked.dtype in (dtype, torch.bfloat16)
    assert torch.equal(unpacked.float(), product) or scheme.scales == "dtype", "products of few bits are exact"


@pytest.mark.parametrize(("name", "dtype"), in_turn(list(NAMED), DTYPES), ids=str)
def test_live_frozen_settled_and_centred_are_one_policy(
    tiny: Callable[[str], Tiny], name: str, dtype: torch.dtype
) -> None:
    inputs, policy = inputs_of(tiny("qwen2.5-vl")), make_policy(tiny("qwen2.5-vl"), name, dtype)
    theta = random_theta(policy)
    policy.attach(theta)
    live = speak(policy, "Q", inputs)
    assert not torch.equal(live, speak(policy, "D", inputs))
    policy.freeze(theta)
    assert torch.equal(speak(policy, "Q", inputs), live)
    for other, kind in ((policy.settle(theta), Settled), (policy.centre(theta), Learned)):
        assert all(isinstance(linear, kind) for linear in other.linears.values())
        policy.freeze(other)
        assert torch.equal(speak(policy, "Q", inputs), live), kind
        policy.attach(other)
        assert torch.equal(speak(policy, "Q", inputs), live), kind


@pytest.mark.parametrize("name", ["NVFP4A16", "NVFP4"])
def test_linears_with_one_input_share_their_tensor_scales(tiny: Callable[[str], Tiny], name: str) -> None:
    """Servers multiply them as one, under one scale."""
    policy = make_policy(tiny("qwen2.5-vl"), name, torch.float32)
    block = policy.structure.blocks[0]
    policy.freeze(rtn(policy))
    for pair, (_, consumers) in PAIRS.items():
        parts = [dict(policy.folded())[block.path(one)] for one in consumers]
        largest = torch.stack([block.child(one).weight.abs().amax() for one in consumers]).amax()  # type: ignore[operator]
        assert {float(part.tensor_scale) for part in parts} == {float(fitting_scale(largest))}  # type: ignore[union-attr, arg-type]
        inputs = {None if part.input_scale is None else float(part.input_scale) for part in parts}  # type: ignore[union-attr]
        assert inputs == ({None} if name == "NVFP4A16" else {1.0}), pair


def test_scales_of_inputs_are_those_of_the_policy_s_own_responses(tiny: Callable[[str], Tiny]) -> None:
    policy = make_policy(tiny("qwen2.5-vl"), "NVFP4", torch.float32)
    prompts, theta = tiny("qwen2.5-vl").encode(policy, 2), random_theta(policy)
    theta.inputs = {}
    found = fitting_inputs(policy, theta, prompts)
    assert found.keys() == theta.smoothing.keys()
    largest = dict.fromkeys(found, 0.0)

    def observe(block: Block, pair: str, x: Tensor) -> None:
        key = pair_key(block, pair)
        largest[key] = max(largest[key], float(x.abs().max()))

    policy.freeze(theta)
    with observing(policy.structure.blocks, observe), policy.speaking("Q"), torch.no_grad():
        for prompt in prompts:
            policy.run(whole_prompts(PromptBatch.of([prompt])))
    for key, scale in found.items():
        assert largest[key] / 6 * float(scale) < 21.4, "responses may only have larger values"
    changed = theta.clone()
    changed.inputs = found
    for other in (changed.clone(), changed.freed(), policy.settle(changed)):
        assert other.inputs.keys() == found.keys()
        assert all(other.inputs[key].data_ptr() != scale.data_ptr() for key, scale in found.items()), (
            "saved in one file"
        )
    again = Theta.of_tensors(changed.tensors())
    assert {key: float(scale) for key, scale in again.inputs.items()} == {k: float(v) for k, v in found.items()}


@pytest.mark.parametrize("name", ["NVFP4", "FP8-block"])
def test_an_update_that_has_not_ended_is_saved(tiny: Callable[[str], Tiny], name: str, tmp_path: Path) -> None:
    policy = make_policy(tiny("qwen2.5-vl"), name, torch.float32)
    theta = policy.settle(random_theta(policy))
    theta.save(tmp_path / "theta.safetensors")
    assert same_tensors(Theta.load(tmp_path / "theta.safetensors"), theta)
    centred = policy.centre(random_theta(policy))
    Progress(centred, best=centred.clone()).save(tmp_path / "halfway.safetensors")
    again = Progress.load(tmp_path / "halfway.safetensors", "cpu")
    assert again.best is not None
    assert same_tensors(again.theta, centred)
    assert same_tensors(again.best, centred)
    Progress(theta, best=theta.clone()).save(tmp_path / "halfway.safetensors")


def same_tensors(one: Theta, other: Theta) -> bool:
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)


@pytest.mark.parametrize("name", NAMED)
def test_every_part_of_theta_has_a_gradient(tiny: Callable[[str], Tiny], name: str) -> None:
    inputs, policy = inputs_of(tiny("qwen2.5-vl")), make_policy(tiny("qwen2.5-vl"), name, torch.float32)
    start = random_theta(policy)
    for theta in (policy.centre(start), policy.settle(start)):
        smoothing = {key: u for key, u in theta.smoothing.items() if "norm" in key or not theta.settled}
        learned: dict[str, Tensor] = {**smoothing, **theta.ratio}
        learned |= {f"offset/{path}": offset for path, offset in theta.offset.items()}
        for tensor in learned.values():
            tensor.requires_grad_()
        policy.attach(theta)
        with torch.enable_grad(), policy.speaking("Q"):
            policy.model(**extended(inputs, (5, 60, 200)), use_cache=False).logits.square().mean().backward()
        for key, tensor in learned.items():
            assert tensor.grad is not None, key
            assert bool(tensor.grad.isfinite().all()), key
            assert bool(tensor.grad.any()), key
