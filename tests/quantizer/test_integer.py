"""Integer rounding: forward values are compressed-tensors' own, gradients are those of the smooth surrogate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import dequantize as dequantize_as_stored
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onptq.kernels.grid import code_range
from onptq.quantizer.numerics import FakeQuantize, fake_quantize_activations, round_to_codes
from onptq.quantizer.weights import dequantize, fake_quantize_weight, weight_codes, weight_grid
from onptq.schemes import Scheme

quickly = settings(max_examples=60, deadline=None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Forward


def stored_activations(x: Tensor, bits: int) -> Tensor:
    """What a reloaded checkpoint computes: dynamic scales, symmetric, one per token."""
    args = QuantizationArgs(num_bits=bits, strategy=QuantizationStrategy.TOKEN, symmetric=True, dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    return fake_quantize(x, scale, zero, args)


@quickly
@given(
    seed=st.integers(0, 10**6),
    bits=st.integers(2, 8),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-20, 7),
    outlier=st.sampled_from([1.0, 50.0]),
)
def test_activations_are_quantized_bit_for_bit_as_compressed_tensors_does(
    seed: int, bits: int, dtype: torch.dtype, exponent: int, outlier: float
) -> None:
    x = normal(2, 5, 32, seed=seed, scale=2.0**exponent)
    x[..., 3] *= outlier
    x[0, 1] = 0
    x = x.to(dtype)
    ours, theirs = fake_quantize_activations(x, bits), stored_activations(x, bits)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)
    assert not ours[0, 1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_extremes_of_a_token_use_the_ends_of_the_range(bits: int, dtype: torch.dtype) -> None:
    """One step is 2 max|x| / (2^b - 1): the largest positive value saturates, and the largest negative one lies half way
    between the two lowest codes, where the last bit of the division decides."""
    low, high = code_range(bits)
    x = torch.tensor([[[-3.0, 3.0, 0.0, 1.5]]], dtype=dtype)
    step = x.abs().max() / ((2**bits - 1) / 2)
    codes = (fake_quantize_activations(x, bits).float() / step.float()).round()[0, 0].tolist()
    assert codes[0] in (low, low + 1)
    assert codes[1] == high
    assert codes[2] == 0


@pytest.mark.parametrize("shape", [(4, 16), (16,), (2, 3, 4, 16)])
def test_every_token_has_its_own_step_whatever_the_shape(shape: tuple[int, ...]) -> None:
    x = normal(*shape).float() * torch.logspace(-3, 3, max(1, int(np.prod(shape[:-1])))).reshape(*shape[:-1], 1)
    expected = torch.stack([stored_activations(row[None, None], 8)[0, 0] for row in x.reshape(-1, shape[-1])])
    assert torch.equal(fake_quantize_activations(x, 8).reshape(-1, shape[-1]), expected)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "W3A16", "W4A16-g8", "W4A16-asym", "W4A16-g8-asym"])
def test_stored_weights_come_back_as_the_training_graph_saw_them(scheme: str, storage: torch.dtype) -> None:
    parsed = Scheme.parse(scheme)
    weight = normal(6, 32, seed=1).float()
    weight[2] = 0
    groups = 32 // parsed.group_size if parsed.group_size else 1
    log_ratio = torch.linspace(-0.6, 0, 6 * groups).view(6, groups)
    for dtype in (torch.float32, storage):
        live = fake_quantize_weight(weight, None, None, log_ratio, None, parsed, storage, dtype)
        codes, step, zero = weight_codes(weight, log_ratio, None, parsed, storage)
        assert step.dtype == storage
        assert codes.dtype == torch.int8
        args = QuantizationArgs(
            num_bits=parsed.weight_bits,
            symmetric=parsed.symmetric,
            strategy=QuantizationStrategy.GROUP if parsed.group_size else QuantizationStrategy.CHANNEL,
            group_size=parsed.group_size,
        )
        assert torch.equal(live, dequantize(codes, step, zero, dtype))
        if dtype == storage:
            assert torch.equal(live, dequantize_as_stored(codes, step, zero, args, dtype))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_row_steps_are_the_full_range_times_the_ratio(bits: int) -> None:
    weight, ratio = normal(5, 20, seed=2), torch.linspace(0.4, 1, 5, dtype=torch.float64)[:, None]
    step, zero = weight_grid(weight[:, None], ratio.log(), Scheme(bits), torch.float64)
    assert zero is None
    np.testing.assert_allclose(step[:, 0], oracles.row_scale(weight.numpy(), ratio.numpy(), bits), rtol=1e-12)
    codes = round_to_codes(weight, step[:, 0], bits)
    np.testing.assert_array_equal(codes, oracles.rounding(weight.numpy(), step[:, 0].numpy(), bits).code)
    assert codes[-1].abs().max() == code_range(bits)[1], "at ratio 1 the largest weight has the largest code"


@pytest.mark.parametrize("shift", [0.0, 0.7, -3.0])
def test_asymmetric_rows_cover_their_range_and_keep_zero_exact(shift: float) -> None:
    weight = normal(6, 24, seed=3) + shift
    codes, step, zero = weight_codes(
        weight, torch.zeros(6, 1).double(), None, Scheme(4, symmetric=False), torch.float64
    )
    assert zero is not None
    reached = dequantize(codes, step, zero, torch.float64)
    span = weight.amax(1).clamp(min=0) - weight.amin(1).clamp(max=0)
    np.testing.assert_allclose(step[:, 0], span / 15, rtol=1e-12)
    assert ((reached - weight).abs() <= step * 1.0001).all(), "rounding the zero point costs at most another half step"
    assert ((zero >= -8) & (zero <= 7)).all()


def test_rounding_offsets_move_codes_by_at_most_one() -> None:
    weight = normal(8, 32, seed=4)
    offset = torch.rand(8, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5
    plain = weight_codes(weight, torch.zeros(8, 1).double(), None, Scheme(4), torch.float64)[0]
    moved = weight_codes(weight, torch.zeros(8, 1).double(), offset, Scheme(4), torch.float64)[0]
    assert (plain - moved).abs().max() == 1
    step = oracles.row_scale(weight.numpy(), np.ones((8, 1)), 4)
    np.testing.assert_array_equal(moved, oracles.rounding(weight.numpy(), step, 4, offset.numpy()).code)


# Gradients: the residuals of rounding and the saturated codes are frozen at the point, everything else may move


def numeric_gradient(value: Callable[[np.ndarray], float], at: np.ndarray, reach: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        moved = at.copy()
        moved[index] = at[index] + reach
        above = value(moved)
        moved[index] = at[index] - reach
        gradient[index] = (above - value(moved)) / (2 * reach)
    return gradient


def agree(found: Tensor | None, expected: np.ndarray) -> None:
    assert found is not None
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-7 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("with_offset", [False, True], ids=["nearest", "offset"])
@pytest.mark.parametrize("with_zero", [False, True], ids=["symmetric", "asymmetric"])
def test_fake_quantize_has_the_gradients_of_its_surrogate(bits: int, with_offset: bool, with_zero: bool) -> None:
    x, grad = normal(3, 8, seed=bits), normal(3, 8, seed=bits + 1)
    step = 0.7 * x.abs().amax(1, keepdim=True) / 2 ** (bits - 1)  # some codes saturate
    offset = torch.rand(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    zero = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64) if with_zero else None
    inputs = [tensor.clone().requires_grad_() for tensor in (x, step, offset)]
    shift = None if not with_offset else inputs[2]
    if zero is not None:
        shift = zero if shift is None else shift + zero
    out = FakeQuantize.apply(inputs[0], inputs[1], shift, zero, bits, torch.float64)
    out.backward(grad)

    point = [tensor.numpy() for tensor in (x, step, offset if with_offset else torch.zeros_like(x))]
    frozen = oracles.rounding(point[0], point[1], bits, point[2], 0.0 if zero is None else zero.numpy())
    assert 0 < frozen.inside.sum() < frozen.inside.size, "free and saturated codes are both here"
    np.testing.assert_allclose(out.detach().numpy(), frozen(*point), rtol=1e-12, atol=1e-12)
    for index in range(3 if with_offset else 2):

        def along(moved: np.ndarray, index: int = index) -> float:
            return float((grad.numpy() * frozen(*[*point[:index], moved, *point[index + 1 :]])).sum())

        agree(inputs[index].grad, numeric_gradient(along, point[index]))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_smoothing_learns_through_the_token_step(bits: int) -> None:
    """x / s enters the quantizer; its step is max|x / s|, inside the graph."""
    x, grad = normal(2, 4, 10, seed=5), normal(2, 4, 10, seed=6)
    u = normal(10, seed=7, scale=0.3).requires_grad_()
    entering = x / u.exp()
    fake_quantize_activations(entering, bits).backward(grad)

    point = entering.detach().numpy()
    frozen = oracles.rounding(point, oracles.token_scale(point, bits), bits)

    def surrogate(moved: np.ndarray) -> float:
        smooth = x.numpy() / np.exp(moved)
        return float((grad.numpy() * frozen(smooth, oracles.token_scale(smooth, bits))).sum())

    agree(u.grad, numeric_gradient(surrogate, u.detach().numpy()))

    def detached(moved: np.ndarray) -> float:
        return float((grad.numpy() * frozen(x.numpy() / np.exp(moved), oracles.token_scale(point, bits))).sum())

    without = numeric_gradient(detached, u.detach().numpy())
    assert np.abs(u.grad.numpy() - without).max() > 1e-3, "the step's own gradient is a visible part of it"  # type: ignore[union-attr]


def weight_surrogate(
    weight: np.ndarray, scheme: Scheme, offset: np.ndarray, point: list[np.ndarray]
) -> Callable[[list[np.ndarray]], np.ndarray]:
    """W' of (u_in, u_out, c, V) with rounding, saturation and zero points frozen at `point`."""
    groups = point[2].shape[1]

    def grid(parameters: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        u_in, u_out, log_ratio, _ = parameters
        smooth = oracles.smoothed_weight(weight, u_in, u_out).reshape(len(weight), groups, -1)
        ratio = np.exp(log_ratio)[..., None]
        if scheme.symmetric:
            step = oracles.row_scale(smooth, ratio, scheme.weight_bits)
            return smooth, step, np.zeros_like(step)
        bottom = np.minimum(smooth.min(-1, keepdims=True), 0)
        step = ratio * (np.maximum(smooth.max(-1, keepdims=True), 0) - bottom) / (2**scheme.weight_bits - 1)
        low, high = code_range(scheme.weight_bits)
        return smooth, step, np.clip(np.round(low - ratio * bottom / step), low, high)

    smooth, step, zero = grid(point)
    frozen = oracles.rounding(smooth, step, scheme.weight_bits, offset.reshape(smooth.shape), zero)

    def surrogate(parameters: list[np.ndarray]) -> np.ndarray:
        smooth, step, _ = grid(parameters)
        return frozen(smooth, step, parameters[3].reshape(smooth.shape)).reshape(weight.shape)

    return surrogate


@pytest.mark.parametrize("with_offset", [False, True], ids=["nearest", "offset"])
@pytest.mark.parametrize("scheme", ["W4A16", "W2A16", "W8A8", "W4A16-g4", "W4A16-asym", "W3A16-g4-asym"])
def test_smoothing_ratios_and_offsets_learn_through_the_weight_step(scheme: str, with_offset: bool) -> None:
    parsed = Scheme.parse(scheme)
    groups = 3 if parsed.group_size else 1
    weight, grad = normal(5, 12, seed=8), normal(5, 12, seed=9)
    offset = torch.rand(5, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 0.5
    start = [
        normal(12, seed=10, scale=0.3),
        normal(5, seed=11, scale=0.3),
        -0.5 * normal(5, groups, seed=12).abs(),
        offset,
    ]
    if not with_offset:
        start[3] = torch.zeros_like(offset)
    theta = [tensor.clone().requires_grad_() for tensor in start]
    out = fake_quantize_weight(
        weight,
        theta[0],
        theta[1],
        theta[2],
        theta[3] if with_offset else None,
        parsed,
        torch.float64,
        torch.float64,
    )
    out.backward(grad)

    weight32 = weight.float().double().numpy()  # the library smooths the fp32 weight
    point = [tensor.numpy() for tensor in start]
    surrogate = weight_surrogate(weight32, parsed, point[3], point)
    np.testing.assert_allclose(out.detach().numpy(), surrogate(point), rtol=1e-9, atol=1e-12)
    for index in range(4 if with_offset else 3):

        def along(moved: np.ndarray, index: int = index) -> float:
            return float((grad.numpy() * surrogate([*point[:index], moved, *point[index + 1 :]])).sum())

        agree(theta[index].grad, numeric_gradient(along, point[index]))


def test_rounding_to_the_stored_dtype_lets_the_gradient_pass() -> None:
    weight, log_ratio = normal(4, 16, seed=13).float(), torch.full((4, 1), -0.1, requires_grad=True)
    exact = torch.full((4, 1), -0.1, requires_grad=True)
    for ratio, storage in ((log_ratio, torch.bfloat16), (exact, torch.float32)):
        fake_quantize_weight(
            weight, None, None, ratio, None, Scheme(8), storage, torch.float32
        ).square().sum().backward()
    assert log_ratio.grad is not None
    assert exact.grad is not None
    assert (log_ratio.grad != 0).all()
    torch.testing.assert_close(log_ratio.grad, exact.grad, rtol=0.3, atol=0.05)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_gradient_passes_at_the_extreme_codes_and_not_beyond(bits: int) -> None:
    low, high = code_range(bits)
    places = torch.tensor([low - 0.25, low, low + 1, high - 1, high, high + 0.25], dtype=torch.float64)
    scale = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    x = (places * 0.5).requires_grad_()
    FakeQuantize.apply(x, scale, None, None, bits, torch.float64).sum().backward()
    assert x.grad is not None
    assert scale.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 0]
    assert float(scale.grad) == low + high, "those inside lie on their codes, those beyond add theirs"


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_lie_within_the_codes_where_the_stored_scale_is_too_small(bits: int) -> None:
    """Rows without a positive weight have the last code as their zero point; a scale rounded down leads beyond it."""
    low, high = code_range(bits)
    weight = -(torch.rand(4096, 8, generator=torch.Generator().manual_seed(0)) + 1)
    ratio, scheme = torch.zeros(4096, 1), Scheme(bits, symmetric=False)
    codes, scale, zero = weight_codes(weight, ratio, None, scheme, torch.bfloat16)
    assert zero is not None
    unbounded = (low + weight.amin(1, keepdim=True).abs() / scale.float()).round()
    assert bool((unbounded > high).any()) == (bits == 8), "the case occurs"
    assert (zero.int() == unbounded.clamp(low, high).int()).all()
    torch.testing.assert_close(dequantize(codes, scale, zero, torch.float32), weight, rtol=0, atol=4 / (2**bits - 1))
