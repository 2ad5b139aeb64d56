"""Theorem 1 and appendix B on random policies and values, with the library's decisions and margins where it has them."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from onptq.cycle.compare import Decisions, decide, pair_margin
from onptq.cycle.divergence import kl_divergence

ACTIONS = 6
quickly = settings(max_examples=100, deadline=None)

logits = arrays(np.float64, ACTIONS, elements=st.floats(-20, 20, width=32) | st.integers(-1, 1).map(float))
values = arrays(np.float64, ACTIONS, elements=st.floats(-100, 100, width=32) | st.just(1.0))
ROUNDING = 1e-11  # of sums of values up to 100


def decided(z_dense: np.ndarray, z_quant: np.ndarray) -> Decisions:
    """The library's decision about one state, whose tokens are those of Eqs. 3 and 4."""
    decision = decide(torch.from_numpy(z_dense)[None], torch.from_numpy(z_quant)[None])
    reference, quantized = oracles.eq3_actions(z_dense, z_quant)
    assert (int(decision.reference), int(decision.quantized)) == (reference, quantized)
    assert int(decision.competitor) == oracles.eq4_competitor(z_quant, reference)
    return decision


@quickly
@given(z_dense=logits, z_quant=logits, value=values)
def test_deviation_is_bounded_by_the_librarys_js_times_consequence(
    z_dense: np.ndarray, z_quant: np.ndarray, value: np.ndarray
) -> None:
    """The theorem's own bound lies between the two: TV <= sqrt(2 j)."""
    dense, quant = oracles.softmax(z_dense), oracles.softmax(z_quant)
    deviation = abs(oracles.eq20_return(quant, value) - oracles.eq20_return(dense, value))
    bound = oracles.eq21_bound(dense, quant, value)
    assert deviation <= bound + ROUNDING
    assert bound <= math.sqrt(2 * (float(decided(z_dense, z_quant).js) + 1e-13)) * float(np.ptp(value)) + ROUNDING


@quickly
@given(z_dense=logits, z_quant=logits, value=values, level=st.floats(-100, 100))
def test_either_factor_at_zero_leaves_no_deviation(
    z_dense: np.ndarray, z_quant: np.ndarray, value: np.ndarray, level: float
) -> None:
    """Equal policies, which the library finds to differ in nothing, or futures of equal value."""
    dense, quant = oracles.softmax(z_dense), oracles.softmax(z_quant)
    same = decided(z_dense, z_dense)
    assert max(float(same.js), float(same.kl), float(same.erosion)) < 1e-15
    assert int(same.quantized) == int(same.reference)
    assert oracles.eq21_bound(dense, dense, value) == 0
    flat = np.full(ACTIONS, level)
    assert oracles.eq21_bound(dense, quant, flat) == 0
    assert oracles.eq20_return(dense, flat) == pytest.approx(oracles.eq20_return(quant, flat), abs=ROUNDING)


def test_the_bound_is_attained_when_all_mass_moves_from_the_best_to_the_worst_action() -> None:
    value = np.array([3.0, -1.0, 0.5, 0.0, 2.0, 1.0])
    z_dense, z_quant = 1000 * np.eye(ACTIONS)[0], 1000 * np.eye(ACTIONS)[1]
    decision = decided(z_dense, z_quant)
    assert (int(decision.reference), int(decision.quantized), int(decision.competitor)) == (0, 1, 1)
    assert float(decision.erosion) == 2000
    assert float(decision.js) == pytest.approx(math.log(2), rel=1e-12)
    dense, quant = oracles.softmax(z_dense), oracles.softmax(z_quant)
    deviation = abs(oracles.eq20_return(quant, value) - oracles.eq20_return(dense, value))
    assert deviation == oracles.eq21_bound(dense, quant, value) == 4.0


@quickly
@given(z_dense=logits, z_quant=logits, value=values)
def test_on_the_librarys_pair_the_decomposition_is_exact(
    z_dense: np.ndarray, z_quant: np.ndarray, value: np.ndarray
) -> None:
    decision = decided(z_dense, z_quant)
    pair = int(decision.reference), int(decision.competitor)
    dense, quant = oracles.softmax(z_dense), oracles.softmax(z_quant)
    returns = [oracles.eq29_pair_return(policy, value, *pair) for policy in (dense, quant)]
    assert abs(returns[1] - returns[0]) == pytest.approx(
        oracles.eq30_pair_deviation(dense, quant, value, *pair), abs=ROUNDING
    )


@quickly
@given(z_dense=logits, z_quant=logits)
def test_the_librarys_margins_are_pair_normalized_log_odds(z_dense: np.ndarray, z_quant: np.ndarray) -> None:
    decision = decided(z_dense, z_quant)
    pair = int(decision.reference), int(decision.competitor)
    for z, margin in ((z_dense, decision.margin_dense), (z_quant, decision.margin_quant)):
        assert float(margin) == pytest.approx(oracles.eq31_log_odds(oracles.softmax(z), *pair), abs=1e-8)


