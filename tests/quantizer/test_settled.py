"""A linear whose codes are settled, against autograd through the product written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onptq.kernels.grid import code_range
from onptq.quantizer.settled import settled_codes, settled_linear
from onptq.quantizer.weights import dequantize
from onptq.schemes import Scheme

TOKENS, INPUTS, OUTPUTS = (2, 5), 12, 7


def written_out(x: Tensor, levels: Tensor, step: Tensor, log_ratio: Tensor, bias: Tensor | None) -> Tensor:
    rows = []
    for row in range(OUTPUTS):
        width = INPUTS // step.shape[1]
        scales = [step[row, column // width] * log_ratio[row, column // width].exp() for column in range(INPUTS)]
        rows.append(sum(x[..., column] * levels[row, column] * scales[column] for column in range(INPUTS)))
    out = torch.stack(rows, -1)  # type: ignore[arg-type]
    return out if bias is None else out + bias


def drawn(groups: int, biased: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(*TOKENS, INPUTS, generator=draw, dtype=torch.float64)
    levels = torch.randint(-8, 8, (OUTPUTS, INPUTS), generator=draw, dtype=torch.int8)
    step = torch.rand(OUTPUTS, groups, generator=draw, dtype=torch.float64) * 0.1 + 0.01
    log_ratio = torch.randn(OUTPUTS, groups, generator=draw, dtype=torch.float64) * 0.1
    bias = torch.randn(OUTPUTS, generator=draw, dtype=torch.float64) * 100 if biased else None
    return x, levels, step, log_ratio, bias


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_it_is_the_product_written_out_and_so_are_its_gradients(groups: int, biased: bool) -> None:
    x, levels, step, log_ratio, bias = drawn(groups, biased)
    learned = [one for one in (x.requires_grad_(), log_ratio.requires_grad_(), bias) if one is not None]
    if bias is not None:
        bias.requires_grad_()
    found = settled_linear(x, levels, step, log_ratio, bias, torch.float64)
    expected = written_out(x, levels, step, log_ratio, bias)
    torch.testing.assert_close(found, expected)
    towards = torch.randn(found.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((found * towards).sum(), learned),
        torch.autograd.grad((expected * towards).sum(), learned),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_in_sixteen_bits_the_gradient_is_that_of_the_written_out_one_but_for_rounding() -> None:
    x, levels, step, log_ratio, _ = drawn(1, biased=False)
    narrow, exact = x.bfloat16(), log_ratio.clone().requires_grad_()
    learned = log_ratio.float().requires_grad_()
    found = settled_linear(narrow, levels, step.float(), learned, None, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    towards = torch.randn(found.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    (ours,) = torch.autograd.grad((found * towards).sum(), learned)
    expected = written_out(narrow.double(), levels, step, exact, None)
    (theirs,) = torch.autograd.grad((expected * towards.double()).sum(), exact)
    assert ours.dtype == torch.float32
    assert float((ours - theirs).norm() / theirs.norm()) < 2**-6


def test_steps_too_small_for_the_compute_dtype_have_no_gradient_rather_than_none_that_is_a_number() -> None:
    x, levels, step, log_ratio, _ = drawn(1, biased=False)
    step[0] = 1e-12
    learned = log_ratio.float().requires_grad_()
    out = settled_linear(x.half(), levels, step.float(), learned, None, torch.float16)
    (gradient,) = torch.autograd.grad(out.sum(), learned)
    assert float(gradient[0]) == 0
    assert gradient.isfinite().all()
    assert gradient[1:].all()


@pytest.mark.parametrize(("smallest", "zero"), [(0, -8), (3, -8), (-4, -4), (-15, 7)])
def test_the_zero_point_is_a_code_whatever_the_levels(smallest: int, zero: int) -> None:
    """Levels without a zero among them still have one that a checkpoint can store."""
    levels = torch.arange(smallest, smallest + INPUTS, dtype=torch.int16).repeat(OUTPUTS, 1)
    scale, ratio = torch.full((OUTPUTS, 1), 0.25), torch.zeros(OUTPUTS, 1)
    codes, effective, zeros = settled_codes(levels, scale, ratio, Scheme(4, symmetric=False), torch.float32)
    assert zeros is not None
    assert zeros.tolist() == [[zero]] * OUTPUTS
    low, high = code_range(4)
    assert low <= int(codes.min())
    assert int(codes.max()) <= high
    torch.testing.assert_close(dequantize(codes, effective, zeros, torch.float32), levels * 0.25)
