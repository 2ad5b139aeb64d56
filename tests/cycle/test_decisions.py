"""Compare and Branch: Eqs. 3-8 on given logits and tokens, and on real policies."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from conftest import Tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracles import LN2

from onptq.bank import AGREE, MISMATCH, NEAR_MISS, States, Trajectory
from onptq.cycle.branch import branch, common_horizon
from onptq.cycle.compare import compare, decide, pair_margin
from onptq.cycle.divergence import js_divergence, kl_divergence
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta

VOCABULARY = 7
reals = st.floats(-30, 30, width=32)
coarse = st.integers(-2, 2).map(float)  # few distinct values, so that ties are the rule


def logits(values: st.SearchStrategy[float] = reals | coarse) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float64, (3, VOCABULARY), elements=values)


quickly = settings(max_examples=60, deadline=None)


@quickly
@given(dense=logits(), quant=logits())
def test_decisions_match_equations_3_to_7(dense: np.ndarray, quant: np.ndarray) -> None:
    found = decide(torch.from_numpy(dense), torch.from_numpy(quant))
    for row, (d, q) in enumerate(zip(dense, quant, strict=True)):
        reference, quantized = oracles.eq3_actions(d, q)
        competitor = oracles.eq4_competitor(q, reference)
        margins = [oracles.eq5_margin(z, reference, competitor) for z in (d, q)]
        actions = (found.reference[row], found.quantized[row], found.competitor[row])
        assert tuple(map(int, actions)) == (reference, quantized, competitor)
        assert found.margin_dense[row] == margins[0]
        assert found.margin_quant[row] == margins[1]
        assert found.erosion[row] == oracles.eq6_erosion(*margins)
        assert float(found.js[row]) == pytest.approx(oracles.eq7_same_state(d, q), abs=1e-12)
        assert float(found.kl[row]) == pytest.approx(oracles.eq17_response(d, q), rel=1e-9, abs=1e-12)


@quickly
@given(dense=logits(), quant=logits())
def test_float32_decisions_match_the_oracle_on_the_same_numbers(dense: np.ndarray, quant: np.ndarray) -> None:
    """What the library runs in: no argmax may differ, divergences agree to fp32 rounding."""
    found = decide(torch.from_numpy(dense).float(), torch.from_numpy(quant).float())
    for row, (d, q) in enumerate(zip(dense, quant, strict=True)):
        reference, quantized = oracles.eq3_actions(d, q)
        assert (int(found.reference[row]), int(found.quantized[row])) == (reference, quantized)
        assert found.competitor[row] == oracles.eq4_competitor(q, reference)
        assert float(found.js[row]) == pytest.approx(oracles.eq7_same_state(d, q), abs=2e-6)
        assert float(found.kl[row]) == pytest.approx(oracles.eq17_response(d, q), rel=1e-5, abs=1e-5)


def test_ties_go_to_the_lowest_id() -> None:
    dense = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    quant = torch.tensor([[2.0, 0.0, 2.0, 2.0]])
    found = decide(dense, quant)
    assert (int(found.reference), int(found.quantized), int(found.competitor)) == (1, 0, 0)
    found = decide(quant, quant)
    assert (int(found.reference), int(found.competitor)) == (0, 2)


@quickly
@given(dense=logits(coarse), quant=logits(coarse))
def test_erosion_is_never_negative_and_every_mismatch_has_some(dense: np.ndarray, quant: np.ndarray) -> None:
    found = decide(torch.from_numpy(dense), torch.from_numpy(quant))
    mismatch = found.quantized != found.reference
    assert (found.erosion >= 0).all()
    assert (found.competitor != found.reference).all()
    assert (found.erosion[mismatch] > 0).all()
    assert (found.competitor[mismatch] == found.quantized[mismatch]).all()
    assert (found.margin_dense >= 0).all()
    assert (found.margin_quant[mismatch] <= 0).all()
    assert (found.margin_quant[~mismatch] >= 0).all()


@quickly
@given(p=logits(), q=logits(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_js_is_a_symmetric_divergence_between_0_and_ln_2(p: np.ndarray, q: np.ndarray, dtype: torch.dtype) -> None:
    a, b = torch.from_numpy(p).to(dtype), torch.from_numpy(q).to(dtype)
    rounding = 2e-6 if dtype == torch.float32 else 1e-14
    forth, back = js_divergence(a, b), js_divergence(b, a)
    assert ((forth >= 0) & (forth <= torch.tensor(LN2, dtype=dtype))).all()
    torch.testing.assert_close(forth, back, rtol=0, atol=rounding)
    for row in range(len(p)):  # zero iff equal, with a rate: TV^2 / 2 <= JS <= TV ln 2
        distance = oracles.total_variation(oracles.softmax(p[row]), oracles.softmax(q[row]))
        assert distance**2 / 2 - rounding <= float(forth[row]) <= distance * LN2 + rounding


@quickly
@given(p=logits(), shift=st.floats(-5, 5))
def test_divergences_vanish_where_the_distributions_are_the_same(p: np.ndarray, shift: float) -> None:
    z = torch.from_numpy(p)
    for divergence in (js_divergence, kl_divergence):
        assert divergence(z, z.clone()).max() <= 1e-15
        assert divergence(z, z + shift).max() <= 1e-13


@quickly
@given(p=logits(), q=logits())
def test_kl_is_not_negative_and_obeys_pinsker(p: np.ndarray, q: np.ndarray) -> None:
    found = kl_divergence(torch.from_numpy(p), torch.from_numpy(q))
    for row in range(len(p)):
        distance = oracles.total_variation(oracles.softmax(p[row]), oracles.softmax(q[row]))
        assert float(found[row]) >= max(0.0, 2 * distance**2 - 1e-12)


def test_rounding_never_makes_a_divergence_negative() -> None:
    """In float32, the sum of two nearly equal distributions' terms is as often below zero as above."""
    p = torch.randn(200, 500, generator=torch.Generator().manual_seed(0))
    q = p + 1e-5 * torch.randn(200, 500, generator=torch.Generator().manual_seed(1))
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    assert ((log_p.exp() * (log_p - log_q)).sum(-1) < 0).any(), "the case occurs"
    assert (kl_divergence(p, q) >= 0).all()
    assert (js_divergence(p, q) >= 0).all()


