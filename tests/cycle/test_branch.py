"""Branch: a tree of branches on a cached prefix is what prefilling every branch again would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from conftest import MULTIMODAL, Tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import (
    WEIGHT_ONLY,
    WITH_ACTIVATIONS,
    Scene,
    decoder_forwards,
    deployed_rounding,
    scene,
    scenes,
    without_ties,
)

from onptq.bank import AGREE, States
from onptq.cycle import branch as branching
from onptq.cycle import compare as comparison
from onptq.cycle.branch import Forest, branch, continuations
from onptq.cycle.compare import compare, padded_responses
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.models.encoding import EncodedPrompt, PromptBatch

LENGTHS = (3, 2, 1, 3, 2)
HORIZON = 4


@pytest.fixture(autouse=True)
def _without_ties() -> Iterator[None]:
    with without_ties():
        yield


class Planted:
    """A scene's trajectories, compared and ready to be branched."""

    def __init__(
        self, scenery: Scene, *, eos: Collection[int] = (), batches: str = "several", budget: int | None = None
    ) -> None:
        self.scenery, self.eos = scenery, eos
        self.policy = scenery.policy_with(eos) if eos else scenery.policy
        lengths = zip(scenery.ordinals, LENGTHS, strict=True)
        self.trajectories = [scenery.rollout(ordinal, length, eos) for ordinal, length in lengths]
        self.batches, self.budget = batches, budget
        self.prefixes = self.new_prefixes()
        self.states = compare(self.prefixes, self.trajectories)

    def new_prefixes(self) -> Prefixes:
        """As another process would make them: nothing cached yet."""
        return Prefixes(
            self.policy,
            self.scenery.encoded(self.policy),
            max_tokens=max(LENGTHS),
            batch_tokens=self.scenery.batch_tokens(self.batches, max(LENGTHS)),
            budget=self.budget,
        )

    @property
    def candidates(self) -> list[tuple[int, int, int]]:
        """Row, prompt and t of every candidate."""
        rows = np.flatnonzero(self.states.candidates)
        return [(int(row), int(self.states.prompt[row]), int(self.states.t[row])) for row in rows]

    def branch(self, **options: object) -> States:
        return branch(self.prefixes, self.trajectories, self.states, **options)  # type: ignore[arg-type]

    def check(self, horizon: int, divergence: str = "js") -> States:
        """Branch as the cycle does and hold every candidate against its naive fork."""
        found = self.branch(horizon=horizon, divergence=divergence)
        assert len(self.candidates) > 3
        for row, prompt, t in self.candidates:
            fork = self.scenery.fork(prompt, t, HORIZON)
            assert found.horizon[row] == fork.horizon(horizon, self.eos), (prompt, t)
            expected = fork.consequence(horizon, self.eos, divergence)
            assert found.consequence[row] == pytest.approx(expected, abs=1e-5), (prompt, t)
        others = found.kind == AGREE
        assert not found.horizon[others].any()
        assert not found.consequence[others].any()
        return found


def find_stops(planted: Planted) -> frozenset[int]:
    """Tokens which, if they ended responses, would end some branches with the forced token, some later and some never."""
    scenery = planted.scenery
    forks = {(prompt, t): scenery.fork(prompt, t, HORIZON) for _, prompt, t in planted.candidates}
    tokens = {token for fork in forks.values() for token in (*fork.reference, *fork.competitor)}
    tokens -= {trajectory.tokens[0] for trajectory in planted.trajectories}  # or nothing would be left to branch
    for eos in map(frozenset, combinations(sorted(tokens), 2)):
        lengths = zip(scenery.ordinals, LENGTHS, strict=True)
        visited = {ordinal: len(scenery.rollout(ordinal, length, eos).tokens) for ordinal, length in lengths}
        reach = [fork.horizon(HORIZON, eos) for (prompt, t), fork in forks.items() if t <= visited[prompt]]
        if {0, HORIZON} < set(reach) and len(reach) > 3:
            return eos
    raise AssertionError("no two tokens end branches early, at once and never")


# --- tree against naive -----------------------------------------------------------------------------------------------


@scenes(MULTIMODAL)
def test_the_tree_gives_the_consequence_of_naive_branches(
    tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype
) -> None:
    planted = Planted(scene(tiny(family), scheme, dtype))
    assert max(len(batch.prompts) for batch in planted.prefixes.batches) > 1
    for horizon in (1, 2, 4):
        found = planted.check(horizon)
    assert (found.consequence > 0.01).any()
    planted.check(HORIZON, divergence="kl")
    Planted(planted.scenery, batches="one").check(HORIZON)


