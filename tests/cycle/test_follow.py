"""Follow: the cached, batched rollouts of Q are its naive greedy rollouts, token for token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from conftest import FAMILIES, MULTIMODAL, Tiny
from naive import WEIGHT_ONLY, Scene, decoder_forwards, scene, scenes, without_ties

from onptq.bank import Trajectory
from onptq.checkpoint.load import load_policy
from onptq.cycle.follow import follow
from onptq.engine import decoding
from onptq.engine.decoding import Decoding
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import END_CHECK_TOKENS
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta

LIMIT = 5


@pytest.fixture(autouse=True)
def _without_ties() -> Iterator[None]:
    with without_ties():
        yield


def naive_trajectories(scenery: Scene, limit: int, eos: frozenset[int] = frozenset()) -> list[Trajectory]:
    return [scenery.rollout(ordinal, limit, eos) for ordinal in scenery.ordinals]


def prefixes_of(scenery: Scene, policy: Policy, batches: str, limit: int = LIMIT) -> Prefixes:
    prefixes = Prefixes(
        policy, scenery.encoded(policy), max_tokens=limit, batch_tokens=scenery.batch_tokens(batches, limit)
    )
    sizes = [len(batch.prompts) for batch in prefixes.batches]
    assert sizes == [len(scenery.ordinals)] if batches == "one" else len(sizes) > 1 and max(sizes) > 1
    return prefixes


def find_stops(scenery: Scene) -> frozenset[int]:
    """Tokens that end one rollout at once, one on the way, and one with the last token it may write."""
    free = naive_trajectories(scenery, LIMIT)
    for first, between, last in permutations(free, 3):
        eos = frozenset({first.tokens[0], between.tokens[LIMIT // 2], last.tokens[-1]})
        cut = [trajectory for trajectory in naive_trajectories(scenery, LIMIT, eos) if trajectory.finished]
        if {1, LIMIT} < {len(trajectory.tokens) for trajectory in cut}:
            return eos
    raise AssertionError("the rollouts are too much alike to end differently")


@scenes((*MULTIMODAL, "llama"))
def test_rollouts_are_the_naive_ones(tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype) -> None:
    scenery = scene(tiny(family), scheme, dtype)
    expected = naive_trajectories(scenery, LIMIT)
    assert len({len(one.modality) for one in scenery.inputs.values()}) > 1
    for batches in ("several", "one"):
        assert follow(prefixes_of(scenery, scenery.policy, batches)) == expected


@scenes(MULTIMODAL)
def test_a_rollout_ends_with_its_end_of_sequence_token_and_the_others_go_on(
    tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype
) -> None:
    scenery = scene(tiny(family), scheme, dtype)
    eos = find_stops(scenery)
    expected = naive_trajectories(scenery, LIMIT, eos)
    policy = scenery.policy_with(eos)
    for batches in ("several", "one"):
        assert follow(prefixes_of(scenery, policy, batches)) == expected


def test_no_forward_runs_once_every_rollout_of_the_batch_has_ended(tiny: Callable[[str], Tiny]) -> None:
    scenery = scene(tiny("llama"), *WEIGHT_ONLY)
    eos = frozenset(scenery.rollout(ordinal, LIMIT).tokens[1] for ordinal in scenery.ordinals)
    expected = naive_trajectories(scenery, LIMIT, eos)
    policy = scenery.policy_with(eos)
    prefixes = prefixes_of(scenery, policy, "one")
    with decoder_forwards(policy) as forwards:
        assert follow(prefixes) == expected
    longest = max(len(trajectory.tokens) for trajectory in expected)
    assert longest <= 2
    assert len(forwards) == longest, "the prefill predicts token 1, and each token but the last is fed once"


@pytest.mark.parametrize("look", [2, 3, 8])
def test_rollouts_do_not_depend_on_how_often_their_end_is_looked_for(
    tiny: Callable[[str], Tiny], look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenery = scene(tiny("llama"), *WEIGHT_ONLY)
    eos = frozenset(scenery.rollout(ordinal, LIMIT).tokens[1] for ordinal in scenery.ordinals)
    monkeypatch.setitem(END_CHECK_TOKENS, "cpu", look)
    policy = scenery.policy_with(eos)
    with decoder_forwards(policy) as forwards:
        assert follow(prefixes_of(scenery, policy, "one")) == naive_trajectories(scenery, LIMIT, eos)
    assert len(forwards) == min(look, LIMIT), "every so many tokens, and at the limit"


@pytest.mark.parametrize("limit", [1, 2])
def test_the_shortest_rollouts_are_the_naive_ones(tiny: Callable[[str], Tiny], limit: int) -> None:
    scenery = scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY)
    found = follow(prefixes_of(scenery, scenery.policy, "one", limit))
    assert found == naive_trajectories(scenery, limit)


def test_following_again_on_the_same_prefixes_changes_nothing(tiny: Callable[[str], Tiny]) -> None:
    scenery = scene(tiny("qwen3-vl"), *WEIGHT_ONLY)
    prefixes = prefixes_of(scenery, scenery.policy, "several")
    assert follow(prefixes) == follow(prefixes)


def test_progress_counts_every_prompt(tiny: Callable[[str], Tiny]) -> None:
    scenery = scene(tiny("llama"), *WEIGHT_ONLY)
    done: list[int] = []
    prefixes = prefixes_of(scenery, scenery.policy, "several", limit=2)
    follow(prefixes, advance=done.append)
    assert len(done) == len(prefixes.batches) > 1
    assert sum(done) == len(scenery.ordinals)


def test_from_step_to_step_nothing_moves_in_memory(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a recorded step would write where nobody reads."""
    monkeypatch.setattr(decoding, "replays", lambda policy, limit: True)
    scenery = scene(tiny("llama"), *WEIGHT_ONLY)
    prefixes = prefixes_of(scenery, scenery.policy, "one", limit=6)
    with torch.no_grad(), scenery.policy.speaking("Q"):
        prefix = prefixes.prompt(0, "Q")
        steps = Decoding(scenery.policy, prefixes.batches[0], prefix, 6)

        def places() -> list[int]:
            state = [value for value in vars(steps).values() if isinstance(value, torch.Tensor)]
            return [tensor.data_ptr() for tensor in (*state, *prefix.cache.keys, *prefix.cache.values)]

        before = places()
        assert len(before) > 5
        for _ in range(5):
            steps.step()
        assert places() == before
    assert steps.written == 6


