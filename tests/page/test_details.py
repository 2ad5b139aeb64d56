"""Details of single states are what transformers' own logits and naive branches say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MULTIMODAL, Tiny
from naive import WEIGHT_ONLY, WITH_ACTIVATIONS, Scene, next_logits, probabilities, scene, scenes, without_ties

from onptq.bank import AGREE, MISMATCH, NEAR_MISS, States, Trajectory
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare
from onptq.engine.prefixes import Prefixes
from onptq.evaluate.details import (
    FULL,
    LIGHT,
    MOST,
    OFF,
    TOP,
    Detail,
    Future,
    Futures,
    keeps,
    likeliest,
    read_details,
    scored,
    worth_keeping,
    write_details,
)

LENGTHS = (3, 2, 1, 3, 2)
HORIZON = 4


@pytest.fixture(autouse=True)
def _without_ties() -> Iterator[None]:
    with without_ties():
        yield


def visited(scenery: Scene, batches: str = "several") -> tuple[Prefixes, list[Trajectory], States]:
    lengths = zip(scenery.ordinals, LENGTHS, strict=True)
    trajectories = [scenery.rollout(ordinal, length) for ordinal, length in lengths]
    prefixes = Prefixes(
        scenery.policy,
        scenery.encoded(scenery.policy),
        max_tokens=max(LENGTHS),
        batch_tokens=scenery.batch_tokens(batches, max(LENGTHS)),
    )
    return prefixes, trajectories, compare(prefixes, trajectories)


@scenes(MULTIMODAL)
def test_the_likeliest_tokens_are_those_of_the_models_own_logits(
    tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype
) -> None:
    scenery = scene(tiny(family), scheme, dtype)
    prefixes, trajectories, states = visited(scenery)
    by_prompt = {one.prompt: one for one in trajectories}
    some = states.take(np.arange(0, len(states), 2))
    seen: list[int] = []
    details = likeliest(prefixes, trajectories, some, advance=seen.append)
    assert sum(seen) == len(details) == len(some) > 3
    for prompt, t, detail in zip(some.prompt.tolist(), some.t.tolist(), details, strict=True):
        before = by_prompt[prompt].tokens[: t - 1]
        for side, found in (("D", detail.dense), ("Q", detail.quantized)):
            shares = probabilities(next_logits(scenery.policy, side, scenery.inputs[prompt], before))  # type: ignore[arg-type]
            assert [token for token, _ in found] == np.argsort(-shares, kind="stable")[:TOP].tolist(), (prompt, t, side)
            assert [share for _, share in found] == pytest.approx(sorted(shares, reverse=True)[:TOP], abs=1e-5)


def test_a_quantized_model_of_its_own_speaks_for_itself(tiny: Callable[[str], Tiny]) -> None:
    """Its own blocks and head decide, not those of the policy: here they all are zero."""
    scenery = scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY)
    prefixes, trajectories, states = visited(scenery)
    other = scenery.policy_with(())
    with torch.no_grad():
        for block in other.structure.blocks:
            for weight in block.module.parameters():
                weight.zero_()
    encoded = Prefixes(other, scenery.encoded(scenery.policy), max_tokens=max(LENGTHS), batch_tokens=10_000)
    other.freeze(scenery.theta, keep="floats")
    details = likeliest(prefixes, trajectories, states, quantized=encoded)
    expected = likeliest(prefixes, trajectories, states)
    assert [one.dense for one in details] == [one.dense for one in expected]
    assert all(one.quantized != two.quantized for one, two in zip(details, expected, strict=True))


def test_a_few_rows_of_logits_at_a_time_give_the_same(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes, trajectories, states = visited(scene(tiny("qwen3-vl"), *WEIGHT_ONLY), "one")
    whole = likeliest(prefixes, trajectories, states)
    monkeypatch.setattr("onptq.cycle.compare.LOGIT_BYTES", 1)
    sizes: list[int] = []
    logits = prefixes.policy.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(prefixes.policy, "logits", counted)
    cut = likeliest(prefixes, trajectories, states)
    assert set(sizes) == {1}
    for one, other in zip(whole, cut, strict=True):
        assert [token for token, _ in one.dense] == [token for token, _ in other.dense]
        assert [share for _, share in one.dense] == pytest.approx([share for _, share in other.dense], abs=1e-6)


@pytest.mark.parametrize(("side", "exact"), [("D", WEIGHT_ONLY), ("Q", WITH_ACTIVATIONS)], ids=["D", "Q"])
def test_futures_are_those_of_naive_branches(
    tiny: Callable[[str], Tiny], side: str, exact: tuple[str, torch.dtype]
) -> None:
    scenery = scene(tiny("qwen2.5-vl"), *exact)
    prefixes, trajectories, states = visited(scenery)
    futures = Futures(states, frozenset())
    found = branch(prefixes, trajectories, states, horizon=HORIZON, side=side, seen=futures.see)  # type: ignore[arg-type]
    rows = np.flatnonzero(states.candidates)
    assert len(futures.by_state) == len(rows) > 3
    for row in rows:
        state = int(states.prompt[row]), int(states.t[row])
        fork, future = scenery.fork(*state, HORIZON, side), futures.by_state[state]  # type: ignore[arg-type]
        assert tuple(future.reference) == fork.reference[:HORIZON]
        assert tuple(future.competitor) == fork.competitor[:HORIZON]
        assert list(future.apart) == pytest.approx(list(fork.js[:HORIZON]), abs=1e-5)
        assert found.consequence[row] == pytest.approx(math.fsum(future.apart) / HORIZON, abs=1e-5)


def test_to_look_at_futures_changes_no_result(tiny: Callable[[str], Tiny]) -> None:
    prefixes, trajectories, states = visited(scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY))
    futures = Futures(states, frozenset())
    alone = branch(prefixes, trajectories, states, horizon=HORIZON)
    looked = branch(prefixes, trajectories, states, horizon=HORIZON, seen=futures.see)
    for name in States.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(alone, name), getattr(looked, name), err_msg=name)


def test_a_future_ends_with_the_token_that_ends_a_response() -> None:
    futures = Futures(some_states([MISMATCH]), frozenset({9}))
    tokens = np.array([[[1, 9, 7, 7], [2, 3, 9, 7]]])
    futures.see(np.array([0]), tokens, np.array([[0.5, 0.0, 0.0, 0.0]]))
    assert futures.by_state == {(0, 1): Future([1, 9], [2, 3, 9], [0.5, 0.0, 0.0])}


def some_states(kinds: list[int], erosion: float | list[float] = 0.0, js: float | list[float] = 0.0) -> States:
    """States of one prompt, all columns that do not matter 0."""
    count = len(kinds)
    columns = {name: np.zeros(count, np.int32) for name in ("prompt", "token", "reference", "competitor", "quantized")}
    numbers = {name: np.zeros(count, np.float32) for name in ("margin_dense", "margin_quant", "kl")}
    return States.compared(
        **columns,
        **numbers,
        t=np.arange(1, count + 1, dtype=np.int32),
        erosion=np.broadcast_to(np.asarray(erosion, np.float32), count).copy(),
        js=np.broadcast_to(np.asarray(js, np.float32), count).copy(),
        kind=np.array(kinds, np.int8),
    )


def test_the_risk_of_a_comparison_counts_the_consequence_of_its_mismatches() -> None:
    states = some_states([MISMATCH, AGREE, NEAR_MISS, MISMATCH], erosion=[2, 0, 1, 3], js=[0.25, 0.5, 0.125, 0.25])
    mismatches = states.take(np.array([0, 3])).with_columns(
        consequence=np.array([0.5, 0.0], np.float32), horizon=np.array([4, 0], np.int32)
    )
    found = scored(states, mismatches)
    assert found.risk.tolist() == [2 * 1.5 + 0.25, 0, 1.125, 3.25]
    assert found.consequence.tolist() == [0.5, 0, 0, 0]
    assert found.horizon.tolist() == [4, 0, 0, 0]
    assert scored(states, None).risk.tolist() == [2.25, 0, 1.125, 3.25]


def test_mismatches_come_first_and_then_near_misses_by_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [NEAR_MISS, AGREE, MISMATCH, NEAR_MISS, AGREE, MISMATCH]
    states = scored(some_states(kinds, erosion=[5, 0, 0.5, 9, 0, 0.25], js=[0, 0.1, 0, 0, 0.2, 0]), None)
    assert worth_keeping(states, LIGHT).tolist() == [0, 2, 3, 5]
    assert worth_keeping(states, FULL).tolist() == [0, 1, 2, 3, 4, 5]
    for most, kept in ((1, [2]), (2, [2, 5]), (3, [2, 3, 5])):
        monkeypatch.setitem(MOST, LIGHT, most)
        assert worth_keeping(states, LIGHT).tolist() == kept
    monkeypatch.setitem(MOST, FULL, 5)
    assert worth_keeping(states, FULL).tolist() == [0, 2, 3, 4, 5]


def test_details_are_read_as_they_were_written(tmp_path: Path) -> None:
    file, states = tmp_path / "details.parquet", some_states([MISMATCH, NEAR_MISS])
    future = Future([4, 5], [6], [0.5, 0.0])
    details = [Detail([(1, 0.75), (2, 0.25)], [(2, 0.5), (1, 0.5)]), Detail([(3, 1.0)], [(3, 1.0)])]
    write_details(states, details, {(0, 1): future}, LIGHT, file)
    assert read_details(file) == {
        (0, 1): Detail([(1, 0.75), (2, 0.25)], [(2, 0.5), (1, 0.5)], future),
        (0, 2): Detail([(3, 1.0)], [(3, 1.0)]),
    }
    assert [keeps(file, level) for level in (OFF, LIGHT, FULL)] == [True, True, False]
    absent = tmp_path / "absent.parquet"
    assert [keeps(absent, level) for level in (OFF, LIGHT, FULL)] == [True, False, False]