@scenes(MULTIMODAL)
def test_the_tree_grows_the_tokens_of_naive_branches(
    tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype
) -> None:
    planted = Planted(scene(tiny(family), scheme, dtype))
    compared = 0
    for index, batch in enumerate(planted.prefixes.batches):
        mine = [[c for c in planted.candidates if c[1] == prompt.ordinal] for prompt in batch.prompts]
        if not any(mine):
            continue
        forest = Forest.of(batch, planted.states, [np.array([row for row, *_ in one], np.int64) for one in mine])
        response = padded_responses(batch, {one.prompt: one for one in planted.trajectories})
        tokens = continuations(
            planted.policy, batch, planted.prefixes.at_response(index, "Q", response), forest, HORIZON
        )
        reference, competitor = tokens.chunk(2, dim=2)  # [B, H, N / 2]
        for row, one in enumerate(mine):
            for place, (_, prompt, t) in enumerate(one):
                fork = planted.scenery.fork(prompt, t, HORIZON)
                assert tuple(reference[row, :, place].tolist()) == fork.reference, (prompt, t)
                assert tuple(competitor[row, :, place].tolist()) == fork.competitor, (prompt, t)
                compared += 1
    assert compared == len(planted.candidates)


@scenes(MULTIMODAL)
def test_branches_that_end_early_count_only_their_common_valid_states(
    tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype
) -> None:
    scenery = scene(tiny(family), scheme, dtype)
    planted = Planted(scenery, eos=find_stops(Planted(scenery)))
    found = planted.check(HORIZON)
    reach = found.horizon[found.candidates]
    assert {0, HORIZON} < set(reach.tolist())
    ended = found.candidates & (found.horizon == 0)
    assert not found.consequence[ended].any()
    planted.check(2)
    planted.check(HORIZON, divergence="kl")

    largest = planted.branch(horizon=HORIZON, eos_as_max=True)
    np.testing.assert_array_equal(largest.horizon, found.horizon)
    np.testing.assert_array_equal(largest.consequence[~ended], found.consequence[~ended])
    np.testing.assert_allclose(largest.consequence[ended], math.log(2), rtol=1e-6)


def test_where_every_token_ends_the_response_nothing_has_a_future(tiny: Callable[[str], Tiny]) -> None:
    scenery = scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY)
    planted = Planted(scenery, eos=range(scenery.policy.vocabulary))
    assert all(len(trajectory.tokens) == 1 and trajectory.finished for trajectory in planted.trajectories)
    found = planted.branch(horizon=HORIZON)
    assert found.candidates.any()
    assert not found.horizon.any()
    assert not found.consequence.any()


def test_branches_of_the_very_first_token_hang_on_the_prompt_alone(tiny: Callable[[str], Tiny]) -> None:
    """No response token is cached when all trajectories are one token long."""
    scenery = scene(tiny("qwen2.5-omni"), *WITH_ACTIVATIONS)
    trajectories = [scenery.rollout(ordinal, 1) for ordinal in scenery.ordinals]
    prefixes = Prefixes(scenery.policy, scenery.encoded(scenery.policy), max_tokens=1)
    found = branch(prefixes, trajectories, compare(prefixes, trajectories), horizon=2)
    assert found.candidates.any()
    for row in np.flatnonzero(found.candidates):
        fork = scenery.fork(int(found.prompt[row]), 1, 2)
        assert found.consequence[row] == pytest.approx(fork.consequence(2, ()), abs=1e-5)


# --- what may not change the result -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_forest_cut_into_small_pieces_gives_the_same_result(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    planted = Planted(scene(tiny("qwen3-vl"), *WITH_ACTIVATIONS), batches="one")
    whole = planted.branch(horizon=HORIZON)
    pieces: list[int] = []
    monkeypatch.setattr(branching, "TREE_TOKENS", tokens)
    cut = planted.branch(horizon=HORIZON, advance=pieces.append)
    assert len(pieces) > 1
    assert sum(pieces) == len(planted.candidates)
    np.testing.assert_array_equal(cut.horizon, whole.horizon)
    np.testing.assert_allclose(cut.consequence, whole.consequence, rtol=0, atol=1e-7)


