"""What a reproduction says: claims with their verdicts, tables, a picture, and what differs from the paper."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from onptq.evaluate.statistics import CONFIDENCE, Interval, fewest_differing

Verdict = Literal["holds", "does not hold", "open", "not measured"]
Cell = str | float | int | None


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, its number there, what was measured here, and whether that speaks for it."""

    says: str
    paper: str
    here: str
    verdict: Verdict


@dataclass(frozen=True)
class Table:
    """Rows of cells under their heads; `best` has the places (row, column) of the best cells."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    best: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Mark:
    """A point of a picture: a value with its interval, in a row of a group."""

    row: str
    group: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Picture:
    """Values with intervals, a row each; as bars from zero, or as points."""

    title: str
    unit: str
    marks: Sequence[Mark]
    bars: bool = False


@dataclass(frozen=True)
class Result:
    """One result of the paper, as it was measured here."""

    name: str
    title: str
    claims: Sequence[Claim]
    tables: Sequence[Table]
    differs: Sequence[str]  # from the paper: model, data, scale, and what it leaves open
    picture: Picture | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "tables": [asdict(table) | {"best": sorted(table.best)} for table in self.tables],
        }


def above(interval: Interval, bound: float = 0.0) -> Verdict:
    """Whether a value is above the bound, by where its whole interval lies."""
    if interval.value is None:
        return "not measured"
    if interval.low is None or interval.high is None or interval.low == interval.high:  # too little was seen to say
        return "open"
    if interval.low > bound:
        return "holds"
    return "does not hold" if interval.high < bound else "open"


def below(interval: Interval, bound: float = 0.0) -> Verdict:
    """Whether a value is below the bound."""
    return above(negative(interval), -bound)


def within(interval: Interval, bound: float) -> Verdict:
    """Whether a value is between -bound and bound."""
    verdicts = {above(interval, -bound), below(interval, bound)}
    return _first(("not measured", "does not hold", "open"), verdicts)


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """A claim with several parts holds where all of them do, and fails with any of them."""
    return _first(("does not hold", "open", "not measured"), verdicts) if verdicts else "not measured"


def _first(order: Sequence[Verdict], verdicts: Collection[Verdict]) -> Verdict:
    return next((one for one in order if one in verdicts), "holds")


def guarded(difference: Interval, differing: int) -> Interval:
    """The difference, without an interval where too few items or prompts differ for it to mean anything."""
    return difference if differing >= fewest_differing(CONFIDENCE) else Interval(difference.value)


def negative(interval: Interval) -> Interval:
    if interval.value is None or interval.low is None or interval.high is None:
        return Interval(None if interval.value is None else -interval.value)
    return Interval(-interval.value, -interval.high, -interval.low)


def scaled(interval: Interval, factor: float) -> Interval:
    """The interval times a positive factor."""
    return Interval(*(None if one is None else one * factor for one in (interval.value, interval.low, interval.high)))


def shown(interval: Interval, digits: int = 2, signed: bool = False, unit: str = "") -> str:
    """The value with its interval behind it."""
    if interval.value is None:
        return "-"
    sign = "+" if signed else ""
    value, *ends = (
        None if one is None else f"{round(one, digits) + 0.0:{sign}.{digits}f}"  # no -0.00
        for one in (interval.value, interval.low, interval.high)
    )
    return f"{value}{unit}" if None in ends else f"{value}{unit} [{', '.join(map(str, ends))}]"


def as_mark(row: str, group: str, interval: Interval) -> list[Mark]:
    """The interval as a point of a picture; none where nothing is known."""
    return [] if interval.value is None else [Mark(row, group, interval.value, interval.low, interval.high)]
