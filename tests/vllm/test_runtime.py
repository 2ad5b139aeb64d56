"""Low-bit linears: exact integer GEMMs, the scales and bias of the simulation, and reasons for linears that stay."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compressed_tensors.quantization.lifecycle import forward as simulation
from conftest import Tiny
from naive import random_theta, without_ties
from torch import Tensor, nn
from torch.nn import functional as F

import onptq
from onptq.check.reload import logits_of
from onptq.checkpoint.load import load_reader
from onptq.checkpoint.source import open_checkpoint
from onptq.cycle.follow import follow
from onptq.data.manifest import load_manifest
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.kernels.grid import code_range
from onptq.models.language_model import LanguageModel
from onptq.progress import QuietReporter
from onptq.quantizer import integers
from onptq.quantizer.integers import LowBitLinear, has_integer_product, integer_product
from onptq.quantizer.modules import Integer, QuantLinear
from onptq.quantizer.numerics import fake_quantize_activations, quantize_tokens, round_to_codes
from onptq.quantizer.policy import Policy
from onptq.quantizer.weights import dequantize
from onptq.recipe import Recipe

pytest.importorskip("onptq_vllm", reason="needs the package onptq-vllm: pip install ./packages/onptq-vllm")

from onptq_vllm.linears.humming import HummingLinear
from onptq_vllm.linears.swap import swap_linears

CPU = torch.device("cpu")
INTEGER = ("W8A8", "W4A8", "W4A6")
LINEARS_OF_TINY = 14  # seven in each of two blocks


def bits_of(scheme: str) -> tuple[int, int]:
    return int(scheme[1]), int(scheme[3:])


def random_codes(bits: int, *shape: int, seed: int = 0) -> Tensor:
    low, high = code_range(bits)
    return torch.randint(low, high + 1, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def random_linear(scheme: str, dtype: torch.dtype, outputs: int = 48, inputs: int = 160) -> LowBitLinear:
    weight_bits, activation_bits = bits_of(scheme)
    source = torch.Generator().manual_seed(1)
    scale = (torch.rand(outputs, generator=source) + 0.5) / 100
    bias = torch.randn(outputs, generator=source)
    return LowBitLinear(random_codes(weight_bits, outputs, inputs), scale.to(dtype), bias.to(dtype), activation_bits)


def random_inputs(dtype: torch.dtype, *shape: int) -> Tensor:
    """Tokens of very different sizes, one of them zero."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    x *= torch.logspace(-3, 3, shape[-2])[:, None]
    x[..., 1, :] = 0
    return x.to(dtype)


