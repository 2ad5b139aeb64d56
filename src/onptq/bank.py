"""The trajectory bank: the rollouts of Q and a table with one row per visited state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from onptq.errors import OnPTQError

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped, unused-ignore]

T = TypeVar("T")
Column = NDArray[Any]

KINDS = ("agree", "near_miss", "mismatch")
AGREE, NEAR_MISS, MISMATCH = range(3)
BANK, ROLLOUTS = "bank.parquet", "trajectories.parquet"  # of a round
DECODED = ("token", "reference", "competitor")  # columns whose tokens `to_pandas` gives as text


class Tokenizer(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Trajectory:
    """One rollout: the exact token ids, the end-of-sequence token included where it was emitted."""

    prompt: int
    tokens: tuple[int, ...]
    finished: bool


def write_trajectories(trajectories: Iterable[Trajectory], path: Path) -> None:
    rows = list(trajectories)
    table = pa.table(
        {
            "prompt": pa.array([row.prompt for row in rows], pa.int32()),
            "response": pa.array([list(row.tokens) for row in rows], pa.list_(pa.int32())),
            "finished": pa.array([row.finished for row in rows], pa.bool_()),
        }
    )
    pq.write_table(table, path)


def read_trajectories(path: Path) -> list[Trajectory]:
    rows = pq.read_table(path).to_pylist()
    return [Trajectory(row["prompt"], tuple(row["response"]), row["finished"]) for row in rows]


@dataclass(frozen=True)
class States:
    """Visited states in the order (prompt, t). Columns are numpy arrays of one length, named as on disk."""

    prompt: Column  # int32, the prompt's ordinal
    t: Column  # int32, 1-based: the state predicts response token t
    token: Column  # int32, y_t, what the rollout emitted
    reference: Column  # int32, a^R (Eq. 3)
    competitor: Column  # int32, a^C (Eq. 4)
    quantized: Column  # int32, a-hat (Eq. 3)
    margin_dense: Column  # float32, m_D (Eq. 5)
    margin_quant: Column  # float32, m_Q (Eq. 5)
    erosion: Column  # float32, e (Eq. 6)
    js: Column  # float32, j (Eq. 7)
    kl: Column  # float32, KL(pi_D || pi_Q), the ablation's j
    kind: Column  # int8, index into KINDS; a dictionary of strings on disk
    horizon: Column  # int32, H_t; 0 where nothing was branched or a forced token ended the response
    consequence: Column  # float32, A (Eq. 8)
    risk: Column  # float32, r^DC (Eq. 9); 0 where the state is no candidate
    critical: Column  # bool, in S_critical (Eq. 10)
    weight: Column  # float32, w (Eq. 11); 0 outside S_critical

    @classmethod
    def compared(cls, **columns: Column) -> States:
        """States as Compare leaves them: nothing branched, scored or selected yet."""
        count = len(columns["prompt"])
        later = {
            "horizon": np.zeros(count, np.int32),
            "consequence": np.zeros(count, np.float32),
            "risk": np.zeros(count, np.float32),
            "critical": np.zeros(count, np.bool_),
            "weight": np.zeros(count, np.float32),
        }
        return cls(**columns, **later)

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def candidates(self) -> Column:
        """Mismatches and near misses, bool [S]."""
        return np.not_equal(self.kind, AGREE)

    def with_columns(self, **columns: Column) -> States:
        return replace(self, **columns)

    def take(self, rows: Column) -> States:
        return States(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})

    def rows_by_prompt(self) -> dict[int, Column]:
        """The rows of every prompt that has some, by its ordinal."""
        order = np.argsort(self.prompt, kind="stable")
        prompts, firsts = np.unique(self.prompt[order], return_index=True)
        return dict(zip(prompts.tolist(), np.split(order, firsts[1:]), strict=True)) if len(prompts) else {}

    @classmethod
    def concatenate(cls, parts: Sequence[States]) -> States:
        """Sorted by (prompt, t), whatever order the parts were computed in."""
        joined = cls(
            **{column.name: np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)}
        )
        return joined.take(np.lexsort((joined.t, joined.prompt)))

    def write(self, path: Path) -> None:
        columns = {
            column.name: pa.array(getattr(self, column.name)) for column in fields(self) if column.name != "kind"
        }
        kind = pa.DictionaryArray.from_arrays(pa.array(self.kind, pa.int8()), pa.array(KINDS))
        names = [column.name for column in fields(self)]
        pq.write_table(pa.table({name: kind if name == "kind" else columns[name] for name in names}), path)

    @classmethod
    def read(cls, path: Path) -> States:
        table = pq.read_table(path)
        columns = {name: table[name].to_numpy() for name in table.column_names if name != "kind"}
        kinds = [KINDS.index(kind) for kind in table["kind"].to_pylist()]
        return cls(**columns, kind=np.array(kinds, np.int8))

    def to_pandas(self, tokenizer: Tokenizer | None = None) -> pandas.DataFrame:
        """One row per state, with the columns of the file; `kind` is categorical.

        With a tokenizer, `token_text`, `reference_text` and `competitor_text` follow.
        """
        pd = import_pandas()
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        columns["kind"] = pd.Categorical.from_codes(self.kind, categories=list(KINDS))
        if tokenizer is not None:
            ids = np.unique(np.concatenate([columns[name] for name in DECODED]))
            texts = {token: tokenizer.decode([token]) for token in ids.tolist()}
            for name in DECODED:
                columns[f"{name}_text"] = [texts[token] for token in columns[name].tolist()]
        return pd.DataFrame(columns)


def load_bank(path: str | Path, *, round_index: int = 0) -> States:
    """The bank of a round, from its file or from the folder of the run (`DIR-run`)."""
    return _load(path, round_index, BANK, States.read)


def load_trajectories(path: str | Path, *, round_index: int = 0) -> list[Trajectory]:
    """The rollouts of a round, from their file or from the folder of the run (`DIR-run`)."""
    return _load(path, round_index, ROLLOUTS, read_trajectories)


def trajectories_to_pandas(trajectories: Iterable[Trajectory], tokenizer: Tokenizer | None = None) -> pandas.DataFrame:
    """One row per rollout: `prompt`, `response`, `finished` and, with a tokenizer, `response_text`."""
    rows = list(trajectories)
    columns: dict[str, Any] = {
        "prompt": np.array([row.prompt for row in rows], np.int32),
        "response": [list(row.tokens) for row in rows],
        "finished": np.array([row.finished for row in rows], np.bool_),
    }
    if tokenizer is not None:
        columns["response_text"] = [tokenizer.decode(list(row.tokens)) for row in rows]
    return import_pandas().DataFrame(columns)


def _load(path: str | Path, round_index: int, name: str, read: Callable[[Path], T]) -> T:
    file = Path(path)
    if file.is_dir():
        file = file / "rounds" / str(round_index) / name
    if not file.is_file():
        raise OnPTQError(
            f"there is no {file}; expected the folder of a run (DIR-run) with round {round_index}, or {name}"
        )
    try:
        return read(file)
    except Exception as error:  # damaged parquet files raise errors of every kind
        raise OnPTQError(f"{file} is no {name} of a run: {error}") from error


def import_pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise OnPTQError("a table needs pandas, which is not installed: pip install pandas") from None
    return pandas
