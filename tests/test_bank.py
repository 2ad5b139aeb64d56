"""The bank on disk: names and meanings other tools rely on, and exactly what was written read back."""

from __future__ import annotations

import sys
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

from onptq.bank import (
    AGREE,
    KINDS,
    MISMATCH,
    NEAR_MISS,
    States,
    Trajectory,
    load_bank,
    load_trajectories,
    read_trajectories,
    trajectories_to_pandas,
    write_trajectories,
)
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.risk import score, select
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
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
    zeros: dict[str, np.ndarray] = {name: np.zeros(3, NUMPY[dtype]) for name, dtype in CONTRACT.items()}
    states = States(**zeros | {"kind": np.array([MISMATCH, AGREE, NEAR_MISS], np.int8)})
    states.write(tmp_path / "bank.parquet")
    assert pq.read_table(tmp_path / "bank.parquet")["kind"].to_pylist() == ["mismatch", "agree", "near_miss"]
    assert states.candidates.tolist() == [True, False, True]


def test_states_are_in_the_order_of_prompt_and_token_whatever_order_they_were_computed_in() -> None:
    def part(*rows: tuple[int, int]) -> States:
        columns: dict[str, np.ndarray] = {name: np.zeros(len(rows), NUMPY[dtype]) for name, dtype in CONTRACT.items()}
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


class Letters:
    """A tokenizer of single letters."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def two_states() -> States:
    columns: dict[str, np.ndarray] = {
        "prompt": np.array([0, 3], np.int32),
        "t": np.array([1, 2], np.int32),
        "token": np.array([0, 1], np.int32),
        "reference": np.array([2, 1], np.int32),
        "competitor": np.array([0, 4], np.int32),
        "quantized": np.array([0, 1], np.int32),
        "kind": np.array([MISMATCH, AGREE], np.int8),
    }
    floats = {
        name: np.array([0.25, 0.5], np.float32) for name in ("margin_dense", "margin_quant", "erosion", "js", "kl")
    }
    return States.compared(**columns, **floats)


def test_states_open_as_a_table_with_the_columns_of_the_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    states = two_states()
    states.write(tmp_path / "bank.parquet")
    table = states.to_pandas()
    pandas.testing.assert_frame_equal(table, pandas.read_parquet(tmp_path / "bank.parquet"))
    assert table["kind"].tolist() == ["mismatch", "agree"]
    assert table["kind"].cat.categories.tolist() == list(KINDS)


def test_a_tokenizer_adds_the_texts_of_tokens(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    table = two_states().to_pandas(Letters())
    assert list(table.columns) == [*CONTRACT, "token_text", "reference_text", "competitor_text"]
    assert table[["token_text", "reference_text", "competitor_text"]].values.tolist() == [
        ["a", "c", "a"],
        ["b", "b", "e"],
    ]
    rollouts = trajectories_to_pandas([Trajectory(3, (1, 0, 2), True), Trajectory(5, (), False)], Letters())
    assert rollouts.to_dict("list") == {
        "prompt": [3, 5],
        "response": [[1, 0, 2], []],
        "finished": [True, False],
        "response_text": ["bac", ""],
    }
    assert "response_text" not in trajectories_to_pandas([])


def test_a_real_tokenizer_gives_the_texts(tiny: Callable[[str], Tiny]) -> None:
    pytest.importorskip("pandas")
    tokenizer = tiny("qwen2.5-vl").processor.tokenizer
    table = two_states().to_pandas(tokenizer)
    assert table["reference_text"].tolist() == [tokenizer.decode([2]), tokenizer.decode([1])]


def test_a_bank_is_loaded_from_its_file_or_its_run(tmp_path: Path) -> None:
    states, trajectories = two_states(), [Trajectory(3, (1, 0, 2), True)]
    folder = tmp_path / "rounds" / "1"
    folder.mkdir(parents=True)
    states.write(folder / "bank.parquet")
    write_trajectories(trajectories, folder / "trajectories.parquet")
    assert_same(load_bank(folder / "bank.parquet"), states)
    assert_same(load_bank(str(tmp_path), round_index=1), states)
    assert load_trajectories(tmp_path, round_index=1) == trajectories
    with pytest.raises(OnPTQError, match=r"no .*rounds.0.bank\.parquet; expected the folder of a run .* round 0"):
        load_bank(tmp_path)
    with pytest.raises(OnPTQError, match=r"trajectories\.parquet is no bank\.parquet of a run"):
        load_bank(folder / "trajectories.parquet")
    (folder / "bank.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(OnPTQError, match=r"bank\.parquet is no bank\.parquet of a run"):
        load_bank(tmp_path, round_index=1)


def test_a_missing_pandas_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for make in (two_states().to_pandas, lambda: trajectories_to_pandas([])):
        with pytest.raises(OnPTQError, match="pip install pandas"):
            make()