def within_rounding(got: Tensor, simulated: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the results differ by no more than rounding explains: of the sums in float32, of both factors in
    bfloat16, and of either result at the end."""
    share = {torch.float32: x.shape[-1] * 2**-24, torch.bfloat16: 1.01 * 2**-8}[x.dtype]
    allowed = share * (x.double().abs() @ weight.double().abs().T) * 1.01
    allowed += torch.finfo(x.dtype).eps * (simulated.double().abs() + (0 if bias is None else bias.double().abs()))
    return bool(((got.double() - simulated.double()).abs() <= allowed).all())


# --- the GEMM ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", INTEGER)
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(1, 64, 8), (5, 37, 11), (33, 4096, 24), (2, 9000, 16)])
def test_integers_are_summed_exactly(scheme: str, rows: int, columns: int, outputs: int) -> None:
    weight_bits, activation_bits = bits_of(scheme)
    x, weight = random_codes(activation_bits, rows, columns, seed=3), random_codes(weight_bits, outputs, columns)
    product = integer_product(x, weight)
    assert product.dtype == torch.int32
    assert torch.equal(product.long(), x.long() @ weight.long().T)


@pytest.mark.parametrize("scheme", INTEGER)
def test_the_largest_codes_neither_saturate_nor_wrap(scheme: str) -> None:
    (low_w, high_w), (low_x, high_x) = (code_range(bits) for bits in bits_of(scheme))
    x = torch.tensor([[low_x], [high_x]], dtype=torch.int8).expand(2, 8192).contiguous()
    weight = torch.tensor([[low_w], [high_w]], dtype=torch.int8).expand(2, 8192).contiguous()
    expected = [[8192 * a * b for b in (low_w, high_w)] for a in (low_x, high_x)]
    assert integer_product(x, weight).tolist() == expected


@pytest.mark.slow
def test_integers_are_summed_exactly_on_a_cpu_whose_int8_gemm_saturates() -> None:
    """oneDNN without VNNI sums pairs of products in 16 bits."""
    program = (
        "import torch\n"
        "from onptq.quantizer.integers import has_integer_product, integer_product\n"
        "codes = torch.randint(-128, 128, (40, 256), dtype=torch.int8)\n"
        "exact = codes.long() @ codes.long().T\n"
        "assert torch.equal(integer_product(codes, codes).long(), exact)\n"
        "assert has_integer_product(codes) == torch.equal(torch._int_mm(codes, codes.t()).long(), exact)\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_without_an_exact_integer_gemm_float64_is_used() -> None:
    x, weight = random_codes(8, 3, 500, seed=4), random_codes(8, 7, 500)
    with patch.object(integers, "_exact_on_cpu", lambda: False):
        assert not has_integer_product(weight)
        assert torch.equal(integer_product(x, weight).long(), x.long() @ weight.long().T)
        assert LowBitLinear(weight, torch.ones(7), None, 8).operands == "int8 as float64"


# --- one linear -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tokens_get_the_codes_and_scales_of_the_simulation(bits: int, dtype: torch.dtype) -> None:
    x = random_inputs(dtype, 2, 40, 96)
    codes, scale = quantize_tokens(x, bits)
    assert codes.dtype == torch.int8
    assert scale.shape == (2, 40, 1)
    assert (int(codes.min()), int(codes.max())) == code_range(bits)
    assert torch.equal(codes.to(dtype) * scale, fake_quantize_activations(x, bits))


@pytest.mark.parametrize("scheme", INTEGER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_linear_is_its_codes_times_scales_but_for_the_last_rounding(scheme: str, dtype: torch.dtype) -> None:
    linear, x = random_linear(scheme, dtype), random_inputs(dtype, 24, 160)
    assert linear.bias is not None
    codes, scale = quantize_tokens(x, bits_of(scheme)[1])
    product = (codes.double() @ linear.codes.double().T) * scale.double() * linear.scale.double()
    rounding = 4 * torch.finfo(torch.float32).eps * (product.abs() + linear.bias.double().abs())
    exact = product + linear.bias.double()
    got = linear(x)
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= rounding + torch.finfo(dtype).eps * exact.abs()).all()


@pytest.mark.parametrize("scheme", INTEGER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_is_the_simulation_within_its_rounding(scheme: str, dtype: torch.dtype) -> None:
    linear, x = random_linear(scheme, dtype), random_inputs(dtype, 24, 160)
    weight = dequantize(linear.codes, linear.scale[:, None], None, dtype)
    simulated = F.linear(fake_quantize_activations(x, linear.activation_bits), weight, linear.bias)
    assert within_rounding(linear(x), simulated, x, weight, linear.bias)


def test_inputs_of_any_rank_give_the_same_rows() -> None:
    linear, x = random_linear("W4A8", torch.bfloat16), random_inputs(torch.bfloat16, 6, 160)
    flat = linear(x)
    assert flat.shape == (6, 48)
    assert torch.equal(linear(x.view(2, 3, 160)), flat.view(2, 3, 48))
    assert torch.equal(linear(x.view(1, 2, 3, 160)), flat.view(1, 2, 3, 48))
    assert torch.equal(linear(x.view(2, 3, 160).transpose(0, 1)), flat.view(2, 3, 48).transpose(0, 1))


def test_a_linear_without_a_bias_adds_none_and_gives_no_gradient() -> None:
    codes = random_codes(4, 8, 32)
    x = random_inputs(torch.float32, 3, 32).requires_grad_()
    without, zero = LowBitLinear(codes, torch.ones(8), None, 8), LowBitLinear(codes, torch.ones(8), torch.zeros(8), 8)
    assert torch.equal(without(x), zero(x))
    assert not without(x).requires_grad
    assert not any(True for _ in without.parameters())


def test_wrong_parts_of_a_low_bit_linear_are_refused() -> None:
    codes = random_codes(4, 8, 32)
    for arguments, message in (
        ((codes.int(), torch.ones(8), None, 8), "int8 codes"),
        ((codes, torch.ones(8), None, 16), "2 to 8 bits"),
        ((codes, torch.ones(8, 2), None, 8), r"the scale .* \[8, 2\]; expected \[8\]"),
        ((codes, torch.ones(8), torch.ones(4), 8), r"the bias .* \[4\]; expected \[8\]"),
    ):
        with pytest.raises(OnPTQError, match=message):
            LowBitLinear(*arguments)


# --- a checkpoint -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`exported("W4A8")`: the tiny model, quantized and exported."""
    written: dict[str, Path] = {}

    def get(scheme: str) -> Path:
        if scheme not in written:
            out = tmp_path_factory.mktemp("exported") / scheme
            recipe = Recipe.preset("risk", {"method": "rtn", "scheme": scheme})
            onptq.quantize(str(tiny("qwen2.5-vl").folder), out, recipe=recipe, reporter=QuietReporter(), verify=False)
            written[scheme] = out
        return written[scheme]

    return get


def read(folder: Path, dtype: torch.dtype) -> LanguageModel:
    return load_reader(open_checkpoint(str(folder)), dtype, CPU, ())


def image_inputs(tiny: Callable[[str], Tiny]) -> list[dict[str, Tensor]]:
    checkpoint = tiny("qwen2.5-vl")
    inputs = [dict(checkpoint.processor(prompt).tensors) for prompt in load_manifest(checkpoint.manifest)[:4]]
    assert any("pixel_values" in one for one in inputs)
    return inputs


@contextmanager
def checkpoint_without_ties() -> Iterator[None]:
    """`naive.without_ties` for the activations of compressed-tensors and for ours."""

    def scales(x: Tensor, bits: int) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
        return torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)

    def theirs(value: Tensor, args: object, *rest: object, **more: object) -> tuple[Tensor, Tensor]:
        scale = scales(value, args.num_bits)  # type: ignore[attr-defined]
        return scale, torch.zeros_like(scale, dtype=torch.int8)

    def ours(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        scale = scales(x, bits)
        return round_to_codes(x, scale, bits).to(torch.int8).contiguous(), scale

    with (
        patch.object(simulation, "compute_dynamic_scales_and_zp", theirs),
        patch.object(integers, "quantize_tokens", ours),
    ):
        yield


@pytest.mark.parametrize("scheme", INTEGER)
def test_a_checkpoint_makes_the_simulations_choices_at_every_state_of_an_image_prompt(
    scheme: str, exported: Callable[[str], Path], tiny: Callable[[str], Tiny]
) -> None:
    """In float64 and without ties any wrong code changes the result."""
    reader, inputs = read(exported(scheme), torch.float64), image_inputs(tiny)
    with checkpoint_without_ties():
        simulated = [logits_of(reader.model, one) for one in inputs]
        assert swap_linears(reader.model).count == LINEARS_OF_TINY
        for one, expected in zip(inputs, simulated, strict=True):
            got = logits_of(reader.model, one)
            assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()
            assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("scheme", INTEGER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_linear_of_a_checkpoint_agrees_with_its_simulation_and_so_does_the_model(
    scheme: str, dtype: torch.dtype, exported: Callable[[str], Path], tiny: Callable[[str], Tiny]
) -> None:
    """Each linear within rounding. In the whole model a last bit may break a tie and move an activation by one code; no
    decision with a larger margin than that may change."""
    reader, inputs = read(exported(scheme), dtype), image_inputs(tiny)
    before = {name: module for name, module in reader.model.named_modules() if hasattr(module, "quantization_scheme")}
    simulated = torch.cat([logits_of(reader.model, one)[0] for one in inputs])
    swap_linears(reader.model)
    calls: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in reader.model.named_modules():
        if isinstance(module, LowBitLinear):
            module.register_forward_hook(lambda _, x, y, name=name: calls.__setitem__(name, (x[0], y)))
    got = torch.cat([logits_of(reader.model, one)[0] for one in inputs])
    assert calls.keys() == before.keys()
    for name, (x, y) in calls.items():
        with torch.inference_mode():
            expected = before[name](x)
        assert within_rounding(y, expected, x, before[name].weight, before[name].bias), name  # type: ignore[arg-type]
    share = {torch.float32: 0.02, torch.bfloat16: 0.05}[dtype] * (2 if scheme == "W4A6" else 1)
    rounding = share * simulated.abs().max()
    difference = (got - simulated).abs()
    assert (difference > rounding).double().mean() <= 1e-4  # whether a tie breaks depends on the CPU's last bits
    assert difference.square().mean().sqrt() <= rounding / 5
    first, second = simulated.topk(2).values.unbind(-1)
    clear = first - second > rounding
    assert clear.sum() > 20
    assert torch.equal(got.argmax(-1)[clear], simulated.argmax(-1)[clear])


def test_linears_of_a_weight_only_checkpoint_stay_and_the_reason_is_counted(
    exported: Callable[[str], Path], tiny: Callable[[str], Tiny]
) -> None:
    reader, inputs = read(exported("W4A16"), torch.float32), image_inputs(tiny)[0]
    expected = logits_of(reader.model, inputs)
    swapped = swap_linears(reader.model)
    assert swapped.count == 0
    assert swapped.left["activations are not quantized"] == LINEARS_OF_TINY
    assert not any(isinstance(module, LowBitLinear) for module in reader.model.modules())
    assert torch.equal(logits_of(reader.model, inputs), expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights": {"strategy": "group", "group_size": 64}}, "symmetric weights with scales per group"),
        ({"weights": {"symmetric": False}}, "asymmetric weights with scales per channel"),
        ({"weights": {"type": "float"}}, "weights are not integers"),
        ({"input_activations": {"symmetric": False}}, "activations are not symmetric"),
        ({"input_activations": {"dynamic": False}}, "with dynamic scales"),
        ({"input_activations": {"strategy": "tensor"}}, "not rounded per token"),
    ],
)
def test_a_linear_with_another_format_stays_and_the_reason_is_counted(
    change: dict[str, dict[str, object]], reason: str, exported: Callable[[str], Path]
) -> None:
    reader = read(exported("W4A8"), torch.float32)
    odd: Any = reader.structure.blocks[1].child("o_proj")
    ((part, fields),) = change.items()
    scheme = odd.quantization_scheme
    odd.quantization_scheme = scheme.model_copy(update={part: getattr(scheme, part).model_copy(update=fields)})
    dense = sum(isinstance(module, nn.Linear) for module in reader.model.modules()) - LINEARS_OF_TINY
    swapped = swap_linears(reader.model)
    assert swapped.count == LINEARS_OF_TINY - 1
    ((text, count),) = {text: count for text, count in swapped.left.items() if text != "not quantized"}.items()
    assert reason in text
    assert count == 1
    assert swapped.left["not quantized"] == dense
    assert reader.structure.blocks[1].child("o_proj") is odd


def test_weights_that_are_not_their_codes_hooks_and_other_quantizers_stay(exported: Callable[[str], Path]) -> None:
    reader = read(exported("W8A8"), torch.bfloat16)
    moved, hooked, foreign = (reader.structure.blocks[0].child(name) for name in ("q_proj", "k_proj", "v_proj"))
    with torch.no_grad():
        moved.weight[0, 0] += 1  # type: ignore[index, operator]
    hooked.register_forward_pre_hook(lambda module, x: None)
    reader.structure.blocks[0].replace("v_proj", nn.Identity())
    del foreign
    swapped = swap_linears(reader.model)
    assert swapped.count == LINEARS_OF_TINY - 3
    assert swapped.left["the loaded weight is not codes times scales"] == 1
    assert swapped.left["more than a linear: hooks or transforms"] == 1
    assert swapped.left["Identity of another quantizer"] == 1


def test_a_quantized_head_keeps_its_simulation(exported: Callable[[str], Path]) -> None:
    reader = read(exported("W4A8"), torch.float32)
    model, inner = reader.model, reader.structure.blocks[0].child("q_proj")
    model.set_output_embeddings(inner)  # type: ignore[operator]
    swapped = swap_linears(model)
    assert swapped.left["output head"] == 1


def test_an_unknown_backend_is_refused_and_humming_needs_a_gpu(exported: Callable[[str], Path]) -> None:
    reader = read(exported("W4A8"), torch.bfloat16)
    with pytest.raises(OnPTQError, match="expected torch or humming"):
        swap_linears(reader.model, "cutlass")  # type: ignore[arg-type]
    with pytest.raises(OnPTQError, match="humming needs an NVIDIA GPU; the linear is on cpu"):
        swap_linears(reader.model, "humming")
    assert not any(isinstance(module, LowBitLinear | HummingLinear) for module in reader.model.modules())


# --- a policy ---------------------------------------------------------------------------------------------------------


def q_logits(policy: Policy, inputs: dict[str, Tensor]) -> Tensor:
    with policy.speaking("Q"):
        return logits_of(policy.model, inputs)


@pytest.mark.parametrize("scheme", INTEGER)
def test_a_frozen_policy_makes_the_simulations_choices_and_d_is_untouched(
    scheme: str, tiny: Callable[[str], Tiny]
) -> None:
    checkpoint, inputs = tiny("qwen2.5-vl"), image_inputs(tiny)
    policy = checkpoint.policy(scheme, torch.float64)
    theta = random_theta(policy)
    policy.freeze(theta)
    with without_ties(), checkpoint_without_ties():
        dense = [logits_of(policy.model, one) for one in inputs]
        simulated = [q_logits(policy, one) for one in inputs]
        policy.freeze(theta, keep="integers")
        for one, d, q in zip(inputs, dense, simulated, strict=True):
            got = q_logits(policy, one)
            assert (got - q).abs().max() <= 1e-6 * q.abs().max()
            assert torch.equal(got.argmax(-1), q.argmax(-1))
            assert torch.equal(logits_of(policy.model, one), d)


def test_rollouts_of_a_swapped_policy_are_those_of_the_simulation(tiny: Callable[[str], Tiny]) -> None:
    checkpoint = tiny("qwen2.5-vl")
    policy = checkpoint.policy("W4A8", torch.float64)
    prompts = checkpoint.encode(policy, 3)
    theta, rollouts = random_theta(policy), []
    with without_ties(), checkpoint_without_ties():
        for keep in ("codes", "integers"):
            policy.freeze(theta, keep=keep)
            rollouts.append([one.tokens for one in follow(Prefixes(policy, prompts, max_tokens=12))])
    assert rollouts[0] == rollouts[1]
    assert {len(tokens) for tokens in rollouts[0]} == {12}


def test_a_swapped_policy_follows_theta_and_differentiates_as_before(tiny: Callable[[str], Tiny]) -> None:
    checkpoint, inputs = tiny("qwen2.5-vl"), image_inputs(tiny)[0]
    policy = checkpoint.policy("W4A8", torch.float64)
    first, second = random_theta(policy, 0), random_theta(policy, 1)
    with without_ties(), checkpoint_without_ties():
        policy.freeze(first, keep="integers")
        before = q_logits(policy, inputs)
        policy.freeze(second, keep="integers")
        states = [module.state for module in policy.wrapped if isinstance(module, QuantLinear)]
        assert len(states) == LINEARS_OF_TINY
        assert all(isinstance(state, Integer) and state.linear.codes is state.folded.codes for state in states)
        again = q_logits(policy, inputs)
        policy.attach(second)
        live = q_logits(policy, inputs)
    assert not torch.allclose(before, again)
    assert (again - live).abs().max() <= 1e-6 * live.abs().max()
    linear = policy.structure.blocks[0].child("q_proj")
    second.ratio["layers.0.self_attn.q_proj"].requires_grad_()
    with policy.speaking("Q"):
        linear(random_inputs(torch.float64, 2, linear.in_features)).sum().backward()  # type: ignore[arg-type]
    gradient = second.ratio["layers.0.self_attn.q_proj"].grad
    assert gradient is not None
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16-g64-asym", "W16A8"])
def test_a_scheme_with_floats_on_one_side_cannot_multiply_integers(scheme: str, tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("qwen2.5-vl").policy(scheme)
    with pytest.raises(OnPTQError, match=f"{scheme} is no single product of integers"):
        policy.freeze(random_theta(policy), keep="integers")
    assert all(module.state is None for module in policy.wrapped)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("scheme", INTEGER)
@pytest.mark.parametrize("rows", [1, 16, 17, 300])
@pytest.mark.parametrize("columns", [160, 163])
def test_a_gpu_gives_the_rows_of_the_cpu(scheme: str, rows: int, columns: int) -> None:
    linear = random_linear(scheme, torch.bfloat16, inputs=columns)
    x = random_inputs(torch.bfloat16, max(rows, 2), columns)[:rows]
    codes, scale = quantize_tokens(x.cuda(), linear.activation_bits)
    product = integer_product(codes, linear.codes.cuda())
    assert torch.equal(product.cpu().long(), codes.cpu().long() @ linear.codes.long().T)
    exact = product.double() * scale.double() * linear.scale.cuda().double() + linear.bias.cuda().double()  # type: ignore[union-attr]
    got = linear.cuda()(x.cuda())
    allowed = 2**-8 * exact.abs() + 1e-6 * product.abs() * scale.double()
    assert ((got.double() - exact).abs() <= allowed).all()


@needs_gpu
@pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="humming-kernels is not installed")
@pytest.mark.parametrize("scheme", INTEGER)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 1e-3),
        pytest.param(
            torch.float16, 1.0, marks=pytest.mark.xfail(strict=True, reason="humming rounds sums before scaling")
        ),
        (torch.bfloat16, 1.0),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_humming_gives_the_rows_of_a_low_bit_linear(scheme: str, dtype: torch.dtype, size: float, bias: bool) -> None:
    """humming rounds sums of activations times codes to `dtype` before scaling: in float16 large ones are infinite."""
    random = random_linear(scheme, dtype, outputs=320, inputs=416)
    low_bit = LowBitLinear(random.codes, random.scale, random.bias if bias else None, random.activation_bits).cuda()
    linear = HummingLinear(low_bit)
    assert linear.operands == ("int8 x int8" if scheme == "W8A8" else "int8 x int4")
    for shape in ((1, 416), (37, 416), (2, 65, 416)):
        x = random_inputs(torch.float32, *(max(2, count) for count in shape)).cuda()[..., : shape[-2], :]
        x = (x * size).to(dtype)
        got, expected = linear(x), low_bit(x)
        assert got.shape == expected.shape
        assert got.dtype == dtype
        product = LowBitLinear(random.codes, random.scale, None, random.activation_bits).cuda()(x)
        limits = torch.finfo(dtype)
        sizes = product.float().abs() + expected.float().abs()  # rounded before the bias and after it
        allowed = limits.eps * (sizes + limits.tiny)
        assert ((got.float() - expected.float()).abs() <= allowed).all()
