"""Kernels that decide from hidden states, and their gradients, against equations 3 to 7 in float64."""

from __future__ import annotations

from dataclasses import fields

import oracles
import pytest
import torch
from kernel_support import DEVICE, DTYPES, close, normal
from torch import Tensor

import onptq.kernels.activations
import onptq.kernels.codes
import onptq.kernels.decisions
import onptq.kernels.descent
import onptq.kernels.norms
import onptq.kernels.products
import onptq.kernels.weights
from onptq.cycle.compare import Decisions, decide, pair_margin
from onptq.cycle.divergence import kl_divergence
from onptq.kernels.decisions import decide_states, kl_of_states, margin_of_states

SHAPES = [(37, 40, 1100), (70, 64, 200), (1, 96, 530), (3, 33, 5)]  # states, width, vocabulary
# Every type with the smallest shape, and with one of the others.
CASES = [
    (shape, dtype, (one + two) % 2 == 0)
    for one, shape in enumerate(SHAPES)
    for two, dtype in enumerate(DTYPES)
    if one in (two, len(SHAPES) - 1)
]


def states_and_head(
    shape: tuple[int, int, int], dtype: torch.dtype, biased: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
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


@pytest.mark.parametrize(("shape", "dtype", "biased"), CASES)
def test_decisions_from_hidden_states_match_equations_3_to_7(
    shape: tuple[int, int, int], dtype: torch.dtype, biased: bool
) -> None:
    dense, quant, head, bias = states_and_head(shape, dtype, biased)
    results = Decisions(*decide_states(dense, quant, head, bias))
    z_dense, z_quant = (logits(rows, head, bias) for rows in (dense, quant))
    twin = decide(z_dense.float(), z_quant.float())
    for field in fields(Decisions):
        values, expected = getattr(results, field.name), getattr(twin, field.name)
        assert values.dtype == expected.dtype
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5, msg=field.name)
    for row, (d, q) in enumerate(zip(z_dense.cpu().numpy(), z_quant.cpu().numpy(), strict=True)):
        reference, quantized = oracles.eq3_actions(d, q)
        competitor = oracles.eq4_competitor(q, reference)
        actions = (results.reference[row], results.quantized[row], results.competitor[row])
        assert tuple(map(int, actions)) == (
            reference,
            quantized,
            competitor,
        )
        for name, z in (("margin_dense", d), ("margin_quant", q)):
            expected = oracles.eq5_margin(z, reference, competitor)
            assert float(getattr(results, name)[row]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert float(results.js[row]) == pytest.approx(oracles.eq7_same_state(d, q), rel=1e-4, abs=1e-6)
        assert float(results.kl[row]) == pytest.approx(oracles.eq17_response(d, q), rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_id_within_and_across_tiles(dtype: torch.dtype) -> None:
    """With whole numbers, so that every product is exact. All but three pairs of tokens have a logit of 0; each pair
    ties."""
    head, states = torch.zeros(1500, 32), torch.zeros(3, 32)
    for channel, tokens in enumerate([(70, 71), (5, 140), (300, 1400)]):
        states[channel, channel] = 4
        head[list(tokens), channel] = 2
    head, states = head.to(DEVICE, dtype), states.to(DEVICE, dtype)
    results = decide_states(states, states, head, None)
    assert results.reference.tolist() == results.quantized.tolist() == [70, 5, 300]
    assert results.competitor.tolist() == [71, 140, 1400]
    assert not any(results.margin_dense.tolist() + results.margin_quant.tolist())
    assert not results.js.any()
    assert not results.kl.any()
    all_zero = decide_states(torch.zeros_like(states), states, head, None)
    assert all_zero.reference.tolist() == [0, 0, 0]
    assert all_zero.competitor.tolist() == [70, 5, 300]


def test_distributions_without_a_common_token_reach_the_largest_js() -> None:
    head = torch.zeros(600, 16, device=DEVICE)
    head[2, 0] = head[599, 1] = 1
    dense, quant = (torch.zeros(2, 16, device=DEVICE) for _ in range(2))
    dense[:, 0] = quant[:, 1] = 500
    results = decide_states(dense, quant, head, None)
    torch.testing.assert_close(results.js, torch.full((2,), oracles.LN2, device=DEVICE), rtol=0, atol=1e-6)
    torch.testing.assert_close(results.kl, torch.full((2,), 500.0, device=DEVICE), rtol=1e-5, atol=0)
    assert results.margin_dense.tolist() == [500, 500]
    assert results.margin_quant.tolist() == [-500, -500]


@pytest.mark.parametrize(("shape", "dtype", "biased"), CASES)
def test_gradients_of_the_losses_agree_with_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        onptq.kernels.decisions, "GRADIENT_COLUMNS", 300
    )  # several chunks, none a whole number of tiles
    dense, start, head, bias = states_and_head(shape, dtype, biased)
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
