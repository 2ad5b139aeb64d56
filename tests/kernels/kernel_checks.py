"""Every kernel against its plain twin and the float64 oracles: on the GPU where one is, else in Triton's interpreter.

`test_kernels.py` runs these, in a process of their own where the interpreter is needed: Triton decides at import how it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

import onptq.kernels.activations
import onptq.kernels.codes
import onptq.kernels.decisions
import onptq.kernels.descent
import onptq.kernels.norms
import onptq.kernels.products
import onptq.kernels.weights
from onptq import kernels
from onptq.bank import Trajectory
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.cycle.compare import Decisions, compare, decide, pair_margin
from onptq.cycle.divergence import kl_divergence
from onptq.cycle.objective import Targets, make_items, measure
from onptq.data.manifest import load_manifest
from onptq.engine.prefixes import Prefixes
from onptq.kernels.decisions import decide_states, kl_of_states, margin_of_states
from onptq.kernels.packets import ROOM, unpacked
from onptq.methods.signround import signed_step
from onptq.models.encoding import encode
from onptq.models.processing import PromptProcessor
from onptq.quantizer.integers import LowBitLinear
from onptq.quantizer.norms import plain_norm, rms_norm
from onptq.quantizer.numerics import fake_quantize_activations, quantize_tokens
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.quantizer.weights import dequantize, fake_quantize_weight, weight_codes
from onptq.schemes import Scheme

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

if DEVICE == "cpu":
    import triton.language as tl
    from triton.runtime import interpreter

    plain_convert, plain_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        """The interpreter cuts fp32 off to bf16, where a GPU rounds."""
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(data.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return plain_convert(data, source, target, mode)

    def dot(self: object, a: object, b: object, *rest: object) -> object:
        """The interpreter multiplies the bits of bf16 as if they were integers."""
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(factor, tl.float32) for factor in (a, b))
        return plain_dot(self, a, b, *rest)

    interpreter._convert_float, interpreter.InterpreterBuilder.create_dot = convert, dot


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Kernels or twins, for what dispatches by itself. On a GPU kernels are what it takes when nothing is said."""

    def to(who: str) -> None:
        kernels_on = "auto" if DEVICE == "cuda" else "on"
        monkeypatch.setenv(kernels.SWITCH, kernels_on if who == "kernels" else "off")

    return to


def close(found: Tensor | None, expected: Tensor | None, relative: float) -> None:
    """To a fraction of the largest entry."""
    assert found is not None
    assert expected is not None
    assert found.dtype == expected.dtype
    atol = relative * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


GRADIENTS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # the twin rounds every product, too


# Fake-quantization


def token_batch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = normal(*shape, seed=len(shape))
    x[..., 0] *= 20
    x[..., 1] = -x[..., 0]  # two channels share the largest magnitude
    x.view(-1, shape[-1])[0] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 100), (5, 64), (33, 7), (3, 2500), (40,)], ids=str)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_tokens_are_fake_quantized_as_plainly(
    choose: Callable[[str], None], shape: tuple[int, ...], dtype: torch.dtype, bits: int
) -> None:
    x = token_batch(shape, dtype)
    grad = normal(*shape, seed=7).to(dtype)
    found = {}
    for who in ("kernels", "twins"):
        choose(who)
        entering = x.clone().requires_grad_()
        out = fake_quantize_activations(entering, bits)
        out.backward(grad)
        found[who] = out.detach(), entering.grad
    assert found["kernels"][0].dtype == dtype
    assert torch.equal(found["kernels"][0], found["twins"][0])
    close(found["kernels"][1], found["twins"][1], GRADIENTS[dtype])


# RMS norms


@pytest.mark.parametrize("learned", ["x", "gain", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 100), (33, 64), (17, 7), (3, 2500), (40,)], ids=str)
def test_norms_are_the_plain_ones(
    choose: Callable[[str], None], shape: tuple[int, ...], dtype: torch.dtype, learned: str
) -> None:
    x, gain = token_batch(shape, dtype), (1 + normal(shape[-1], seed=5) / 4).to(dtype)
    grad = normal(*shape, seed=7).to(dtype)
    found = {}
    for who in ("kernels", "twins"):
        choose(who)
        entering = x.clone().requires_grad_(learned != "gain")
        multiplied = gain.clone().requires_grad_(learned != "x")
        out = rms_norm(entering, multiplied, 1e-6)
        out.backward(grad)
        found[who] = out.detach(), entering.grad, multiplied.grad
    for ours, plain in zip(found["kernels"], found["twins"], strict=True):
        if plain is None:
            assert ours is None
        else:
            close(ours, plain, GRADIENTS[dtype])
    with torch.no_grad():
        choose("kernels")
        assert torch.equal(rms_norm(x, gain, 1e-6), found["kernels"][0])


