"""Every analysis on a bank whose answer is known by hand."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from made_by_hand import column, describe, make_bank, make_states, say

from onptq.bank import States
from onptq.evaluate.critical import Margins
from onptq.evaluate.statistics import Interval, Resampler
from onptq.registry import SELECTION_RULES
from onptq.reproduce import motivation, risk_properties, selection_value, signals, theory
from onptq.reproduce.flip_rate import change, flips
from onptq.reproduce.probes import Actions, first_difference, said_of

TWO = [0] * 5 + [1] * 5


def values(intervals: dict[str, Interval]) -> list[float | None]:
    return [interval.value for interval in intervals.values()]


# --- Figure 3 ---------------------------------------------------------------------------------------------------------


def test_mismatches_of_high_consequence_are_counted_and_compared_with_all_states() -> None:
    """Ten states with valid branches: four mismatches, and of the two most consequential states one is among them."""
    states = make_states([*TWO, 1], "xx...xx...x")
    bank = make_bank(states, far=[9, 1, 8, 0, 0, 1, 1, 2, 0, 0, 99], valid=[*[True] * 10, False])
    found = risk_properties.mismatches(bank)
    assert found.states == 10
    assert (found.mismatch.value, found.high.value, found.joint.value) == pytest.approx((0.4, 0.2, 0.1))
    assert found.high_of_mismatch.value == pytest.approx(0.25)
    assert found.lift.value == pytest.approx(1.25)


def test_states_without_consequence_are_not_high_where_most_have_none() -> None:
    bank = make_bank(make_states(TWO, "x" * 10), far=[0.0] * 9 + [1.0])
    assert bank.high.tolist() == [False] * 9 + [True]
    assert bank.joint.sum() == 1


def test_risk_is_concentrated_where_one_state_holds_most_of_it() -> None:
    bank = make_bank(make_states(TWO, "x" * 10, risk=[55, *[5] * 9]), far=[1.0] * 10)  # 100 in all
    found = risk_properties.concentration(bank)
    assert [found.mass[top].value for top in risk_properties.TOPS] == pytest.approx([0.55, 0.55, 0.55, 0.6])
    assert [found.states[mass].value for mass in risk_properties.MASSES] == pytest.approx([0.1, 0.6])


def test_selected_states_are_found_again_by_prefix_or_by_timestep() -> None:
    """Prompt 0 says the same up to its third token; prompt 1 another first token; prompt 2 is selected elsewhere."""
    before = make_states([0, 0, 1, 1, 2], "xxxxx", critical=[True, True, False, True, True])
    after = make_states([0, 0, 1, 1, 2, 2], "xxxxxx", critical=[True, True, False, True, False, True])
    update = (before, say((5, 6, 7), (5, 6), (1, 2))), (after, say((5, 6, 8), (9, 6), (1, 2)))
    found = risk_properties.migration([update])
    assert found.selected == 4
    assert found.exact.value == pytest.approx(2 / 4)  # both of prompt 0
    assert found.timestep.value == pytest.approx(3 / 4)  # and prompt 1's second token
    nothing = update[0], (after.with_columns(critical=np.zeros(6, np.bool_)), update[1][1])
    seeds = risk_properties.migration([update, nothing])
    assert seeds.selected == 8
    assert (seeds.exact.value, seeds.timestep.value) == pytest.approx((2 / 8, 3 / 8))


# --- Table 10 ---------------------------------------------------------------------------------------------------------


def test_signals_tell_mismatches_by_auroc_and_the_future_by_rank_correlation() -> None:
    """JS is larger at every mismatch; erosion at none; the consequence has the order of the future, hidden error its reverse."""
    states = make_states(
        [0, 0, 1, 1, 1],
        "xx..x",
        js=[0.5, 0.4, 0.1, 0.2, 0.6],
        erosion=[1, 2, 5, 4, 3],
        consequence=[1, 2, 3, 4, 0],
        risk=[1, 1, 1, 1, 1],
    )
    bank = make_bank(states, far=[10, 20, 30, 40, 0], valid=[True, True, True, True, False])
    found = signals.signals(bank, hidden=column(4, 3, 2, 1, 99))
    assert found.states == 4
    assert values(dict(found.auroc)) == pytest.approx([1.0, 1.0, 0.0, 0.0, 0.5])
    assert values(dict(found.spearman))[:4] == pytest.approx([-1.0, -0.8, 0.8, 1.0])
    assert found.spearman["risk"].value is None  # ranks that are all equal have no correlation
    assert found.auroc_lead.value == pytest.approx(0.0)
    assert found.spearman_lead.value == pytest.approx(1.0 - 0.8)


# --- Tables 3 and 9 ---------------------------------------------------------------------------------------------------


def test_the_pool_has_the_most_eroded_state_of_either_kind_of_every_prompt() -> None:
    states = make_states([0, 0, 0, 0, 1, 1, 2], "xxn.nn.", erosion=[1, 3, 2, 0, 1, 4, 0])
    assert np.flatnonzero(selection_value.pool(states)).tolist() == [1, 2, 5]


def chosen(rule: str, states: States, seed: int = 0) -> list[int]:
    from onptq.cycle.risk import select
    from onptq.recipe import SelectConfig

    with SELECTION_RULES.lending(selection_value.POOLED):
        cfg = SelectConfig(rule=f"pool: {rule}", per_prompt=1, weights="uniform")
        found = select(states, cfg, seed=seed)
    assert not [name for name in SELECTION_RULES if name.startswith("pool")], "no name is left behind"
    assert set(found.weight[found.critical].tolist()) == {1 / found.critical.sum()}
    return np.flatnonzero(found.critical).tolist()


def test_every_rule_takes_one_of_a_prompts_two_states() -> None:
    """A mismatch and a near miss of each of two prompts, and what makes each rule choose between them."""
    states = make_states(
        [0, 0, 1, 1],
        "xnxn",
        erosion=[1.0, 2.0, 3.0, 1.0],
        js=[0.5, 0.0, 0.0, 0.5],
        consequence=[0.1, 0.2, 0.1, 0.3],
        risk=[4.0, 3.0, 1.0, 2.0],
    )
    assert chosen("mismatch only", states) == [0, 2]
    assert chosen("mismatch + near miss", states) == [1, 2]
    assert chosen("consequence only", states) == [1, 3]
    assert chosen("onptq", states) == [0, 3]
    assert {tuple(chosen("random", states, seed)) for seed in range(40)} == {(0, 2), (0, 3), (1, 2), (1, 3)}


def test_a_prompt_without_a_mismatch_contributes_its_near_miss() -> None:
    assert chosen("mismatch only", make_states([0, 0, 1], "xnn", erosion=[1, 2, 1])) == [0, 2]


def test_erosion_and_flips_are_means_over_each_subset_and_compared_pair_by_pair() -> None:
    """Five states, of which the first is joint-critical; the last has no valid branch and counts nowhere."""
    states = make_states([0, 0, 1, 1, 1], "xx..x", margin_dense=[2.0, 1.0, 3.0, 1.0, 9.0])
    bank = make_bank(states, far=[9, 1, 2, 1, 99], valid=[True, True, True, True, False])
    quant = {"Dense-InitQ": [-1.0, -0.5, 3.5, 0.5, -9.0], "onptq": [1.0, -0.5, 3.0, -0.25, -9.0]}
    margins = {
        rule: [Margins(states.prompt, states.t, states.margin_dense, np.array(of, np.float32), states.critical)]
        for rule, of in quant.items()
    }
    found = selection_value.selection(bank, margins)
    assert found.states == {"all": 4, "mismatch": 2, "joint-critical": 1}
    assert values(dict(found.erosion["Dense-InitQ"])) == pytest.approx([(3 + 1.5 + 0 + 0.5) / 4, 2.25, 3.0])
    assert values(dict(found.erosion["onptq"])) == pytest.approx([(1 + 1.5 + 0 + 1.25) / 4, 1.25, 1.0])
    assert values(dict(found.flips["Dense-InitQ"])) == pytest.approx([50, 100, 100])
    assert values(dict(found.flips["onptq"])) == pytest.approx([50, 50, 0])
    assert values(dict(found.erosion_change["Dense-InitQ"])) == pytest.approx([-0.3125, -1.0, -2.0])
    assert values(dict(found.flips_change["Dense-InitQ"])) == pytest.approx([0, -50, -100])


# --- Figure 1 ---------------------------------------------------------------------------------------------------------


def test_amplification_is_the_divergence_behind_forks_over_that_at_the_same_states() -> None:
    states = make_states([0, 0, 1], "...", js=[0.1, 0.3, 0.2])
    loop = {
        "prompt": np.array([0, 0, 1, 1]),
        "t": np.array([1, 2, 1, 2]),
        "js": column(0.1, 0.7, 0.2, 0.5),
        "behind": np.array([False, True, False, True]),
    }
    found = motivation.amplification(states, loop)
    assert (found.same.value, found.behind.value) == pytest.approx((0.2, 0.6))
    assert found.ratio.value == pytest.approx(3.0)


def test_coverage_is_a_change_in_percent_of_static_calibration() -> None:
    change = motivation._relative(Interval(-0.2, -0.3, -0.1), Interval(0.5))
    assert (change.value, change.low, change.high) == pytest.approx((-40, -60, -20))


def test_closed_loop_divergence_is_over_all_common_tokens_or_those_behind_the_fork() -> None:
    loop = {"prompt": np.array([0, 0, 2]), "js": column(0.2, 0.4, 0.9), "behind": np.array([False, True, True])}
    over = [
        Resampler().estimate(motivation.loop_measure(loop, range(3), only_behind=only)).value for only in (False, True)
    ]
    assert over == pytest.approx([0.5, 0.65])


def test_closed_loop_divergence_of_several_seeds_is_their_mean() -> None:
    loops = [
        {"prompt": np.array([0, 1]), "js": column(*js), "behind": np.array([True, True])}
        for js in ((0.2, 0.4), (0.6, 1.0))
    ]
    assert Resampler().estimate(motivation.over_seeds(loops, range(2))).value == pytest.approx((0.3 + 0.8) / 2)
    assert Resampler().estimate(motivation.over_seeds(loops[:1], range(2))).value == pytest.approx(0.3)


def test_local_divergence_is_correlated_over_candidates_with_valid_branches() -> None:
    states = make_states(
        [0, 0, 0, 1, 1, 1, 1],
        "xnx.nxx",
        js=[0.1, 0.2, 0.3, 9.0, 0.4, 0.5, 9.0],
        consequence=[1, 2, 3, 0, 5, 4, 0],
    )
    bank = make_bank(states, far=[1.0] * 7, valid=[True] * 6 + [False])
    found = motivation.correlation(bank)
    assert found.states == 5
    assert (found.pearson.value, found.spearman.value) == pytest.approx((0.9, 0.9), abs=1e-6)
    assert found.overlap.value == 0  # of the largest fifth, which is one state


def test_responses_differ_first_where_one_of_their_tokens_does() -> None:
    assert first_difference((1, 2, 3), (1, 5, 3)) == 2
    assert first_difference((1, 2, 3), (1, 2)) == 3
    assert first_difference((4,), (1,)) == 1


# --- Theorem 1 --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def actions() -> Actions:
    random = np.random.default_rng(0)
    dense, quant = (random.dirichlet(np.ones(6), size=8)[:, :4] for _ in range(2))
    return Actions(dense, quant, random.random((8, 4)), random.random(8))


def margins_of(actions: Actions) -> np.ndarray:
    return np.log(actions.dense[:, 0] / actions.dense[:, 1])


def test_the_bound_and_the_pair_identity_are_those_of_the_oracles(actions: Actions) -> None:
    states = make_states([0] * 4 + [1] * 4, "x" * 8, margin_dense=margins_of(actions).tolist())
    found = theory.theory(make_bank(states, far=[1.0] * 8), actions)
    ratios = []
    for p, q, value in zip(actions.dense, actions.quant, actions.value, strict=True):
        p, q = p / p.sum(), q / q.sum()
        deviation = abs(oracles.eq20_return(q, value) - oracles.eq20_return(p, value))
        ratios.append(deviation / oracles.eq21_bound(p, q, value))
        returns = [oracles.eq29_pair_return(policy, value, 0, 1) for policy in (p, q)]
        assert abs(returns[1] - returns[0]) == pytest.approx(oracles.eq30_pair_deviation(p, q, value, 0, 1))
        assert oracles.eq31_log_odds(p, 0, 1) == pytest.approx(math.log(p[0] / p[1]))
    assert (found.states, found.violations) == (8, 0)
    assert found.tightness.value == pytest.approx(np.mean(ratios))
    assert found.largest == pytest.approx(max(ratios))
    assert found.identity < theory.EXACT
    assert found.log_odds < 1e-6
    both = (actions.dense.sum(1) + actions.quant.sum(1)) / 2
    assert found.covered.value == pytest.approx(both.mean())


def test_on_two_actions_the_bound_is_met() -> None:
    """All else has no probability: then deviation and bound are the same (Eq. 30)."""
    two = Actions(column(0.9, 0.1, 0, 0)[None], column(0.4, 0.6, 0, 0)[None], column(1, 0, 0.5, 0.5)[None], column(0.5))
    found = theory.theory(make_bank(make_states([0], "x", margin_dense=[math.log(9)]), far=[1.0]), two)
    assert found.largest == pytest.approx(1.0)
    assert found.violations == 0


def test_margins_that_are_no_log_odds_are_told(actions: Actions) -> None:
    states = make_states([0] * 8, "x" * 8, margin_dense=(margins_of(actions) + 0.5).tolist())
    assert theory.theory(make_bank(states, far=[1.0] * 8), actions).log_odds == pytest.approx(0.5, abs=1e-6)


def test_proxies_track_the_factors_where_their_orders_agree(actions: Actions) -> None:
    span = np.ptp(actions.value, axis=1)
    states = make_states(
        [0] * 4 + [1] * 4,
        "x" * 8,
        margin_dense=margins_of(actions).tolist(),
        erosion=actions.tv.tolist(),
        js=(-actions.tv).tolist(),
        consequence=(2 * span).tolist(),
    )
    tracked = theory.theory(make_bank(states, far=[1.0] * 8), actions).tracked
    assert tracked["Erosion, TV"].value == pytest.approx(1)
    assert tracked["JS, TV"].value == pytest.approx(-1)
    assert tracked["Consequence, span"].value == pytest.approx(1)
    mixed = make_states([0, 0, 0, 0, 1, 1, 1, 1], "xx..xxx.", erosion=[*actions.tv[:2], 9, 9, *actions.tv[4:7], 9])
    assert theory.theory(make_bank(mixed, far=[1.0] * 8), actions).tracked[
        "Erosion, TV, of candidates alone"
    ].value == pytest.approx(1)


def test_the_utility_is_the_share_of_the_dense_future_that_is_said() -> None:
    end = frozenset({0})
    assert said_of([1, 2, 2, 3], [2, 3, 4, 4], end) == 0.5
    assert said_of([1, 2, 0, 5], [2, 1, 0, 7], end) == 1.0  # nothing counts behind the end
    assert said_of([1, 2], [3, 4], end) == 0.0


# --- Figure 4 ---------------------------------------------------------------------------------------------------------


def test_flips_are_told_apart_by_their_direction() -> None:
    dense, first = np.array([1, 1, 1, 0, 0], np.bool_), np.array([1, 0, 0, 1, 0], np.bool_)
    second = np.array([1, 1, 0, 0, 0], np.bool_)
    found = flips(dense, first, Resampler())
    assert (found.items, found.both.value, found.lost.value, found.gained.value) == (5, 60, 40, 20)
    assert change(dense, first, second, Resampler()).value == pytest.approx(-40)


# --- pages ------------------------------------------------------------------------------------------------------------


def test_pages_of_the_analyses_have_a_verdict_for_every_claim() -> None:
    states = make_states(
        TWO, "xn..xxn.nx", risk=range(10), consequence=range(10), erosion=range(10), critical=[True] * 10
    )
    bank, rollouts = make_bank(states, far=list(range(10))), say(range(5), range(5))
    page = risk_properties.result(
        risk_properties.mismatches(bank),
        risk_properties.concentration(bank),
        risk_properties.migration([((states, rollouts), (states, rollouts))]),
        describe(),
    )
    assert [claim.verdict for claim in page.claims][-1] == "open"  # all are selected again, in every resample
    again = {row[0]: row[2] for row in page.tables[0].rows}["selected again, exact prefix, %"]
    assert again == "100.0% [100.0, 100.0]"
    page = signals.result(signals.signals(bank, column(*range(10))), describe())
    assert {claim.verdict for claim in page.claims} <= {"holds", "does not hold", "open"}
