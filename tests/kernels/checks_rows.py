"""Kernels over rows of activations against their plain twins: rounding, norms, codes, GEMMs of codes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest
import torch
from kernel_support import DEVICE, DTYPES, GRADIENTS, SIZES, check_codes, close, normal, token_batch
from torch import Tensor

import onptq.kernels.activations
import onptq.kernels.codes
import onptq.kernels.decisions
import onptq.kernels.descent
import onptq.kernels.norms
import onptq.kernels.products
import onptq.kernels.weights
from onptq.kernels.packets import unpacked
from onptq.methods.signround import signed_step
from onptq.quantizer.integers import LowBitLinear
from onptq.quantizer.norms import rms_norm
from onptq.quantizer.numerics import fake_quantize_activations, quantize_tokens
from onptq.quantizer.weights import fake_quantize_weight
from onptq.schemes import Scheme

pytest_plugins = ["kernel_choice"]


ROW_SHAPES = ((2, 3, 100), (33, 7), (3, 2500), (40,))
EVERY_SHAPE_AND_DTYPE = [
    (shape, dtype, one + two) for one, shape in enumerate(ROW_SHAPES) for two, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(
    ("shape", "dtype", "bits"), [(shape, dtype, (4, 6, 8)[place % 3]) for shape, dtype, place in EVERY_SHAPE_AND_DTYPE]
)
def test_tokens_are_fake_quantized_as_by_the_twin(
    choose: Callable[[str], None], shape: tuple[int, ...], dtype: torch.dtype, bits: int
) -> None:
    x = token_batch(shape, dtype)
    grad = normal(*shape, seed=7).to(dtype)
    results = {}
    for which in ("kernels", "twins"):
        choose(which)
        entering = x.clone().requires_grad_()
        out = fake_quantize_activations(entering, bits)
        out.backward(grad)
        results[which] = out.detach(), entering.grad
    assert results["kernels"][0].dtype == dtype
    assert torch.equal(results["kernels"][0], results["twins"][0])
    close(results["kernels"][1], results["twins"][1], GRADIENTS[dtype])


@pytest.mark.parametrize(
    ("shape", "dtype", "learned"),
    [(shape, dtype, ("x", "gain", "both")[place % 3]) for shape, dtype, place in EVERY_SHAPE_AND_DTYPE],
)
def test_norms_agree_with_the_twin(
    choose: Callable[[str], None], shape: tuple[int, ...], dtype: torch.dtype, learned: str
) -> None:
    x, gain = token_batch(shape, dtype), (1 + normal(shape[-1], seed=5) / 4).to(dtype)
    grad = normal(*shape, seed=7).to(dtype)
    results = {}
    for which in ("kernels", "twins"):
        choose(which)
        entering = x.clone().requires_grad_(learned != "gain")
        multiplied = gain.clone().requires_grad_(learned != "x")
        out = rms_norm(entering, multiplied, 1e-6)
        out.backward(grad)
        results[which] = out.detach(), entering.grad, multiplied.grad
    for ours, plain in zip(results["kernels"], results["twins"], strict=True):
        if plain is None:
            assert ours is None
        else:
            close(ours, plain, GRADIENTS[dtype])
    with torch.no_grad():
        choose("kernels")
        assert torch.equal(rms_norm(x, gain, 1e-6), results["kernels"][0])


def test_norms_of_strided_rows_are_those_of_their_copies(choose: Callable[[str], None]) -> None:
    choose("kernels")
    x, gain = normal(6, 5, 24).transpose(0, 1), normal(24, seed=1)
    apart, copied = x.clone(memory_format=torch.preserve_format).requires_grad_(), x.contiguous().requires_grad_()
    grad = normal(6, 5, 24, seed=2).transpose(0, 1)
    for entering in (apart, copied):
        rms_norm(entering, gain, 1e-6).backward(grad)
    assert torch.equal(rms_norm(apart, gain, 1e-6), rms_norm(copied, gain, 1e-6))
    assert apart.grad is not None
    assert copied.grad is not None
    assert torch.equal(apart.grad, copied.grad)


def test_signed_steps_agree_with_the_twin(choose: Callable[[str], None]) -> None:
    gradient, start = normal(70, 101, seed=1), normal(70, 101, seed=2) / 2
    gradient[:3], gradient[3, :3] = 0, torch.tensor([torch.nan, torch.inf, -torch.inf])
    moved = []
    for which in ("kernels", "twins"):
        choose(which)
        moved.append(start.clone())
        signed_step(moved[-1], gradient.clone(), 0.013, -0.5, 0.5)
    assert torch.equal(*moved)
    assert bool((moved[0][4:] != start[4:]).all())
    assert float(moved[0].abs().max()) == 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [*SIZES, (3, 9232)])
def test_codes_of_activations_agree_with_the_twin(rows: int, width: int, dtype: torch.dtype) -> None:
    x = normal(rows, width, seed=width)
    x[-1] *= 0 if rows > 2 else 20
    x = x.to(dtype)
    check_codes(onptq.kernels.codes.token_codes(x), x.double(), 1)
    for bits in (6, 8):
        results = unpacked(onptq.kernels.codes.token_codes(x, bits), width)
        for one, plain in zip(results, quantize_tokens(x, bits), strict=True):
            assert torch.equal(one, plain.to(one.dtype))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(1, 48, 8), (17, 300, 70), (40, 512, 33), (129, 96, 130)])
def test_a_gemm_is_its_exact_integers_scaled(
    rows: int, columns: int, outputs: int, dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, weight = (
        (normal(size, columns, seed=seed) * 60).clamp(-128, 127).to(torch.int8)
        for size, seed in ((rows, 1), (outputs, 2))
    )
    scale, weight_scale = normal(rows, 1, seed=3).abs() + 0.1, ((normal(outputs, seed=4).abs() + 0.1) / 1000).to(dtype)
    bias = 50 * normal(outputs, seed=5).to(dtype) if biased else None
    exact = (codes.double() @ weight.double().T) * scale.double() * weight_scale.double()
    size = exact.abs() + (0 if bias is None else bias.double().abs())
    exact = exact if bias is None else exact + bias.double()
    rounding = 4 * torch.finfo(torch.float32).eps * size + torch.finfo(dtype).eps * exact.abs()
    ordinary = onptq.kernels.products.TILES
    for tiles in (ordinary, ()):  # for few rows, and for many
        monkeypatch.setattr(onptq.kernels.products, "TILES", tiles)
        results = onptq.kernels.products.scaled_rows(codes, scale, weight, weight_scale, bias, dtype)
        assert results.dtype == dtype
        assert bool(((results.double() - exact).abs() <= rounding).all())


@pytest.mark.skipif(DEVICE != "cpu", reason="protected pages need a CPU")
@pytest.mark.parametrize("last", ["activations", "weights"])
def test_a_gemm_reads_no_column_beyond_the_last(last: str) -> None:
    """The codes end where a protected page begins; a read beyond them ends the process."""
    codes, weight = (torch.ones(size, 50, dtype=torch.int8) for size in (3, 5))
    if last == "activations":
        codes = before_a_protected_page(codes)
    else:
        weight = before_a_protected_page(weight)
    ones = torch.ones(3, 1), torch.ones(5)
    product = onptq.kernels.products.scaled_rows(codes, ones[0], weight, ones[1], None, torch.float32)
    assert torch.equal(product, torch.full((3, 5), 50.0))


def before_a_protected_page(codes: Tensor) -> Tensor:
    """A copy of the codes that ends with a page; the next page may not be read."""
    size = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * size)
    whole = torch.frombuffer(memory, dtype=torch.int8)
    libc = ctypes.CDLL(None, use_errno=True)
    protected = ctypes.c_void_p(whole.data_ptr() + size)
    assert libc.mprotect(protected, ctypes.c_size_t(size), 0) == 0, ctypes.get_errno()
    moved = whole[size - codes.numel() : size].view(codes.shape)
    moved.copy_(codes)
    return moved


@pytest.mark.parametrize("columns", [160, 163])
def test_low_bit_linears_agree_with_the_twin(choose: Callable[[str], None], columns: int) -> None:
    codes = (normal(24, columns, seed=6) * 3).clamp(-8, 7).to(torch.int8)
    scale, bias = ((normal(24, seed=seed).abs() / 100).bfloat16() for seed in (7, 8))
    linear, x = LowBitLinear(codes, scale, bias, 8), normal(2, 5, columns, seed=9).bfloat16()
    results = {}
    for which in ("kernels", "twins"):
        choose(which)
        results[which] = linear(x).float()
        assert linear.operands.startswith("int8 x int8" if which == "kernels" else "int8")
    sizes = results["twins"].abs() + bias.float().abs()
    assert bool(((results["kernels"] - results["twins"]).abs() <= torch.finfo(torch.bfloat16).eps * sizes).all())


def test_nan_and_infinity_stay_visible(choose: Callable[[str], None]) -> None:
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
