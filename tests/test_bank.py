"""The bank on disk: names and meanings other tools rely on, and exactly what was written read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from onptq.bank import AGREE, KINDS, MISMATCH, NEAR_MISS, States, Trajectory, read_trajectories, write_trajectories
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.risk import score, select
from onptq.engine.prefixes import Prefixes
from onptq.quantizer.theta import Theta
from onptq.recipe import RiskConfig, SelectConfig

KIND = pa.dictionary(pa.int8(), pa.string())
CONTRACT = {
    "prompt": pa.int32(),
    "t": pa.int32(),
    "token": pa.int32(),
    "reference": pa.int32(),
    "competitor": pa.int32(),
    "quantized": pa.int32(),
    "margin_dense": pa.float32(),
    "margin_quant": pa.float32(),
    "erosion": pa.float32(),
    "js": pa.float32(),
    "kl": pa.float32(),  # beyond the contract: the ablation's divergence
    "kind": KIND,
    "horizon": pa.int32(),
    "consequence": pa.float32(),
    "risk": pa.float32(),
    "critical": pa.bool_(),
    "weight": pa.float32(),
}
NUMPY = {pa.int32(): np.int32, pa.float32(): np.float32, pa.bool_(): np.bool_, KIND: np.int8}


@st.composite
def banks(draw: st.DrawFn) -> States:
    count = draw(st.integers(0, 6))
    columns = {}
    for name, dtype in CONTRACT.items():
        values = st.integers(0, len(KINDS) - 1) if name == "kind" else None
        columns[name] = draw(arrays.arrays(NUMPY[dtype], count, elements=values))
    return States(**columns)


def assert_same(one: States, other: States) -> None:
    for name in CONTRACT:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype, name
        np.testing.assert_array_equal(mine, theirs, err_msg=name)


@pytest.fixture
def cycled(tiny: Callable[[str], Tiny]) -> tuple[States, list[Trajectory]]:
    """A bank as the cycle makes it, with every kind of state, branched, scored and selected."""
    policy = tiny("qwen2.5-vl").policy("W4A8")
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
    prefixes = Prefixes(policy, tiny("qwen2.5-vl").encode(policy, 4), max_tokens=6)
    trajectories = follow(prefixes)
    states = branch(prefixes, trajectories, compare(prefixes, trajectories), horizon=2)
    return select(score(states, RiskConfig()), SelectConfig(budget=5)), trajectories


def test_a_bank_of_the_cycle_has_the_documented_columns(
    cycled: tuple[States, list[Trajectory]], tmp_path: Path
) -> None:
    states, trajectories = cycled
    states.write(tmp_path / "bank.parquet")
    table = pq.read_table(tmp_path / "bank.parquet")
    assert dict(zip(table.schema.names, table.schema.types, strict=True)) == CONTRACT
    assert table.schema.names == list(CONTRACT)
    assert table.num_rows == sum(len(trajectory.tokens) for trajectory in trajectories)
    assert_same(States.read(tmp_path / "bank.parquet"), states)

    rows = table.to_pylist()
    tokens = {(one.prompt, t): token for one in trajectories for t, token in enumerate(one.tokens, start=1)}
    assert {(row["prompt"], row["t"]): row["token"] for row in rows} == tokens
    assert {row["kind"] for row in rows} == {"agree", "near_miss", "mismatch"}
    for row in rows:
        if row["quantized"] != row["reference"]:
            assert row["kind"] == "mismatch"
        else:
            assert row["kind"] == ("near_miss" if row["erosion"] > 0 else "agree")
        assert (row["weight"] > 0) == row["critical"]
    assert sum(row["critical"] for row in rows) == 5
    assert sum(row["weight"] for row in rows) == pytest.approx(1, abs=1e-6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(banks())
def test_any_bank_is_read_back_as_it_was_written(tmp_path: Path, states: States) -> None:
    path = tmp_path / "bank.parquet"
    states.write(path)
    assert pq.read_schema(path).names == list(CONTRACT)
    assert pq.read_schema(path).types == list(CONTRACT.values())
    assert_same(States.read(path), states)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.builds(Trajectory, st.integers(0, 9), st.lists(st.integers(0, 200_000)).map(tuple), st.booleans())))
def test_trajectories_are_read_back_token_for_token(tmp_path: Path, trajectories: list[Trajectory]) -> None:
    path = tmp_path / "trajectories.parquet"
    write_trajectories(trajectories, path)
    assert read_trajectories(path) == trajectories
    schema = pq.read_schema(path)
    assert schema.names == ["prompt", "response", "finished"]
    assert schema.types == [pa.int32(), pa.list_(pa.int32()), pa.bool_()]


def test_kinds_are_spelled_out_on_disk(tmp_path: Path) -> None:
    zeros = {name: np.zeros(3, NUMPY[dtype]) for name, dtype in CONTRACT.items()}
    states = States(**zeros | {"kind": np.array([MISMATCH, AGREE, NEAR_MISS], np.int8)})
    states.write(tmp_path / "bank.parquet")
    assert pq.read_table(tmp_path / "bank.parquet")["kind"].to_pylist() == ["mismatch", "agree", "near_miss"]
    assert states.candidates.tolist() == [True, False, True]


def test_states_are_in_the_order_of_prompt_and_token_whatever_order_they_were_computed_in() -> None:
    def part(*rows: tuple[int, int]) -> States:
        columns = {name: np.zeros(len(rows), NUMPY[dtype]) for name, dtype in CONTRACT.items()}
        prompt, t = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        return States(**columns | {"prompt": prompt, "t": t, "token": 100 * prompt + t})

    joined = States.concatenate([part((3, 1), (3, 2), (0, 2)), part((1, 1), (0, 1))])
    assert list(zip(joined.prompt.tolist(), joined.t.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 1), (3, 1), (3, 2)]
    np.testing.assert_array_equal(joined.token, 100 * joined.prompt + joined.t)
    assert joined.prompt.dtype == np.int32


def test_states_fresh_from_compare_are_not_yet_branched_scored_or_selected() -> None:
    later = {"horizon", "consequence", "risk", "critical", "weight"}
    states = States.compared(**{name: np.ones(2, NUMPY[kind]) for name, kind in CONTRACT.items() if name not in later})
    for name in later:
        assert getattr(states, name).dtype == NUMPY[CONTRACT[name]], name
        assert not getattr(states, name).any(), name