@quickly
@given(z=logits, pair=st.lists(st.integers(0, ACTIONS - 1), min_size=2, max_size=2, unique=True))
def test_any_pairs_margin_is_its_log_odds(z: np.ndarray, pair: list[int]) -> None:
    reference, competitor = (torch.tensor([token]) for token in pair)
    margin = float(pair_margin(torch.from_numpy(z)[None], reference, competitor))
    assert margin == pytest.approx(oracles.eq31_log_odds(oracles.softmax(z), *pair), abs=1e-8)


@quickly
@given(z_dense=logits, z_quant=logits)
def test_erosion_is_mass_moved_from_the_reference_to_the_competitor(z_dense: np.ndarray, z_quant: np.ndarray) -> None:
    decision = decided(z_dense, z_quant)
    pair = int(decision.reference), int(decision.competitor)
    dense, quant = (oracles.eq28_pair_policy(oracles.softmax(z), *pair)[0] for z in (z_dense, z_quant))
    erosion = float(decision.erosion)
    assume(abs(float(decision.margin_dense - decision.margin_quant)) > 1e-6)
    assert (erosion > 0) == (float(decision.margin_quant) < float(decision.margin_dense))
    if erosion > 0:
        assert quant <= dense
        odds = math.log(dense / (1 - dense)) if dense < 1 else math.inf
        if odds < 12:  # beyond it 1 - dense has no digits left
            assert math.log(quant / (1 - quant)) == pytest.approx(odds - erosion, abs=1e-6)


@quickly
@given(z_dense=logits, z_quant=logits, value=values)
def test_the_pair_deviation_obeys_the_theorem_on_two_actions(
    z_dense: np.ndarray, z_quant: np.ndarray, value: np.ndarray
) -> None:
    """With two actions the bound holds with equality: TV is the shifted mass and the span is the difference of values."""
    decision = decided(z_dense, z_quant)
    pair = [int(decision.reference), int(decision.competitor)]
    dense, quant = (np.array(oracles.eq28_pair_policy(oracles.softmax(z), *pair)) for z in (z_dense, z_quant))
    bound = oracles.eq21_bound(dense, quant, value[pair])
    exact = oracles.eq30_pair_deviation(oracles.softmax(z_dense), oracles.softmax(z_quant), value, *pair)
    assert bound == pytest.approx(exact, abs=ROUNDING)


@quickly
@given(z_dense=logits, z_quant=logits)
def test_decision_discrepancy_has_the_librarys_js_as_its_proxy(z_dense: np.ndarray, z_quant: np.ndarray) -> None:
    """TV^2 / 2 <= j <= TV ln 2: j vanishes exactly when the theorem's decision factor does."""
    decision = decided(z_dense, z_quant)
    distance = oracles.total_variation(oracles.softmax(z_quant), oracles.softmax(z_dense))
    assert distance**2 / 2 - 1e-13 <= float(decision.js) <= distance * math.log(2) + 1e-13


@quickly
@given(z_dense=logits, z_quant=logits)
def test_the_gradient_of_the_response_kl_has_twice_the_total_variation(
    z_dense: np.ndarray, z_quant: np.ndarray
) -> None:
    """So equal weights already pull as hard at a state as its decision factor in Theorem 1 is large."""
    quant = torch.from_numpy(z_quant).requires_grad_()
    kl_divergence(torch.from_numpy(z_dense), quant).backward()
    assert quant.grad is not None
    pi_dense, pi_quant = oracles.softmax(z_dense), oracles.softmax(z_quant)
    np.testing.assert_allclose(quant.grad.numpy(), pi_quant - pi_dense, atol=1e-12)
    total_variation = 0.5 * np.abs(pi_quant - pi_dense).sum()
    assert float(quant.grad.abs().sum()) == pytest.approx(2 * total_variation, abs=1e-11)


@quickly
@given(
    z_dense=arrays(np.float64, (4, ACTIONS), elements=st.floats(-20, 20, width=32)),
    z_quant=arrays(np.float64, (4, ACTIONS), elements=st.floats(-20, 20, width=32)),
    span=arrays(np.float64, 4, elements=st.floats(0, 1, width=32)),
)
def test_a_kl_weighted_by_the_squared_span_bounds_the_expected_deviation(
    z_dense: np.ndarray, z_quant: np.ndarray, span: np.ndarray
) -> None:
    """Jensen and Pinsker over four equally likely states."""
    pi_dense, pi_quant = (np.stack([oracles.softmax(row) for row in each]) for each in (z_dense, z_quant))
    total_variation = 0.5 * np.abs(pi_quant - pi_dense).sum(1)
    kl = kl_divergence(torch.from_numpy(z_dense), torch.from_numpy(z_quant)).numpy()
    squared = np.mean(total_variation * span) ** 2
    assert squared <= np.mean((total_variation * span) ** 2) + 1e-12 <= 0.5 * np.mean(span**2 * kl) + 1e-9
