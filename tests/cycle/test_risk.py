"""Decision-Consequence risk, the critical set and its weights: Eqs. 9-11 and the ablated rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onptq.bank import AGREE, MISMATCH, NEAR_MISS, States
from onptq.cycle.risk import score, select
from onptq.errors import OnPTQError
from onptq.recipe import RiskConfig, SelectConfig

RULES = ("risk", "all", "mismatch", "mismatch_near_miss", "consequence", "random")
quickly = settings(max_examples=60, deadline=None)


def bank(seed: int = 0, prompts: int = 5, longest: int = 9, levels: int | None = None) -> States:
    """Random states as Branch leaves them; with few `levels` many of their figures are equal."""
    rng = np.random.default_rng(seed)
    places = [(p, t) for p in range(prompts) for t in range(1, rng.integers(1, longest) + 1)]
    count = len(places)

    def positive() -> np.ndarray:
        drawn = rng.random(count) if levels is None else rng.integers(1, levels + 1, count) / levels
        return drawn.astype(np.float32)

    kind = rng.choice([AGREE, NEAR_MISS, MISMATCH], count).astype(np.int8)
    erosion = np.where(kind == AGREE, 0, 3 * positive()).astype(np.float32)
    margin = rng.standard_normal(count).astype(np.float32)
    ids = {
        name: rng.integers(0, 50, count).astype(np.int32) for name in ("token", "reference", "competitor", "quantized")
    }
    states = States.compared(
        prompt=np.array([p for p, _ in places], np.int32),
        t=np.array([t for _, t in places], np.int32),
        **ids,
        margin_dense=margin,
        margin_quant=margin - erosion,
        erosion=erosion,
        js=positive() * np.float32(0.69),
        kl=positive() * np.float32(2),
        kind=kind,
    )
    consequence = np.where(kind == AGREE, 0, positive()).astype(np.float32)
    return states.with_columns(consequence=consequence, horizon=np.where(kind == AGREE, 0, 4).astype(np.int32))


def place(states: States, row: int | np.integer) -> tuple[int, int]:
    return int(states.prompt[row]), int(states.t[row])


def chosen_places(states: States) -> set[tuple[int, int]]:
    return {place(states, row) for row in np.flatnonzero(states.critical)}


# Eq. 9


@quickly
@given(
    seed=st.integers(0, 10**6),
    weights=st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.5, 1.0, 2.0])),
    divergence=st.sampled_from(["js", "kl"]),
)
def test_risk_is_equation_9_on_candidates_and_zero_elsewhere(
    seed: int, weights: tuple[float, float], divergence: str
) -> None:
    states = bank(seed)
    branch_weight, eta = weights
    cfg = RiskConfig(branch_weight=branch_weight, divergence_weight=eta, divergence=divergence)  # type: ignore[arg-type]
    risk = score(states, cfg).risk
    column = states.js if divergence == "js" else states.kl
    for row in range(len(states)):
        expected = oracles.eq9_risk(
            float(states.erosion[row]), float(states.consequence[row]), float(column[row]), branch_weight, eta
        )
        assert risk[row] == pytest.approx(expected if states.kind[row] != AGREE else 0.0, rel=1e-6)


def test_the_defaults_are_the_papers() -> None:
    states = bank()
    e, a, j = (getattr(states, name).astype(np.float64) for name in ("erosion", "consequence", "js"))
    expected = np.where(states.candidates, e * (1 + a) + j, 0)
    np.testing.assert_allclose(score(states, RiskConfig()).risk, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("removed", "left"),
    [
        ({"erosion_weight": 0}, lambda e, a, j: j),
        ({"branch_weight": 0}, lambda e, a, j: e + j),
        ({"divergence_weight": 0}, lambda e, a, j: e * (1 + a)),
        ({"branch_weight": 0, "divergence_weight": 0}, lambda e, a, j: e),
    ],
)
def test_each_term_can_be_removed(removed: dict[str, Any], left: Any) -> None:
    states = bank(3)
    columns = (getattr(states, name).astype(np.float64) for name in ("erosion", "consequence", "js"))
    expected = np.where(states.candidates, left(*columns), 0)
    np.testing.assert_allclose(score(states, RiskConfig(**removed)).risk, expected, rtol=1e-6)


def test_scoring_passes_every_other_column_on() -> None:
    states = bank(1)
    scored = score(states, RiskConfig())
    for name in ("prompt", "t", "erosion", "js", "kl", "consequence", "horizon", "kind", "critical", "weight"):
        assert np.array_equal(getattr(scored, name), getattr(states, name))


@pytest.mark.parametrize("column", ["erosion", "js", "consequence"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_candidate_without_a_finite_risk_is_an_error_that_names_it(column: str, value: float) -> None:
    states = bank(2)
    row = int(np.flatnonzero(states.candidates)[3])
    broken = getattr(states, column).copy()
    broken[row] = value
    with pytest.raises(OnPTQError, match=f"prompt {states.prompt[row]}, token {states.t[row]} is not finite"):
        score(states.with_columns(**{column: broken}), RiskConfig())


@pytest.mark.parametrize("column", ["erosion", "js"])
def test_nan_logits_that_look_like_an_agreement_are_an_error_too(column: str) -> None:
    """Two rows of NaN have the same argmax and no erosion above 0: Compare calls them an agreement."""
    states = bank(2)
    row = int(np.flatnonzero(~states.candidates)[0])
    broken = getattr(states, column).copy()
    broken[row] = np.nan
    with pytest.raises(OnPTQError, match=f"prompt {states.prompt[row]}, token {states.t[row]}"):
        score(states.with_columns(**{column: broken}), RiskConfig())


# Eqs. 10 and 11


def ranks(states: States, rule: str, eta: float = 1.0) -> dict[tuple[int, int], float]:
    """What each rule may take, and by which figure (the paper, section 5.3 and appendix D)."""
    figures = {
        "risk": (states.candidates, states.risk),
        "mismatch": (states.kind == MISMATCH, states.risk),
        "mismatch_near_miss": (states.candidates, states.erosion + np.float32(eta) * states.js),
        "consequence": (states.candidates, states.consequence),
    }
    eligible, rank = figures[rule]
    return {place(states, row): float(rank[row]) for row in np.flatnonzero(eligible)}


@quickly
@given(
    seed=st.integers(0, 10**6),
    rule=st.sampled_from(["risk", "mismatch", "mismatch_near_miss", "consequence"]),
    budget=st.integers(1, 40),
    levels=st.sampled_from([None, 2]),
)
def test_the_critical_set_is_the_top_of_the_rules_ranking(
    seed: int, rule: str, budget: int, levels: int | None
) -> None:
    states = score(bank(seed, levels=levels), RiskConfig())
    selected = select(states, SelectConfig(rule=rule, budget=budget))  # type: ignore[arg-type]
    expected = oracles.eq10_critical(ranks(states, rule), budget)
    assert chosen_places(selected) == set(expected)
    check_weights(selected)


@quickly
@given(
    seed=st.integers(0, 10**6),
    rule=st.sampled_from(["risk", "mismatch", "mismatch_near_miss", "consequence"]),
    per_prompt=st.integers(1, 4),
    levels=st.sampled_from([None, 2]),
)
def test_per_prompt_takes_the_top_of_every_prompt(seed: int, rule: str, per_prompt: int, levels: int | None) -> None:
    states = score(bank(seed, levels=levels), RiskConfig())
    selected = select(states, SelectConfig(rule=rule, per_prompt=per_prompt, budget=1))  # type: ignore[arg-type]
    ranking = ranks(states, rule)
    expected: set[tuple[int, int]] = set()
    for prompt in set(states.prompt.tolist()):
        own = {state: rank for state, rank in ranking.items() if state[0] == prompt}
        expected |= set(oracles.eq10_critical(own, per_prompt))
    assert chosen_places(selected) == expected
    check_weights(selected)


def check_weights(selected: States) -> None:
    rows = np.flatnonzero(selected.critical)
    assert not selected.weight[~selected.critical].any()
    if not len(rows):
        return
    assert float(selected.weight.sum(dtype=np.float64)) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(selected.weight[rows], oracles.eq11_weights(selected.risk[rows].tolist()), rtol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_weights_sum_to_one_under_every_rule(rule: str) -> None:
    states = score(bank(4), RiskConfig())
    for weights in ("risk", "uniform"):
        selected = select(states, SelectConfig(rule=rule, budget=6, weights=weights))  # type: ignore[arg-type]
        assert selected.critical.sum() == (len(states) if rule == "all" else 6)
        assert float(selected.weight.sum(dtype=np.float64)) == pytest.approx(1, abs=1e-6)
        assert (selected.weight[selected.critical] > 0).all()
        if weights == "uniform" or rule == "all":
            assert len(set(selected.weight[selected.critical].tolist())) == 1


def test_all_takes_every_state_with_equal_weight_and_no_filter() -> None:
    states = score(bank(5), RiskConfig())
    selected = select(states, SelectConfig(rule="all", budget=2, per_prompt=1))
    assert selected.critical.all()
    np.testing.assert_allclose(selected.weight, 1 / len(states), rtol=1e-6)


def test_equal_ranks_go_to_the_earlier_prompt_then_the_earlier_token() -> None:
    states = bank(6, prompts=4)
    states = states.with_columns(kind=np.full(len(states), MISMATCH, np.int8), risk=np.ones(len(states), np.float32))
    shuffled = states.take(np.random.default_rng(0).permutation(len(states)))
    for bank_order in (states, shuffled):
        selected = select(bank_order, SelectConfig(budget=7))
        assert chosen_places(selected) == {place(states, row) for row in range(7)}


def test_random_depends_on_the_seed_and_takes_candidates_only() -> None:
    states = score(bank(7, prompts=20), RiskConfig())
    cfg = SelectConfig(rule="random", budget=10)
    draws = [chosen_places(select(states, cfg, seed=seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    candidates = {place(states, row) for row in np.flatnonzero(states.candidates)}
    assert draws[0] | draws[2] <= candidates


@pytest.mark.parametrize("rule", ["risk", "mismatch_near_miss"])
def test_kl_replaces_js_in_the_ranking(rule: str) -> None:
    cfg = RiskConfig(divergence="kl", divergence_weight=3)
    states = score(bank(8, prompts=20), cfg)
    selected = select(states, SelectConfig(rule=rule, budget=10), risk=cfg)  # type: ignore[arg-type]
    rank = states.risk if rule == "risk" else states.erosion + np.float32(3) * states.kl
    ranking = {place(states, row): float(rank[row]) for row in np.flatnonzero(states.candidates)}
    assert chosen_places(selected) == set(oracles.eq10_critical(ranking, 10))
    assert chosen_places(selected) != chosen_places(
        select(score(states, RiskConfig(divergence_weight=3)), SelectConfig(rule=rule, budget=10))  # type: ignore[arg-type]
    )


def test_a_budget_larger_than_the_candidate_set_takes_them_all() -> None:
    states = score(bank(9), RiskConfig())
    selected = select(states, SelectConfig(budget=10_000))
    assert np.array_equal(selected.critical, states.candidates)
    check_weights(selected)


@pytest.mark.parametrize("rule", ["risk", "mismatch", "mismatch_near_miss", "consequence", "random"])
@pytest.mark.parametrize("per_prompt", [None, 2])
def test_no_candidates_leave_an_empty_critical_set(rule: str, per_prompt: int | None) -> None:
    states = bank(10)
    states = score(states.with_columns(kind=np.full(len(states), AGREE, np.int8)), RiskConfig())
    selected = select(states, SelectConfig(rule=rule, per_prompt=per_prompt))  # type: ignore[arg-type]
    assert not selected.critical.any()
    assert not selected.weight.any()


def test_mismatch_without_mismatches_is_empty_although_there_are_near_misses() -> None:
    states = bank(11)
    kind = np.where(states.kind == MISMATCH, NEAR_MISS, states.kind).astype(np.int8)
    selected = select(score(states.with_columns(kind=kind), RiskConfig()), SelectConfig(rule="mismatch"))
    assert not selected.critical.any()


def test_zero_total_risk_gives_uniform_weights() -> None:
    cfg = RiskConfig(erosion_weight=0, divergence_weight=0)
    states = score(bank(12), cfg)
    assert not states.risk.any()
    selected = select(states, SelectConfig(budget=5))
    assert selected.critical.sum() == 5
    np.testing.assert_allclose(selected.weight[selected.critical], 0.2, rtol=1e-6)


def test_tiny_risks_are_still_normalized() -> None:
    states = score(bank(13), RiskConfig())
    states = states.with_columns(risk=states.risk * np.float32(1e-38))
    check_weights(select(states, SelectConfig(budget=5)))