def test_norms_of_rows_that_are_not_side_by_side_are_those_of_their_copies(choose: Callable[[str], None]) -> None:
    choose("kernels")
    x, gain = normal(6, 5, 24).transpose(0, 1), normal(24, seed=1)
    apart, copied = x.clone(memory_format=torch.preserve_format).requires_grad_(), x.contiguous().requires_grad_()
    grad = normal(6, 5, 24, seed=2).transpose(0, 1)
    for entering in (apart, copied):
        rms_norm(entering, gain, 1e-6).backward(grad)
    assert torch.equal(rms_norm(apart, gain, 1e-6), rms_norm(copied, gain, 1e-6))
    assert apart.grad is not None
    assert torch.equal(apart.grad, copied.grad)


# Fake-quantization of weights


def weights(scheme: Scheme, columns: int, storage: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Rows of every kind: zeros, one sign only, two largest, too small for a step that is not 0. And theta: log-scales of
    inputs and outputs, log-ratios, offsets."""
    weight = normal(7, columns, seed=3)
    weight[1] = 0
    weight[2], weight[3] = weight[2].abs() + 0.1, -weight[3].abs() - 0.1
    weight[4, 0], weight[4, 1] = 5, -5
    log_in, log_out = normal(columns, seed=18) / 4, normal(7, seed=19) / 4
    log_in[1] = log_in[0]
    weight[5] *= torch.finfo(storage).tiny / 2**12 if storage == torch.float16 else 1
    groups = columns // scheme.group_size if scheme.group_size else 1
    log_ratio = torch.linspace(-0.7, 0.1, 7 * groups, device=DEVICE).view(7, groups)
    offset = torch.rand(7, columns, generator=torch.Generator().manual_seed(4)).to(DEVICE) - 0.5
    return weight, (log_in, log_out, log_ratio, offset)


PARTS = {"ratio": (2,), "smoothing": (0, 2), "both sides": (0, 1, 2), "offset": (2, 3), "all": (0, 1, 2, 3)}


def test_signed_steps_are_the_plain_ones(choose: Callable[[str], None]) -> None:
    gradient, start = normal(70, 101, seed=1), normal(70, 101, seed=2) / 2
    gradient[:3], gradient[3, :3] = 0, torch.tensor([torch.nan, torch.inf, -torch.inf])
    moved = []
    for who in ("kernels", "twins"):
        choose(who)
        moved.append(start.clone())
        signed_step(moved[-1], gradient.clone(), 0.013, -0.5, 0.5)
    assert torch.equal(*moved)
    assert bool((moved[0][4:] != start[4:]).all())
    assert float(moved[0].abs().max()) == 0.5


def check_codes(packet: Tensor, exact: Tensor, roundings: int, plain: Tensor | None = None) -> None:
    """Against float64: off by half a step, and by what the kernel's dtype leaves of the largest values in so many roundings. And
    against the plain twin's codes, of `plain` where what is rounded is not merely the exact value in that dtype."""
    rows, width = exact.shape
    dtype = packet.dtype
    assert packet.shape == (rows, (width + ROOM) // dtype.itemsize)
    codes, step = unpacked(packet, width)
    plain_codes, plain_step = quantize_tokens(exact.to(dtype) if plain is None else plain, 8)
    assert (codes.dtype, step.dtype, step.shape) == (torch.int8, torch.float32, (rows, 1))
    torch.testing.assert_close(step, plain_step.float(), rtol=roundings * torch.finfo(dtype).eps, atol=0)
    assert int((codes.int() - plain_codes.int()).abs().max()) <= 1  # by the last digits of what lies between two codes
    assert bool(((codes.double() * step - exact).abs() <= (0.5 + roundings * 64 * torch.finfo(dtype).eps) * step).all())


SIZES = [(1, 48), (3, 1184), (5, 96), (2, 4096), (6, 2992)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [*SIZES, (3, 9232)])
def test_activations_become_codes_as_plainly(rows: int, width: int, dtype: torch.dtype) -> None:
    x = normal(rows, width, seed=width)
    x[-1] *= 0 if rows > 2 else 20
    x = x.to(dtype)
    check_codes(onptq.kernels.codes.token_codes(x), x.double(), 1)
    for bits in (6, 8):
        found = unpacked(onptq.kernels.codes.token_codes(x, bits), width)
        for one, plain in zip(found, quantize_tokens(x, bits), strict=True):
            assert torch.equal(one, plain.to(one.dtype))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(1, 48, 8), (17, 300, 70), (40, 512, 33), (129, 96, 130)])