@scenes(MULTIMODAL)
def test_steps_that_read_all_slots_and_cannot_be_recorded_give_the_naive_rollouts(
    tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here there may be nothing to record with; where there is, the step asks for a number, which a recording cannot give."""
    scenery = scene(tiny(family), scheme, dtype)
    asked: list[int] = []
    plain = Decoding._step

    def asking(self: Decoding) -> None:
        asked.append(int(self.tokens[0, 0]))
        plain(self)

    monkeypatch.setattr(Decoding, "_step", asking)
    monkeypatch.setattr(decoding, "replays", lambda policy, limit: True)
    for batches in ("several", "one"):
        assert follow(prefixes_of(scenery, scenery.policy, batches)) == naive_trajectories(scenery, LIMIT)
    assert len(asked) >= LIMIT - 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_step_writes_what_a_plain_one_does(
    tiny: Callable[[str], Tiny], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(tiny(family).folder, "W4A8", device="cuda", dtype=torch.bfloat16)
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme, policy.device))
    encoded = tiny(family).encode(policy, 3)
    recordings: list[None] = []
    recorded = decoding._recorded

    def spy(step: Any) -> Any:
        recordings.append(None)
        return recorded(step)

    monkeypatch.setattr(decoding, "_recorded", spy)
    replayed = follow(Prefixes(policy, encoded, max_tokens=24))
    assert recordings
    monkeypatch.setattr(decoding, "replays", lambda policy, limit: False)
    assert follow(Prefixes(policy, encoded, max_tokens=24)) == replayed
