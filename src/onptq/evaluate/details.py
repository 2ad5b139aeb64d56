"""What can be looked at of single states: the likeliest next tokens of both models, and the futures behind a mismatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from onptq.bank import AGREE, MISMATCH, Column, States, Trajectory
from onptq.cycle.branch import branch
from onptq.cycle.compare import padded_responses, state_rows
from onptq.cycle.risk import score
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError, did_you_mean
from onptq.evaluate.critical import HORIZON
from onptq.models.language_model import LanguageModel, Side
from onptq.progress import Reporter
from onptq.recipe import RiskConfig

OFF, LIGHT, FULL = "off", "light", "full"
LEVELS = (OFF, LIGHT, FULL)
MOST = {LIGHT: 2048, FULL: 8192}  # states of a candidate
TOP = 10
LEVEL = b"onptq.detail"  # in the metadata of the file

Advance = Callable[[int], None]


class Future(NamedTuple):
    """Both continuations of a state, forced tokens first, and how far the dense model sees them apart behind each token."""

    reference: Sequence[int]
    competitor: Sequence[int]
    apart: Sequence[float]
    continued_by: Side = "D"


@dataclass(frozen=True)
class Detail:
    """One state: token ids with their probabilities, the likeliest first."""

    dense: Sequence[tuple[int, float]]
    quantized: Sequence[tuple[int, float]]
    future: Future | None = None


def check_level(level: str) -> None:
    if level not in LEVELS:
        raise OnPTQError(f"detail {level!r}{did_you_mean(level, LEVELS)}: expected one of {', '.join(LEVELS)}")


class Futures:
    """The futures of states, by prompt and t, as `branch` sees them; each ends with the token that ends a response."""

    def __init__(self, states: States, eos: frozenset[int], continued_by: Side = "D") -> None:
        self._states, self._eos, self._continued_by = states, eos, continued_by
        self.by_state: dict[tuple[int, int], Future] = {}

    def see(self, rows: Column, tokens: Column, apart: Column) -> None:
        for row, (reference, competitor), steps in zip(rows.tolist(), tokens.tolist(), apart.tolist(), strict=True):
            state = int(self._states.prompt[row]), int(self._states.t[row])
            futures = self._ended(reference), self._ended(competitor)
            self.by_state[state] = Future(*futures, steps[: max(map(len, futures))], self._continued_by)

    def _ended(self, tokens: Sequence[int]) -> Sequence[int]:
        ends = [place for place, token in enumerate(tokens) if token in self._eos]
        return tokens[: ends[0] + 1] if ends else tokens


def branch_mismatches(
    prefixes: Prefixes,
    trajectories: Sequence[Trajectory],
    states: States,
    reporter: Reporter,
    name: str,
) -> tuple[States, Futures]:
    """The mismatches with their consequence and their futures, both tokens continued by the dense model.

    The forced tokens count as one more state: a closed answer ends after its letter, and nothing else of it would be counted.
    """
    mismatches = states.take(np.flatnonzero(states.kind == MISMATCH))
    futures = Futures(mismatches, prefixes.policy.eos)
    with reporter.phase(f"Branch {name}", total=len(mismatches), unit="mismatches") as bar:
        branched = branch(
            prefixes,
            trajectories,
            mismatches,
            horizon=HORIZON,
            side="D",
            count_forced=True,
            seen=futures.see,
            advance=bar.advance,
        )
    return branched, futures


def scored(states: States, mismatches: States | None) -> States:
    """The states with the consequence of their branched mismatches, and with the risk that follows from it."""
    if mismatches is not None:
        consequence, horizon = states.consequence.copy(), states.horizon.copy()
        rows = np.flatnonzero(states.kind == MISMATCH)
        consequence[rows], horizon[rows] = mismatches.consequence, mismatches.horizon
        states = states.with_columns(consequence=consequence, horizon=horizon)
    return score(states, RiskConfig())


def worth_keeping(states: States, level: str) -> Column:
    """The rows of scored states that a level keeps: mismatches by risk, near misses by risk and, in full, all others by JS."""
    order = np.lexsort((states.t, states.prompt, -states.js, -states.risk, -states.kind.astype(np.int64)))
    if level != FULL:
        order = order[states.kind[order] != AGREE]
    return np.sort(order[: MOST[level]])


@torch.no_grad()
def likeliest(
    prefixes: Prefixes,
    trajectories: Sequence[Trajectory],
    states: States,
    *,
    quantized: Prefixes | None = None,
    advance: Advance = lambda states: None,
) -> list[Detail]:
    """Of every state the likeliest next tokens of D and Q, teacher-forced. `quantized` as in `compare`."""
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    other = (quantized or prefixes).policy
    by_row: dict[int, Detail] = {}
    if quantized is not None:
        prefixes.batch_like(quantized)
    size = state_rows(prefixes.policy.vocabulary)

    def read_batch(index: int) -> list[Any]:
        batch = prefixes.batches[index]
        places = {prompt.ordinal: place for place, prompt in enumerate(batch.prompts)}
        mine = np.flatnonzero(np.isin(states.prompt, list(places)))
        if not len(mine):
            return []
        read: list[Any] = []
        response = padded_responses(batch, by_prompt)
        hidden = [
            prefixes.teacher_force(index, "D", response)[1],
            (quantized or prefixes).teacher_force(index, "Q", response)[1],
        ]
        for rows in np.split(mine, range(size, len(mine), size)):
            where = [places[prompt] for prompt in states.prompt[rows].tolist()], (states.t[rows] - 1).tolist()
            dense = _top(prefixes.policy, hidden[0][where])
            quant = _top(other, hidden[1][where])
            read += zip(rows.tolist(), dense, quant, strict=True)
        return read

    for read in prefixes.map_batches(read_batch, *(() if quantized is None else (quantized,))):
        by_row.update({row: Detail(_pairs(dense), _pairs(quant)) for row, dense, quant in read})
        advance(len(read))
    return [by_row[row] for row in range(len(states))]


def _pairs(top: Sequence[Sequence[Any]]) -> list[tuple[int, float]]:
    """The pairs of a list that may come from another process, where they are lists."""
    return [(token, share) for token, share in top]


def _top(policy: LanguageModel, hidden: Tensor) -> list[list[tuple[int, float]]]:
    """The likeliest tokens of every state [S, d] with their probabilities; of equals the lowest id first."""
    probability, token = policy.logits(hidden).float().softmax(-1).topk(min(TOP, policy.vocabulary))
    rows = zip(token.tolist(), probability.tolist(), strict=True)
    return [sorted(zip(ids, shares, strict=True), key=lambda pair: (-pair[1], pair[0])) for ids, shares in rows]


def write_details(
    states: States,
    details: Sequence[Detail],
    futures: Mapping[tuple[int, int], Future],
    level: str,
    path: Path,
) -> None:
    """Write one row per state."""
    both = [futures.get(state) for state in zip(states.prompt.tolist(), states.t.tolist(), strict=True)]
    ids, shares = pa.list_(pa.int32()), pa.list_(pa.float32())
    columns = {
        "prompt": pa.array(states.prompt),
        "t": pa.array(states.t),
        "dense": pa.array([[token for token, _ in one.dense] for one in details], ids),
        "dense_probability": pa.array([[share for _, share in one.dense] for one in details], shares),
        "quantized": pa.array([[token for token, _ in one.quantized] for one in details], ids),
        "quantized_probability": pa.array([[share for _, share in one.quantized] for one in details], shares),
        "reference_future": pa.array([one and one.reference for one in both], ids),
        "competitor_future": pa.array([one and one.competitor for one in both], ids),
        "apart": pa.array([one and one.apart for one in both], shares),
        "continued_by": pa.array([one and one.continued_by for one in both], pa.string()),
    }
    pq.write_table(pa.table(columns).replace_schema_metadata({LEVEL: level.encode()}), path)


def read_details(path: Path) -> dict[tuple[int, int], Detail]:
    """Details by prompt and t."""
    return {(row["prompt"], row["t"]): _detail(row) for row in pq.read_table(path).to_pylist()}


def keeps(path: Path, level: str) -> bool:
    """Whether the file holds at least what the level wants."""
    if level == OFF:
        return True
    if not path.is_file():
        return False
    written = (pq.read_schema(path).metadata or {}).get(LEVEL, b"").decode()
    return written in LEVELS and LEVELS.index(written) >= LEVELS.index(level)


def _detail(row: Mapping[str, Any]) -> Detail:
    future = None
    if row["reference_future"] is not None:
        by: Side = row.get("continued_by") or "D"  # earlier versions let D alone continue
        future = Future(row["reference_future"], row["competitor_future"], row["apart"], by)
    dense, quantized = (
        list(zip(row[name], row[f"{name}_probability"], strict=True)) for name in ("dense", "quantized")
    )
    return Detail(dense, quantized, future)