def test_disjoint_distributions_reach_the_largest_js() -> None:
    p, q = torch.tensor([[500.0, 0.0, -500.0]]), torch.tensor([[-500.0, 0.0, 500.0]])
    assert float(js_divergence(p, q)) == pytest.approx(LN2, abs=1e-7)
    assert float(kl_divergence(p, q)) == pytest.approx(1000, rel=1e-6)


def test_pair_margin_reads_the_two_given_tokens() -> None:
    z = torch.tensor([[1.0, 4.0, 9.0], [2.0, 3.0, 5.0]])
    margin = pair_margin(z, torch.tensor([0, 2]), torch.tensor([2, 1]))
    assert margin.tolist() == [-8.0, 2.0]


# Eq. 8: the common valid horizon

EOS = frozenset({0, 5})
branch_tokens = st.integers(1, 5).flatmap(
    lambda horizon: arrays(np.int64, (2, horizon, 6), elements=st.integers(0, 9))  # [B, H, N]
)


@quickly
@given(tokens=branch_tokens, eos=st.sampled_from([EOS, frozenset({3}), frozenset()]))
def test_common_horizon_matches_the_oracle(tokens: np.ndarray, eos: frozenset[int]) -> None:
    found = common_horizon(torch.from_numpy(tokens), eos)
    assert found.shape == (2, 3)
    for row in range(2):
        for fork in range(3):
            reference, competitor = tokens[row, :, fork].tolist(), tokens[row, :, fork + 3].tolist()
            assert int(found[row, fork]) == oracles.common_horizon(reference, competitor, eos)


def horizon_of(reference: list[int], competitor: list[int]) -> int:
    return int(common_horizon(torch.tensor([[list(pair) for pair in zip(reference, competitor, strict=True)]]), EOS))


def test_branches_that_never_end_are_compared_at_every_offset() -> None:
    assert horizon_of([1, 2, 3, 4], [4, 3, 2, 1]) == 4


def test_a_forced_end_leaves_nothing_to_compare() -> None:
    assert horizon_of([5, 1, 1, 1], [2, 1, 1, 1]) == 0
    assert horizon_of([2, 1, 1, 1], [0, 1, 1, 1]) == 0


def test_the_state_that_predicts_the_end_is_valid_and_those_behind_it_are_not() -> None:
    # the end is the branch's third token: s_{t+1}, s_{t+2} lie before it, and s_{t+2} is where it is predicted
    assert horizon_of([1, 2, 5, 3], [1, 2, 3, 4]) == 2