def test_no_row_of_a_forest_is_longer_than_its_limit(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branch tokens of a row attend to one another, so a long row costs quadratically."""
    planted = Planted(scene(tiny("qwen3-vl"), *WITH_ACTIVATIONS), batches="one")
    whole, pairs = planted.branch(horizon=HORIZON), 2
    most = max(sum(prompt == one.prompt for _, prompt, _ in planted.candidates) for one in planted.trajectories)
    assert most > pairs
    monkeypatch.setattr(branching, "ROW_TOKENS", pairs * 2 * HORIZON)
    with decoder_forwards(planted.policy) as forwards:
        cut = planted.branch(horizon=HORIZON)
    assert max(width for _, width in forwards) == pairs * 2 * HORIZON
    np.testing.assert_array_equal(cut.horizon, whole.horizon)
    np.testing.assert_allclose(cut.consequence, whole.consequence, rtol=0, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_few_rows_of_logits_at_a_time_give_the_naive_branches(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Both of Q's continuations and of D's divergences go through the head in chunks."""
    planted = Planted(scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY))
    assert len(planted.candidates) > 2 * rows
    monkeypatch.setattr(comparison, "LOGIT_BYTES", 4 * 2 * rows * planted.policy.vocabulary)
    assert comparison.state_rows(planted.policy.vocabulary) == rows
    assert comparison.state_rows(planted.policy.vocabulary, models=1) == 2 * rows
    planted.check(HORIZON)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_states_are_bitwise_the_same_whether_prefixes_are_kept_or_computed_again(
    tiny: Callable[[str], Tiny], family: str
) -> None:
    """In float32 with the deployed activation steps, where the smallest difference would show."""
    scenery = scene(tiny(family), "W4A8", torch.float32)
    with deployed_rounding():
        kept, dropped = Planted(scenery), Planted(scenery, budget=0)
        expected = kept.branch(horizon=HORIZON)
        found = dropped.branch(horizon=HORIZON)
        resumed = branch(kept.new_prefixes(), kept.trajectories, kept.states, horizon=HORIZON)
        again = kept.branch(horizon=HORIZON)
    assert expected.consequence.any()
    for name in States.__dataclass_fields__:
        for other in (found, resumed, again):
            np.testing.assert_array_equal(getattr(other, name), getattr(expected, name), err_msg=name)


def test_what_else_the_prefixes_were_used_for_in_between_does_not_matter(tiny: Callable[[str], Tiny]) -> None:
    with deployed_rounding():
        planted = Planted(scene(tiny("qwen2.5-vl"), "W4A8", torch.float32))
        expected = planted.branch(horizon=HORIZON).consequence.tolist()
        others = [replace(one, tokens=tuple(token + 1 for token in one.tokens)) for one in planted.trajectories]
        compare(planted.prefixes, others)
        assert planted.branch(horizon=HORIZON).consequence.tolist() == expected
        follow(planted.prefixes)
        assert planted.branch(horizon=HORIZON).consequence.tolist() == expected


def test_columns_that_branch_does_not_own_are_passed_on(tiny: Callable[[str], Tiny]) -> None:
    planted = Planted(scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY))
    found = planted.branch(horizon=2)
    for name in States.__dataclass_fields__.keys() - {"horizon", "consequence"}:
        np.testing.assert_array_equal(getattr(found, name), getattr(planted.states, name), err_msg=name)
    assert found.horizon.dtype == planted.states.horizon.dtype
    assert found.consequence.dtype == planted.states.consequence.dtype


def test_without_candidates_nothing_runs(tiny: Callable[[str], Tiny]) -> None:
    planted = Planted(scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY))
    nobody = planted.states.with_columns(kind=np.full_like(planted.states.kind, AGREE))
    with decoder_forwards(planted.policy) as forwards:
        found = branch(planted.prefixes, planted.trajectories, nobody, horizon=HORIZON)
    assert forwards == []
    assert not found.consequence.any()


def test_nothing_is_prefilled_again(tiny: Callable[[str], Tiny]) -> None:
    """A forest of N branches costs H - 1 forwards of N tokens of Q and one of H N tokens of D."""
    planted = Planted(scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY), batches="one")
    widest = max(sum(prompt == ordinal for _, prompt, _ in planted.candidates) for ordinal in planted.scenery.ordinals)
    with decoder_forwards(planted.policy) as forwards:
        planted.branch(horizon=HORIZON)
    assert forwards == [("Q", 2 * widest)] * (HORIZON - 1) + [("D", HORIZON * 2 * widest)]


# --- who sees whom ------------------------------------------------------------------------------------------------------


