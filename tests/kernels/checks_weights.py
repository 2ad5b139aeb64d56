"""Kernels that fake-quantize weights against their plain twins and the float64 oracles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import oracles
import pytest
import torch
from kernel_support import DEVICE, DTYPES, close, normal
from torch import Tensor

from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.weights import dequantize, fake_quantize_weight, weight_codes
from onptq.schemes import Scheme

pytest_plugins = ["kernel_choice"]


def weights(scheme: Scheme, columns: int, storage: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Rows of every kind (zeros, one sign only, two largest, too small for a scale that is not 0) and theta:
    log-smoothing of inputs and outputs, log-ratios, offsets."""
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


def rounded_under(
    theta: Sequence[Tensor | None], weight: Tensor, scheme: Scheme, storage: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """The weight under the theta that `weights` gives."""
    log_in, log_out, log_ratio, offset = theta
    assert log_ratio is not None
    return fake_quantize_weight(weight, log_in, log_out, log_ratio, offset, scheme, storage, dtype)


PARTS = {"ratio": (2,), "smoothing": (0, 2), "both sides": (0, 1, 2), "offset": (2, 3), "all": (0, 1, 2, 3)}


SCHEMES = ("W4A16", "W2A16-g12", "W4A16-asym", "W3A16-g12-asym")
WIDE = (("W8A8", 1100), ("W4A16-g128", 256))  # a row in two tiles, the second ragged; channels in two tiles
WEIGHT_CASES = [(name, 60, dtype, "all") for name in SCHEMES for dtype in DTYPES]
WEIGHT_CASES += [
    (name, 60, DTYPES[(number + turn) % 3], parts)
    for number, name in enumerate(SCHEMES)
    for turn, parts in enumerate(name for name in PARTS if name != "all")
]
WEIGHT_CASES += [(name, columns, dtype, "all") for name, columns in WIDE for dtype in DTYPES]


@pytest.mark.parametrize(("name", "columns", "dtype", "learned"), WEIGHT_CASES)
def test_weights_are_fake_quantized_as_by_the_twin(
    choose: Callable[[str], None], name: str, columns: int, dtype: torch.dtype, learned: str
) -> None:
    scheme, parts = Scheme.parse(name), PARTS[learned]
    weight, start = weights(scheme, columns, dtype)
    grad = normal(7, columns, seed=5).to(dtype)
    results = {}
    for which in ("kernels", "twins"):
        choose(which)
        theta = [tensor.clone().requires_grad_() if part in parts else None for part, tensor in enumerate(start)]
        out = rounded_under(theta, weight.to(dtype), scheme, dtype, dtype)
        out.backward(grad)
        results[which] = out.detach(), [tensor.grad for tensor in theta if tensor is not None]
    assert results["kernels"][0].dtype == dtype
    assert torch.equal(results["kernels"][0], results["twins"][0])
    for kernel, twin in zip(results["kernels"][1], results["twins"][1], strict=True):
        close(kernel, twin, 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_zero_point_is_clamped_to_the_codes(choose: Callable[[str], None], dtype: torch.dtype) -> None:
    """In rows without a positive weight, a scale that was rounded down gives a zero point above the highest code."""
    scheme = Scheme.parse("W8A16-asym")
    tiny = torch.finfo(torch.float16).tiny if dtype == torch.float16 else 1.0
    weight = -torch.rand(32, 60, generator=torch.Generator().manual_seed(6)).to(DEVICE) * tiny * 4
    weight[:, 0] = 0
    ratio = torch.linspace(-0.7, 0, 32, device=DEVICE)[:, None]
    rounded = {}
    for which in ("kernels", "twins"):
        choose(which)
        rounded[which] = fake_quantize_weight(weight, None, None, ratio, None, scheme, dtype, torch.float32)
    assert torch.equal(rounded["kernels"], rounded["twins"])
    wanted = ratio.exp() * -weight.amin(1, keepdim=True)
    scale = (wanted / 255).to(dtype).float()
    assert bool(((wanted / scale).round() > 255).any()), "no row has a zero point beyond the codes"
    assert not rounded["kernels"][:, 0].any(), "a weight of 0 stays 0"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W4A16", "W8A8", "W4A16-g12", "W3A16-g12-asym"])
def test_codes_are_dequantized_as_by_the_twin(choose: Callable[[str], None], name: str, dtype: torch.dtype) -> None:
    scheme = Scheme.parse(name)
    weight, (*_, log_ratio, offset) = weights(scheme, 60, torch.bfloat16)
    codes = weight_codes(weight, log_ratio, offset, scheme, torch.bfloat16)
    results = {}
    for which in ("kernels", "twins"):
        choose(which)
        results[which] = dequantize(*codes, dtype)
    assert results["kernels"].dtype == dtype
    assert torch.equal(results["kernels"], results["twins"])


@pytest.mark.parametrize("wanted", range(4))
def test_only_wanted_gradients_are_computed(choose: Callable[[str], None], wanted: int) -> None:
    scheme = Scheme.parse("W4A16-asym")
    weight, start = weights(scheme, 60, torch.float32)
    grads = {}
    for which in ("kernels", "twins"):
        choose(which)
        theta = [tensor.clone().requires_grad_(part == wanted) for part, tensor in enumerate(start)]
        rounded_under(theta, weight, scheme, torch.float32, torch.float32).square().sum().backward()
        grads[which] = [tensor.grad for tensor in theta]
    for part, (kernel, twin) in enumerate(zip(grads["kernels"], grads["twins"], strict=True)):
        assert (kernel is not None) == (part == wanted)
        if part == wanted:
            close(kernel, twin, 2e-6)


def test_a_weight_with_a_gradient_is_computed_by_the_twin(choose: Callable[[str], None]) -> None:
    choose("kernels")
    weight, theta = weights(Scheme(4), 60, torch.float32)
    weight.requires_grad_()
    rounded_under(theta, weight, Scheme(4), torch.float32, torch.float32).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_scales_and_codes_agree_with_the_oracles(choose: Callable[[str], None]) -> None:
    """The largest value of a token is positive, so that none lies on a tie."""
    choose("kernels")
    x = normal(6, 90, seed=8)
    x[:, 3] = x.abs().amax(1) * 1.5
    exact = x.double().cpu().numpy()
    step = oracles.token_scale(exact, 6)
    expected = oracles.rounding(exact, step, 6)
    out = fake_quantize_activations(x, 6).double().cpu().numpy()
    np.testing.assert_allclose(out, expected(exact, step), rtol=1e-6)
    assert not expected.inside.all(), "the largest saturates"

    ratio = torch.linspace(0.5, 1, 6, device=DEVICE)[:, None]
    step = oracles.row_scale(exact, ratio.double().cpu().numpy(), 4)
    rounded = fake_quantize_weight(x, None, None, ratio.log(), None, Scheme(4), torch.float32, torch.float32)
    expected = oracles.rounding(exact, step, 4)
    np.testing.assert_allclose(rounded.double().cpu().numpy(), expected(exact, step), rtol=2e-6)


def test_gradients_agree_with_the_oracles_surrogate(choose: Callable[[str], None]) -> None:
    """Along random directions of both smoothings and the ratio, by central differences in float64."""
    choose("kernels")
    weight, grad = normal(5, 70, seed=9), normal(5, 70, seed=11)
    start = (normal(70, seed=22) / 4, normal(5, seed=23) / 4, -normal(5, 1, seed=10).abs() / 2)
    theta = [tensor.requires_grad_() for tensor in start]
    rounded_under([*theta, None], weight, Scheme(4), torch.float32, torch.float32).backward(grad)
    at = [tensor.detach().double().cpu().numpy() for tensor in theta]
    exact = weight.double().cpu().numpy()

    def smooth(u: np.ndarray, out: np.ndarray) -> np.ndarray:
        return exact * np.exp(u) / np.exp(out)[:, None]

    frozen = oracles.rounding(smooth(*at[:2]), oracles.row_scale(smooth(*at[:2]), np.exp(at[2]), 4), 4)

    def value(u: np.ndarray, out: np.ndarray, c: np.ndarray) -> float:
        w = smooth(u, out)
        return float((grad.double().cpu().numpy() * frozen(w, oracles.row_scale(w, np.exp(c), 4))).sum())

    rng = np.random.default_rng(0)
    for _ in range(5):
        along = [rng.standard_normal(point.shape) for point in at]
        ahead, behind = ([p + sign * 1e-6 * a for p, a in zip(at, along, strict=True)] for sign in (1, -1))
        expected = (value(*ahead) - value(*behind)) / 2e-6
        grads = [tensor.grad.double().cpu().numpy() for tensor in theta if tensor.grad is not None]
        results = sum(float((g * a).sum()) for g, a in zip(grads, along, strict=True))
        assert results == pytest.approx(expected, rel=1e-4)