def test_the_shorter_branch_sets_the_horizon() -> None:
    assert horizon_of([1, 2, 3, 5], [1, 5, 3, 4]) == 1


def test_an_end_as_the_last_token_costs_only_the_last_state() -> None:
    assert horizon_of([1, 2, 3, 5], [1, 2, 3, 4]) == 3


# On policies: the plain model, one prompt at a time, float64, weights only: a token's largest negative activation lies on a
# rounding tie, so that two summation orders may round it differently in any precision


class Rollout:
    """A float64 policy with RTN weights, its prompts and rollouts, and the plain model's view of them."""

    def __init__(self, tiny: Tiny, scheme: str, count: int, max_tokens: int, eos: frozenset[int] | None = None) -> None:
        self.policy: Policy = tiny.policy(scheme, torch.float64)
        if eos is not None:
            self.policy.eos = eos
        self.prompts = tiny.encode(self.policy, count)
        self.inputs = [tiny.inputs(ordinal).tensors for ordinal in range(count)]
        self.policy.freeze(Theta.rtn(self.policy.structure.blocks, self.policy.scheme))
        self.prefixes = Prefixes(self.policy, self.prompts, max_tokens=max_tokens, batch_tokens=400)
        self.trajectories: list[Trajectory] = follow(self.prefixes)

    def logits(self, side: str, prompt: int, response: list[int] | tuple[int, ...]) -> np.ndarray:
        """z at the states of the response, [len(response) + 1, V]."""
        blocks = [block.module for block in self.policy.structure.blocks]
        with self.policy.speaking(side):  # type: ignore[arg-type]
            _, out = oracles.plain_forward(self.policy.model, blocks, self.inputs[prompt], response)
        return out[-len(response) - 1 :]


@pytest.fixture(scope="module")
def rollout(tiny: Callable[[str], Tiny]) -> Rollout:
    return Rollout(tiny("qwen2.5-vl"), "W4A16", count=2, max_tokens=10)


def test_compare_reports_what_the_plain_model_says_at_every_state(rollout: Rollout) -> None:
    states = compare(rollout.prefixes, rollout.trajectories)
    expected = [(tr.prompt, t) for tr in rollout.trajectories for t in range(1, len(tr.tokens) + 1)]
    assert list(zip(states.prompt.tolist(), states.t.tolist(), strict=True)) == expected
    for trajectory in rollout.trajectories:
        dense, quant = (rollout.logits(side, trajectory.prompt, trajectory.tokens) for side in "DQ")
        for row in np.flatnonzero(states.prompt == trajectory.prompt):
            step = states.t[row] - 1
            reference, quantized = oracles.eq3_actions(dense[step], quant[step])
            competitor = oracles.eq4_competitor(quant[step], reference)
            assert (states.reference[row], states.quantized[row], states.competitor[row]) == (
                reference,
                quantized,
                competitor,
            )
            margins = [oracles.eq5_margin(z[step], reference, competitor) for z in (dense, quant)]
            np.testing.assert_allclose(
                (states.margin_dense[row], states.margin_quant[row]), margins, rtol=1e-9, atol=1e-9
            )
            assert states.erosion[row] == pytest.approx(oracles.eq6_erosion(*margins), abs=1e-9)
            assert states.js[row] == pytest.approx(oracles.eq7_same_state(dense[step], quant[step]), abs=1e-9)
            assert states.kl[row] == pytest.approx(oracles.eq17_response(dense[step], quant[step]), abs=1e-9)
            kind = MISMATCH if quantized != reference else NEAR_MISS if oracles.eq6_erosion(*margins) > 0 else AGREE
            assert states.kind[row] == kind
            assert states.token[row] == trajectory.tokens[step] == quantized
    assert set(states.kind.tolist()) == {AGREE, NEAR_MISS, MISMATCH}, "the states are of every kind"


def test_a_near_miss_within_the_tolerance_is_an_agreement(rollout: Rollout) -> None:
    states = compare(rollout.prefixes, rollout.trajectories)
    near = states.erosion[states.kind == NEAR_MISS]
    tolerance = float(np.median(near))
    tolerant = compare(rollout.prefixes, rollout.trajectories, near_miss_tol=tolerance)
    moved = states.kind != tolerant.kind
    assert 0 < moved.sum() < len(near)
    assert (states.kind[moved] == NEAR_MISS).all()
    assert (states.erosion[moved] <= tolerance).all()
    assert (tolerant.erosion[tolerant.kind == NEAR_MISS] > tolerance).all()


