"""The trajectory bank: what the cycle writes and everything else reads. One row per visited state, columnar, on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Column = NDArray[Any]

KINDS = ("agree", "near_miss", "mismatch")
AGREE, NEAR_MISS, MISMATCH = range(3)


@dataclass(frozen=True)
class Trajectory:
    """One greedy rollout of Q: the exact token ids, the end-of-sequence token included where it was emitted."""

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