@st.composite
def forests(draw: st.DrawFn) -> tuple[PromptBatch, Forest, int, int]:
    """A batch of prompts of any lengths, a forest on it, the number of cached response tokens, and a depth."""
    axes, cached = draw(st.sampled_from((1, 3))), draw(st.integers(0, 4))
    prompts = []
    for ordinal in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 4))
        positions = draw(
            st.lists(st.lists(st.integers(0, 9), min_size=length, max_size=length), min_size=axes, max_size=axes)
        )
        ids = torch.zeros(length, dtype=torch.long)
        prompts.append(EncodedPrompt(ordinal, ids, torch.zeros(length, 1), torch.tensor(positions), ids))
    branches = 2 * draw(st.integers(1, 3))
    row = st.lists(st.integers(1, cached + 1), min_size=branches, max_size=branches)
    state = torch.tensor(draw(st.lists(row, min_size=len(prompts), max_size=len(prompts))))
    forest = Forest(torch.zeros_like(state), state, torch.ones_like(state, dtype=torch.bool))
    return PromptBatch.of(prompts), forest, cached, draw(st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(forests(), st.data())
def test_a_branch_token_sees_its_prompt_its_prefix_and_its_own_branch(
    drawn: tuple[PromptBatch, Forest, int, int], data: st.DataObject
) -> None:
    batch, forest, cached, depth = drawn
    start = data.draw(st.integers(0, depth - 1))
    mask = forest.mask(batch, cached, start, depth)
    queries = [(level, own) for level in range(start, depth) for own in range(forest.branches)]
    keys: list[tuple[str, int, int | None]] = [("prompt", slot, None) for slot in range(batch.width)]
    keys += [("response", u, None) for u in range(1, cached + 1)]
    keys += [("branch", level, own) for level in range(depth) for own in range(forest.branches)]
    assert mask.shape == (len(batch.prompts), 1, len(queries), len(keys))
    for row, prompt in enumerate(batch.prompts):
        for query, (level, own) in enumerate(queries):
            t = int(forest.state[row, own])
            expected = []
            for kind, index, owner in keys:
                if kind == "prompt":
                    expected.append(index < prompt.length)
                elif kind == "response":
                    expected.append(index < t)
                else:
                    expected.append(owner == own and index <= level)
            assert mask[row, 0, query].tolist() == expected


@settings(max_examples=60, deadline=None)
@given(forests())
def test_a_branch_token_stands_where_a_response_token_in_its_place_would(
    drawn: tuple[PromptBatch, Forest, int, int],
) -> None:
    batch, forest, cached, depth = drawn
    positions = forest.positions(batch, depth)
    for row, prompt in enumerate(batch.prompts):
        ids = torch.zeros(cached + depth, dtype=torch.long)
        response = prompt.extended(ids, torch.zeros(len(ids), 1)).positions[:, prompt.length :]  # [A, cached + depth]
        expected = [response[:, int(t) - 1 + level] for level in range(depth) for t in forest.state[row]]
        assert torch.equal(positions[:, row], torch.stack(expected, dim=1))


def test_every_state_is_branched_where_it_is_asked_for(tiny: Callable[[str], Tiny]) -> None:
    planted = Planted(scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY))
    every = planted.branch(horizon=HORIZON, everywhere=True)
    agreed = np.flatnonzero(every.kind == AGREE)
    assert len(agreed)
    for row in agreed:
        prompt, t = int(every.prompt[row]), int(every.t[row])
        fork = planted.scenery.fork(prompt, t, HORIZON)
        assert every.horizon[row] == fork.horizon(HORIZON, planted.eos)
        assert every.consequence[row] == pytest.approx(fork.consequence(HORIZON, planted.eos, "js"), abs=1e-5)
    some = planted.branch(horizon=HORIZON)
    assert every.consequence[every.candidates] == pytest.approx(some.consequence[some.candidates], abs=1e-6)
    assert not some.horizon[agreed].any()


def test_the_forced_tokens_may_count_as_one_state_that_differs_wholly(tiny: Callable[[str], Tiny]) -> None:
    plain = Planted(scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY))
    planted = Planted(plain.scenery, eos=find_stops(plain))
    without, counted = (planted.branch(horizon=HORIZON, count_forced=forced) for forced in (False, True))
    rows = np.flatnonzero(without.candidates)
    assert (without.horizon[rows] == 0).any()
    expected = (without.consequence[rows] * without.horizon[rows] + math.log(2)) / (without.horizon[rows] + 1)
    np.testing.assert_allclose(counted.consequence[rows], expected, rtol=1e-6)
    assert np.array_equal(counted.horizon, without.horizon)


def test_the_dense_model_may_continue_both_tokens_itself(tiny: Callable[[str], Tiny]) -> None:
    """Only the states that are given are branched, and Q does not run at all."""
    planted = Planted(scene(tiny("qwen2.5-vl"), *WITH_ACTIVATIONS))
    rows = np.array([row for row, *_ in planted.candidates])[::2]
    some = planted.states.take(rows)
    with decoder_forwards(planted.policy) as forwards:
        found = branch(planted.new_prefixes(), planted.trajectories, some, horizon=HORIZON, side="D")
    assert {side for side, _ in forwards} == {"D"}
    by_q = planted.branch(horizon=HORIZON).take(rows)
    assert not np.array_equal(found.consequence, by_q.consequence), "the two continue differently"
    for row in range(len(found)):
        fork = planted.scenery.fork(int(found.prompt[row]), int(found.t[row]), HORIZON, "D")
        assert found.horizon[row] == fork.horizon(HORIZON, planted.eos)
        assert found.consequence[row] == pytest.approx(fork.consequence(HORIZON, planted.eos), abs=1e-5)
