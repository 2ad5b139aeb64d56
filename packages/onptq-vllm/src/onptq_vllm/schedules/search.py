"""The search: every schedule that can be built is checked against the exact result and timed beside humming's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from onptq_vllm.schedules.activations import Way
from onptq_vllm.schedules.table import END, Gemm, Schedule, Seconds, TunedSchedule

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BEYOND = 8192  # rows from which on one schedule serves all
LEAST = 0.02  # a gain below this may be chance
NEGLIGIBLE = 1e-6  # seconds that a layer may lose with few rows, a hundredth of its time
FINALISTS = 4  # of the first timing, timed again in turns with humming's own
TURNS = 5


class Bench(Protocol):
    """A GEMM on a GPU. `build` returns the schedules that can be built."""

    gemm: Gemm

    def own(self, rows: int) -> Schedule: ...

    def candidates(self, rows: int) -> Iterable[Schedule]: ...

    def refined(self, schedules: Sequence[Schedule]) -> Iterable[Schedule]: ...

    def build(self, schedules: Sequence[Schedule]) -> list[Schedule]: ...

    def right(self, schedule: Schedule, rows: int) -> bool: ...

    def seconds(self, schedule: Schedule, rows: int) -> float: ...

    def rounding(self, way: Way, rows: int) -> tuple[float, float] | None:
        """Seconds of computing and rounding its activations, in two kernels and in one; None where the results
        differ."""


@dataclass(frozen=True)
class Span:
    """Rows that one schedule is to serve, and the numbers of rows that are timed for them."""

    above: int
    upto: int
    timed: tuple[int, ...]


def spans(rows: Sequence[int]) -> list[Span]:
    """One span per number: from its half, or the number before it, up to itself. The largest, from BEYOND on, has no
    end."""
    ordered = sorted(set(rows))
    result = []
    for before, one in zip((0, *ordered), ordered, strict=False):
        above = max(before, one // 2)
        timed = tuple(sorted({max(above + 1, one * 3 // 4), one}))
        result.append(Span(above, END if one == ordered[-1] and one >= BEYOND else one, timed))
    return result


def search(bench: Bench, rows: Sequence[int], advance: Callable[[int], None] = lambda n: None) -> list[TunedSchedule]:
    """The schedules that are faster than humming's own at every timed number of rows of their span."""
    built: dict[str, Schedule | None] = {}
    tuned = []
    for span in spans(rows):
        wanted = {str(one): one for one in bench.candidates(span.upto if span.upto < END else span.timed[-1])}
        fresh = {name: one for name, one in wanted.items() if name not in built}
        usable = {str(one) for one in bench.build(list(fresh.values()))}
        built |= {name: one if name in usable else None for name, one in fresh.items()}
        tried = [one for name in wanted if (one := built[name]) is not None]
        if (best := _best(bench, span, tried)) is not None:
            tuned.append(best)
        advance(1)
    return tuned


def search_rounding(
    bench: Bench, way: Way, rows: Sequence[int], advance: Callable[[int], None] = lambda n: None
) -> Seconds:
    """Seconds of rounding in the kernel that computes the activations; nothing unless it is right and not slower for
    all rows.

    Its scales are the checkpoint's own.
    """
    timed = {}
    for one in sorted(set(rows)):
        timed[str(one)] = bench.rounding(way, one)
        advance(1)
    usable = {name: pair for name, pair in timed.items() if pair is not None and pair[1] <= pair[0] + NEGLIGIBLE}
    return usable if len(usable) == len(timed) else {}


def _best(bench: Bench, span: Span, tried: Sequence[Schedule]) -> TunedSchedule | None:
    own = {rows: bench.own(rows) for rows in span.timed}
    right = [one for one in tried if _right(bench, span, one)]
    times = [(_ratio({rows: (1.0, bench.seconds(one, rows)) for rows in span.timed}), one) for one in right]
    finalists = [one for _, one in sorted(times, key=lambda pair: pair[0])[:FINALISTS]]
    refined = bench.build(list(bench.refined([*finalists, own[span.timed[-1]]])))
    finalists += [one for one in refined if _right(bench, span, one)]
    measured = [(_in_turns(bench, one, own), one) for one in finalists]
    faster = [pair for pair in measured if _worst(pair[0]) <= 1 and _ratio(pair[0]) <= 1 - LEAST]
    if not faster:
        return None
    seconds, schedule = min(faster, key=lambda pair: _ratio(pair[0]))
    return TunedSchedule(span.above, span.upto, schedule, {str(rows): pair for rows, pair in seconds.items()})


def _right(bench: Bench, span: Span, one: Schedule) -> bool:
    return all(bench.right(one, rows) for rows in span.timed)


def _in_turns(bench: Bench, one: Schedule, own: Mapping[int, Schedule]) -> dict[int, tuple[float, float]]:
    """Medians of seconds of humming's own and of `one`, timed in turns: a GPU's clock drifts."""
    medians = {}
    for rows, theirs in own.items():
        turns = [(bench.seconds(theirs, rows), bench.seconds(one, rows)) for _ in range(TURNS)]
        medians[rows] = statistics.median(pair[0] for pair in turns), statistics.median(pair[1] for pair in turns)
    return medians


def _ratio(seconds: Mapping[int, tuple[float, float]]) -> float:
    return statistics.mean(tuned / own for own, tuned in seconds.values())


def _worst(seconds: Mapping[int, tuple[float, float]]) -> float:
    return max(tuned / own for own, tuned in seconds.values())