def test_products_are_the_exact_integers_scaled(
    rows: int, columns: int, outputs: int, dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, weight = (
        (normal(size, columns, seed=seed) * 60).clamp(-128, 127).to(torch.int8)
        for size, seed in ((rows, 1), (outputs, 2))
    )
    step, weight_step = normal(rows, 1, seed=3).abs() + 0.1, ((normal(outputs, seed=4).abs() + 0.1) / 1000).to(dtype)
    bias = 50 * normal(outputs, seed=5).to(dtype) if biased else None
    exact = (codes.double() @ weight.double().T) * step.double() * weight_step.double()
    size = exact.abs() + (0 if bias is None else bias.double().abs())
    exact = exact if bias is None else exact + bias.double()
    rounding = 4 * torch.finfo(torch.float32).eps * size + torch.finfo(dtype).eps * exact.abs()
    ordinary = onptq.kernels.products.TILES
    for tiles in (ordinary, ()):  # those for few rows, and that for many
        monkeypatch.setattr(onptq.kernels.products, "TILES", tiles)
        found = onptq.kernels.products.scaled_rows(codes, step, weight, weight_step, bias, dtype)
        assert found.dtype == dtype
        assert bool(((found.double() - exact).abs() <= rounding).all())


@pytest.mark.parametrize("columns", [160, 163])
def test_low_bit_linears_are_the_plain_ones(choose: Callable[[str], None], columns: int) -> None:
    codes = (normal(24, columns, seed=6) * 3).clamp(-8, 7).to(torch.int8)
    step, bias = ((normal(24, seed=seed).abs() / 100).bfloat16() for seed in (7, 8))
    linear, x = LowBitLinear(codes, step, bias, 8), normal(2, 5, columns, seed=9).bfloat16()
    found = {}
    for who in ("kernels", "twins"):
        choose(who)
        found[who] = linear(x).float()
        assert linear.operands.startswith("int8 x int8" if who == "kernels" else "int8")
    sizes = found["twins"].abs() + bias.float().abs()
    assert bool(((found["kernels"] - found["twins"]).abs() <= torch.finfo(torch.bfloat16).eps * sizes).all())


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("W4A16", 60),
        ("W8A8", 2100),
        ("W2A16-g12", 60),
        ("W4A16-asym", 60),
        ("W3A16-g12-asym", 60),
        ("W4A16-g128", 1280),
    ],
)
def test_weights_are_fake_quantized_as_plainly(
    choose: Callable[[str], None], name: str, columns: int, dtype: torch.dtype, parts: tuple[int, ...]
) -> None:
    scheme = Scheme.parse(name)
    weight, start = weights(scheme, columns, dtype)
    grad = normal(7, columns, seed=5).to(dtype)
    found = {}
    for who in ("kernels", "twins"):
        choose(who)
        theta = [tensor.clone().requires_grad_() if part in parts else None for part, tensor in enumerate(start)]
        out = fake_quantize_weight(weight.to(dtype), *theta, scheme, dtype, dtype)
        out.backward(grad)
        found[who] = out.detach(), [theta[part].grad for part in parts]
    assert found["kernels"][0].dtype == dtype
    assert torch.equal(found["kernels"][0], found["twins"][0])
    for kernel, twin in zip(found["kernels"][1], found["twins"][1], strict=True):
        close(kernel, twin, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W4A16", "W8A8", "W4A16-g12", "W3A16-g12-asym"])
def test_codes_become_weights_as_plainly(choose: Callable[[str], None], name: str, dtype: torch.dtype) -> None:
    scheme = Scheme.parse(name)
    weight, (*_, log_ratio, offset) = weights(scheme, 60, torch.bfloat16)
    codes = weight_codes(weight, log_ratio, offset, scheme, torch.bfloat16)
    found = {}
    for who in ("kernels", "twins"):
        choose(who)
        found[who] = dequantize(*codes, dtype)
    assert found["kernels"].dtype == dtype
    assert torch.equal(found["kernels"], found["twins"])


@pytest.mark.parametrize("wanted", range(4))
def test_a_gradient_that_nobody_wants_is_not_made(choose: Callable[[str], None], wanted: int) -> None:
    scheme = Scheme.parse("W4A16-asym")
    weight, start = weights(scheme, 60, torch.float32)
    grads = {}
    for who in ("kernels", "twins"):
        choose(who)
        theta = [tensor.clone().requires_grad_(part == wanted) for part, tensor in enumerate(start)]
        fake_quantize_weight(weight, *theta, scheme, torch.float32, torch.float32).square().sum().backward()
        grads[who] = [tensor.grad for tensor in theta]
    for part, (kernel, twin) in enumerate(zip(grads["kernels"], grads["twins"], strict=True)):
        assert (kernel is not None) == (part == wanted)
        if part == wanted:
            close(kernel, twin, 2e-6)


def test_a_weight_that_is_learned_itself_goes_the_plain_way(choose: Callable[[str], None]) -> None:
    choose("kernels")
    weight, theta = weights(Scheme(4), 60, torch.float32)
    weight.requires_grad_()
    fake_quantize_weight(weight, *theta, Scheme(4), torch.float32, torch.float32).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_steps_and_codes_are_the_oracles(choose: Callable[[str], None]) -> None:
    """In float64, naively; the largest of a token is positive, so that none lies on a tie."""
    choose("kernels")
    x = normal(6, 90, seed=8)
    x[:, 3] = x.abs().amax(1) * 1.5
    exact = x.double().cpu().numpy()
    step = oracles.token_step(exact, 6)
    expected = oracles.rounding(exact, step, 6)
    out = fake_quantize_activations(x, 6).double().cpu().numpy()
    np.testing.assert_allclose(out, expected(exact, step), rtol=1e-6)
    assert not expected.inside.all(), "the largest saturates"

    ratio = torch.linspace(0.5, 1, 6, device=DEVICE)[:, None]
    step = oracles.row_step(exact, ratio.double().cpu().numpy(), 4)
    out = fake_quantize_weight(x, None, None, ratio.log(), None, Scheme(4), torch.float32, torch.float32)
    expected = oracles.rounding(exact, step, 4)
    np.testing.assert_allclose(out.double().cpu().numpy(), expected(exact, step), rtol=2e-6)


def test_gradients_are_those_of_the_oracles_surrogate(choose: Callable[[str], None]) -> None:
    """Along random directions of both smoothings and the ratio, by central differences in float64."""
    choose("kernels")
    weight, grad = normal(5, 70, seed=9), normal(5, 70, seed=11)
    start = (normal(70, seed=22) / 4, normal(5, seed=23) / 4, -normal(5, 1, seed=10).abs() / 2)
    theta = [tensor.requires_grad_() for tensor in start]
    fake_quantize_weight(weight, *theta, None, Scheme(4), torch.float32, torch.float32).backward(grad)
    at = [tensor.detach().double().cpu().numpy() for tensor in theta]
    exact = weight.double().cpu().numpy()

    def smooth(u: np.ndarray, out: np.ndarray) -> np.ndarray:
        return exact * np.exp(u) / np.exp(out)[:, None]

    frozen = oracles.rounding(smooth(*at[:2]), oracles.row_step(smooth(*at[:2]), np.exp(at[2]), 4), 4)

    def value(u: np.ndarray, out: np.ndarray, c: np.ndarray) -> float:
        w = smooth(u, out)
        return float((grad.double().cpu().numpy() * frozen(w, oracles.row_step(w, np.exp(c), 4))).sum())

    rng = np.random.default_rng(0)
    for _ in range(5):
        along = [rng.standard_normal(point.shape) for point in at]
        ahead, behind = ([p + sign * 1e-6 * a for p, a in zip(at, along, strict=True)] for sign in (1, -1))
        expected = (value(*ahead) - value(*behind)) / 2e-6
        grads = [tensor.grad.double().cpu().numpy() for tensor in theta]
        found = sum(float((g * a).sum()) for g, a in zip(grads, along, strict=True))
        assert found == pytest.approx(expected, rel=1e-4)


def test_what_is_not_a_number_stays_visible(choose: Callable[[str], None]) -> None:
    choose("kernels")
    x = normal(4, 50)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    out = fake_quantize_activations(x, 8)
    assert out[1].isnan().any()
    assert out[2].isnan().any()
    assert out[0].isfinite().all()
    scheme = Scheme.parse("W4A16-asym")
    ratio = torch.zeros(4, 1, device=DEVICE)
    out = fake_quantize_weight(x, None, None, ratio, None, scheme, torch.bfloat16, torch.bfloat16)
    assert out[1].isnan().any()
    assert out[3].isfinite().all()
    x = torch.cat((x, torch.zeros(4, 14, device=DEVICE)), dim=1)
    linear = LowBitLinear(torch.ones(8, 64, dtype=torch.int8, device=DEVICE), torch.ones(8, device=DEVICE), None, 8)
    out = linear(x)
    assert not out[1:3].isfinite().any()
    assert out[[0, 3]].isfinite().all()


# Decisions

SHAPES = [(37, 40, 1100), (70, 64, 200), (1, 96, 530), (3, 33, 5)]  # states, width, vocabulary


def scenery(shape: tuple[int, int, int], dtype: torch.dtype, biased: bool = False) -> tuple[Tensor, ...]:
    states, width, vocabulary = shape
    head = normal(vocabulary, width, seed=12) * 3 / width**0.5
    dense = normal(states, width, seed=13)
    noise = torch.linspace(1, 0.01, states, device=DEVICE)[:, None]
    quant = dense + noise * normal(states, width, seed=14)
    bias = normal(vocabulary, seed=15).to(dtype) if biased else None
    return dense.to(dtype), quant.to(dtype), head.to(dtype), bias


def logits(rows: Tensor, head: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    product = rows.to(dtype) @ head.to(dtype).T
    return product if bias is None else product + bias.to(dtype)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decisions_from_hidden_states_match_equations_3_to_7(
    shape: tuple[int, int, int], dtype: torch.dtype, biased: bool
) -> None:
    dense, quant, head, bias = scenery(shape, dtype, biased)
    found = Decisions(*decide_states(dense, quant, head, bias))
    z_dense, z_quant = (logits(rows, head, bias) for rows in (dense, quant))
    twin = decide(z_dense.float(), z_quant.float())
    for field in fields(Decisions):
        values, expected = getattr(found, field.name), getattr(twin, field.name)
        assert values.dtype == expected.dtype
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5, msg=field.name)
    for row, (d, q) in enumerate(zip(z_dense.cpu().numpy(), z_quant.cpu().numpy(), strict=True)):
        reference, quantized = oracles.eq3_actions(d, q)
        competitor = oracles.eq4_competitor(q, reference)
        assert (found.reference[row], found.quantized[row], found.competitor[row]) == (reference, quantized, competitor)
        for name, z in (("margin_dense", d), ("margin_quant", q)):
            expected = oracles.eq5_margin(z, reference, competitor)
            assert float(getattr(found, name)[row]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert float(found.js[row]) == pytest.approx(oracles.eq7_same_state(d, q), rel=1e-4, abs=1e-6)
        assert float(found.kl[row]) == pytest.approx(oracles.eq17_response(d, q), rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_id_within_and_across_tiles(dtype: torch.dtype) -> None:
    """Whole numbers, so that every product is exact. Only some tokens speak; each pair ties."""
    head, states = torch.zeros(1500, 32), torch.zeros(3, 32)
    for channel, tokens in enumerate([(70, 71), (5, 140), (300, 1400)]):
        states[channel, channel] = 4
        head[list(tokens), channel] = 2
    head, states = head.to(DEVICE, dtype), states.to(DEVICE, dtype)
    found = decide_states(states, states, head, None)
    assert found.reference.tolist() == found.quantized.tolist() == [70, 5, 300]
    assert found.competitor.tolist() == [71, 140, 1400]
    assert not any(found.margin_dense.tolist() + found.margin_quant.tolist())
    assert not found.js.any()
    assert not found.kl.any()
    silent = decide_states(torch.zeros_like(states), states, head, None)
    assert silent.reference.tolist() == [0, 0, 0]
    assert silent.competitor.tolist() == [70, 5, 300]


def test_distributions_without_a_common_token_reach_the_largest_js() -> None:
    head = torch.zeros(600, 16, device=DEVICE)
    head[2, 0] = head[599, 1] = 1
    dense, quant = (torch.zeros(2, 16, device=DEVICE) for _ in range(2))
    dense[:, 0] = quant[:, 1] = 500
    found = decide_states(dense, quant, head, None)
    torch.testing.assert_close(found.js, torch.full((2,), oracles.LN2, device=DEVICE), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.kl, torch.full((2,), 500.0, device=DEVICE), rtol=1e-5, atol=0)
    assert found.margin_dense.tolist() == [500, 500]
    assert found.margin_quant.tolist() == [-500, -500]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_teach_hidden_states_as_the_twins_do(
    shape: tuple[int, int, int], dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onptq.kernels.decisions, "GRADIENT_COLUMNS", 300)  # several pieces, and none a whole tile
    dense, start, head, bias = scenery(shape, dtype, biased)
    count, _, vocabulary = shape
    reference, competitor = ((torch.arange(count, device=DEVICE) * 3 + k) % vocabulary for k in (0, 1))
    weight, share = normal(count, seed=16), normal(count, seed=17).abs()
    quant, exact = start.clone().requires_grad_(), start.double().requires_grad_()
    kl, margin = kl_of_states(dense, quant, head, bias), margin_of_states(quant, head, bias, reference, competitor)
    ((kl * share).sum() + (margin * weight).sum()).backward()
    z_quant = logits(exact, head, bias)
    exact_kl, exact_margin = (
        kl_divergence(logits(dense, head, bias), z_quant),
        pair_margin(z_quant, reference, competitor),
    )
    ((exact_kl * share).sum() + (exact_margin * weight).sum()).backward()
    torch.testing.assert_close(kl.detach(), exact_kl.detach().float(), rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(margin.detach(), exact_margin.detach().float(), rtol=1e-5, atol=1e-5)
    assert quant.grad is not None
    assert exact.grad is not None
    assert quant.grad.dtype == dtype
    close(quant.grad.double(), exact.grad, {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype])


if DEVICE == "cuda":

    def test_a_7b_models_shapes_agree_with_the_twins(choose: Callable[[str], None]) -> None:
        dense, start, head, _ = scenery((300, 3584, 152064), torch.bfloat16)
        z_dense, z_quant = (torch.mm(rows, head.T, out_dtype=torch.float32) for rows in (dense, start))
        found, twin = Decisions(*decide_states(dense, start, head, None)), decide(z_dense, z_quant)
        for field in fields(Decisions):
            values, expected = getattr(found, field.name), getattr(twin, field.name)
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4, msg=field.name)
        again = Decisions(*decide_states(dense, start, head, None))
        assert all(torch.equal(getattr(found, field.name), getattr(again, field.name)) for field in fields(Decisions))
        quant = start.clone().requires_grad_()
        kl_of_states(dense, quant, head, None).sum().backward()
        slope = (z_quant.softmax(-1) - z_dense.softmax(-1)).bfloat16()
        close(quant.grad, slope @ head, 1e-2)

        weight, grad = (normal(3584, 18944, seed=seed).bfloat16() for seed in (20, 24))
        start_theta = normal(18944, seed=25) / 4, normal(3584, seed=26) / 4, -normal(3584, 1, seed=27).abs() / 8
        learned: dict[str, list[Tensor]] = {}
        gradients: dict[str, list[Tensor]] = {}
        x, hidden = normal(16384, 18944, seed=21).bfloat16(), normal(4000, 3584, seed=28).bfloat16()
        outs = {}
        for who in ("kernels", "twins"):
            choose(who)
            theta = [tensor.clone().requires_grad_() for tensor in start_theta]
            normed = [tensor.bfloat16().requires_grad_() for tensor in (hidden.clone(), theta[1].detach() + 1)]
            rms_norm(*normed, 1e-6).backward(hidden.flip(0))
            rounded = fake_quantize_weight(weight, *theta, None, Scheme(4), torch.bfloat16, torch.bfloat16)
            rounded.backward(grad)
            outs[who] = rounded.detach(), fake_quantize_activations(x, 8)
            learned[who] = [tensor.grad for tensor in theta]
            gradients[who] = [tensor.grad for tensor in normed]
        assert all(torch.equal(kernel, twin) for kernel, twin in zip(outs["kernels"], outs["twins"], strict=True))
        for kernel, twin in zip(learned["kernels"], learned["twins"], strict=True):
            close(kernel, twin, 1e-5)
        for kernel, twin in zip(gradients["kernels"], gradients["twins"], strict=True):
            close(kernel, twin, GRADIENTS[torch.bfloat16])


# Where the library calls them


@pytest.mark.parametrize("scheme", ["W4A8", "W4A16"])
def test_the_cycle_computes_the_same_with_kernels_and_without(
    small: Path, choose: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    ran: set[str] = set()
    functions = {"decide_states", "kl_of_states", "margin_of_states", "fake_quantize_rows"}
    if scheme == "W4A8":  # a norm's last bit decides between two codes of the largest activation
        functions |= {"fake_quantize_tokens"}
        monkeypatch.setattr(onptq.kernels.norms, "rms_norm_rows", plain_norm)
    else:
        functions |= {"rms_norm_rows"}
    for module in (onptq.kernels.activations, onptq.kernels.decisions, onptq.kernels.norms, onptq.kernels.weights):
        for name in functions:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, _noting(getattr(module, name), name, ran))
    source = find_source(small)
    processor = PromptProcessor.from_folder(small, source.family, source.config)
    policy = load_policy(source, scheme, device=DEVICE, dtype=torch.float32)
    prompts = []
    for prompt in load_manifest(small / "prompts.jsonl")[:2]:
        inputs = processor(prompt)
        prompts.append(encode(policy, [inputs], [prompt.ordinal])[0])
    trajectories = [Trajectory(prompt.ordinal, (3, 5, 7 + prompt.ordinal), False) for prompt in prompts]
    found = {}
    for who in ("twins", "kernels"):
        choose(who)
        theta = some_theta(policy)
        policy.freeze(theta)
        states = compare(Prefixes(policy, prompts, max_tokens=4), trajectories)
        states = states.with_columns(weight=np.full(len(states), 1 / len(states), np.float32))
        parameters = [tensor.requires_grad_() for part in (theta.smoothing, theta.ratio) for tensor in part.values()]
        policy.attach(theta)
        items = make_items(policy, prompts, trajectories, states)
        terms = measure(policy, items, Targets(policy, None))
        torch.stack(terms.values()).sum().backward()
        found[who] = states, terms, [parameter.grad for parameter in parameters]
        assert bool(ran) == (who == "kernels")
    assert ran == functions
    (states, terms, grads), (twin_states, twin_terms, twin_grads) = found["kernels"], found["twins"]
    for name in states.__dataclass_fields__:
        np.testing.assert_allclose(
            getattr(states, name), getattr(twin_states, name), rtol=1e-4, atol=1e-5, err_msg=name
        )
    torch.testing.assert_close(torch.stack(terms.values()), torch.stack(twin_terms.values()), rtol=1e-4, atol=1e-6)
    for grad, twin in zip(grads, twin_grads, strict=True):
        close(grad, twin, 1e-4)


def some_theta(policy: Policy) -> Theta:
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    for seed, u in enumerate(theta.smoothing.values()):
        u.copy_(normal(*u.shape, seed=seed) / 4)
    for seed, c in enumerate(theta.ratio.values()):
        c.copy_(-normal(*c.shape, seed=seed).abs() / 8)
    return theta


def _noting(function: Callable[..., object], name: str, ran: set[str]) -> Callable[..., object]:
    def noted(*arguments: object) -> object:
        ran.add(name)
        return function(*arguments)

    return noted