@pytest.fixture(scope="module")
def ending(tiny: Callable[[str], Tiny], rollout: Rollout) -> Rollout:
    """The same policy, whose ending tokens are ones that its rollouts and branches are known to write."""
    first = compare(rollout.prefixes, rollout.trajectories)
    candidates = first.candidates
    eos = {
        rollout.trajectories[0].tokens[4],
        int(first.competitor[candidates][1]),
        int(first.reference[candidates][-1]),
    }
    written = branch_continuations(rollout, first, horizon=2)
    eos |= {int(written[len(written) // 2][1])}
    return Rollout(tiny("qwen2.5-vl"), "W4A16", count=2, max_tokens=10, eos=frozenset(eos))


def continuation(rollout: Rollout, state: int | np.integer, states: States, forced: int, horizon: int) -> list[int]:
    """The forced token and horizon - 1 greedy tokens of Q, each from a fresh forward over the whole prefix."""
    prompt, t = int(states.prompt[state]), int(states.t[state])
    prefix = list(rollout.trajectories[prompt].tokens[: t - 1])
    tokens = [forced]
    while len(tokens) < horizon:
        tokens.append(oracles.first_argmax(rollout.logits("Q", prompt, prefix + tokens)[-1]))
    return tokens


def branch_continuations(rollout: Rollout, states: States, horizon: int) -> list[list[int]]:
    return [
        continuation(rollout, row, states, int(states.reference[row]), horizon)
        for row in np.flatnonzero(states.candidates)[:6]
    ]


def test_the_emission_of_the_end_is_the_last_state(ending: Rollout) -> None:
    eos = ending.policy.eos
    finished = [trajectory for trajectory in ending.trajectories if trajectory.finished]
    assert finished
    assert any(len(trajectory.tokens) < ending.prefixes.max_tokens for trajectory in finished)
    for trajectory in ending.trajectories:
        assert not eos & set(trajectory.tokens[:-1])
        assert trajectory.finished == (trajectory.tokens[-1] in eos)
    states = compare(ending.prefixes, ending.trajectories)
    for trajectory in finished:
        last = int(states.t[states.prompt == trajectory.prompt].max())
        assert last == len(trajectory.tokens)


def test_consequence_is_equation_8_over_the_common_valid_horizon(ending: Rollout) -> None:
    horizon, pair = 3, ("reference", "competitor")
    states = compare(ending.prefixes, ending.trajectories)
    branched = {
        divergence: branch(ending.prefixes, ending.trajectories, states, horizon=horizon, divergence=divergence)
        for divergence in ("js", "kl")
    }
    reached = set()
    for row in np.flatnonzero(states.candidates):
        prompt = int(states.prompt[row])
        prefix = list(ending.trajectories[prompt].tokens[: states.t[row] - 1])
        tokens = [continuation(ending, row, states, int(getattr(states, name)[row]), horizon) for name in pair]
        z = [ending.logits("D", prompt, prefix + branch_tokens)[-horizon:] for branch_tokens in tokens]
        reach = oracles.common_horizon(tokens[0], tokens[1], ending.policy.eos)
        for divergence, found in branched.items():
            assert found.horizon[row] == reach
            expected = oracles.eq8_consequence(z[0], z[1], reach, divergence)
            assert found.consequence[row] == pytest.approx(expected, rel=1e-6, abs=1e-6)
        reached.add(reach)
    assert {0, horizon} < reached, "some fork was forced to end, some went all the way, some ended between"
    left = ~states.candidates
    for found in branched.values():
        assert not found.consequence[left].any()
        assert not found.horizon[left].any()
        for name in ("erosion", "js", "kl", "kind", "margin_dense"):
            assert np.array_equal(getattr(found, name), getattr(states, name))


def test_a_forced_end_can_count_as_the_largest_consequence(ending: Rollout) -> None:
    states = compare(ending.prefixes, ending.trajectories)
    plain = branch(ending.prefixes, ending.trajectories, states, horizon=3)
    largest = branch(ending.prefixes, ending.trajectories, states, horizon=3, eos_as_max=True)
    forced = states.candidates & (plain.horizon == 0)
    assert forced.any()
    assert not plain.consequence[forced].any()
    np.testing.assert_allclose(largest.consequence[forced], math.log(2), rtol=1e-6)
    assert np.array_equal(largest.consequence[~forced], plain.consequence[~forced])
