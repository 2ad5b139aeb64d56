"""Paired statistics: cluster-bootstrap intervals of ratios and of their differences, and exact McNemar tests.

Items and prompts are the clusters, never single tokens. Two models are always compared on the same resamples, and the
strata of a measure (its tasks) are resampled apart, each with as many clusters as it has.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

REPLICATES = 2000
CONFIDENCE = 0.95
DUST = 1e-10
BATCH_BYTES = 64 * 2**20  # resampled cluster numbers that live at a time

Column = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """What the clusters of one stratum contribute: a measure is the sum of the numerators over that of the denominators."""

    stratum: str
    numerator: Column  # [clusters]
    denominator: Column  # [clusters]


@dataclass(frozen=True, eq=False)  # known by identity, so that what was resampled of it once can be kept
class Measure:
    """A ratio over the clusters of its parts: of the sums over all of them, or the unweighted mean of the parts' ratios."""

    parts: tuple[Part, ...]
    scale: float = 1.0
    combined: Literal["sum", "mean"] = "sum"


@dataclass(frozen=True)
class Interval:
    """An estimate and its percentile interval; None where nothing can be said."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(frozen=True)
class Discordance:
    """Items of which something holds for only one of two models, and the exact McNemar p-value of that imbalance."""

    only_first: int
    only_second: int
    p: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


class Resampler:
    """The same resamples for every measure and every model: how often each cluster was drawn, kept by stratum."""

    def __init__(self, seed: int = 0, replicates: int = REPLICATES, confidence: float = CONFIDENCE) -> None:
        self.seed, self.replicates, self.confidence = seed, replicates, confidence
        self._drawn: dict[str, Column] = {}
        self._known: dict[Measure, Column] = {}

    def estimate(self, measure: Measure) -> Interval:
        return self._interval(_value(measure), self._distribution(measure))

    def difference(self, first: Measure, second: Measure) -> Interval:
        """second - first."""
        value = _value(second) - _value(first)
        distribution = self._distribution(second) - self._distribution(first)
        # Equal sums in another order differ in the last bit, and an interval that ends there must end at zero.
        distribution[np.abs(distribution) < DUST] = 0
        return self._interval(0.0 if abs(value) < DUST else value, distribution)

    def _interval(self, value: float, distribution: Column) -> Interval:
        if not np.isfinite(value):
            return Interval(None)
        known = distribution[np.isfinite(distribution)]  # a resample may hold nothing of what is measured
        if not len(known):
            return Interval(value)
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(known, (tail, 1 - tail))
        return Interval(value, float(low), float(high))

    def _distribution(self, measure: Measure) -> Column:
        """The measure in every resample, [replicates]."""
        if measure not in self._known:
            if any(len(part.numerator) < 2 for part in measure.parts):  # one cluster says nothing about others
                return np.full(self.replicates, np.nan)
            sums = [(self._sum(part, part.numerator), self._sum(part, part.denominator)) for part in measure.parts]
            self._known[measure] = _combine(measure, sums)
        return self._known[measure]

    def _sum(self, part: Part, column: Column) -> Column:
        found: Column = self._draws(part.stratum, len(column)) @ column.astype(np.float64)
        return found

    def _draws(self, stratum: str, clusters: int) -> Column:
        """[replicates, clusters]: how often each cluster is in each resample."""
        drawn = self._drawn.get(stratum)
        if drawn is None:
            drawn = self._drawn[stratum] = draw(clusters, self.replicates, (self.seed, zlib.crc32(stratum.encode())))
        if drawn.shape[1] != clusters:
            raise ValueError(f"stratum {stratum!r} has {drawn.shape[1]} clusters in one measure, {clusters} in another")
        return drawn


def draw(clusters: int, replicates: int, seed: Sequence[int]) -> Column:
    """Bootstrap resamples of `clusters` as counts, [replicates, clusters]; each row sums to `clusters`."""
    from scipy.stats import bootstrap

    def count(numbers: Column, axis: int = -1) -> Column:
        rows = numbers.reshape(-1, clusters) + clusters * np.arange(numbers.size // clusters)[:, None]
        return np.bincount(rows.ravel(), minlength=numbers.size).reshape(-1, clusters).T.astype(np.float64)

    found = bootstrap(
        (np.arange(clusters),),
        count,
        vectorized=True,
        n_resamples=replicates,
        batch=max(1, BATCH_BYTES // (8 * clusters)),
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    counts: Column = np.ascontiguousarray(found.bootstrap_distribution.T)
    return counts


def differing(first: Measure, second: Measure) -> int:
    """Clusters whose own ratios differ between the two models; only these say which of them is ahead."""
    pairs = zip(first.parts, second.parts, strict=True)
    return sum(int((a.numerator * b.denominator != b.numerator * a.denominator).sum()) for a, b in pairs)


def fewest_differing(confidence: float) -> int:
    """Below this many differing clusters not even their all pointing the same way is rarer by chance than 1 - confidence.

    A bootstrap does not know that: from a single flipped answer it resamples nothing that points the other way.
    """
    return math.floor(1 - math.log2(1 - confidence)) + 1


def mcnemar(first: Column, second: Column) -> Discordance:
    """Exact and two-sided: whether it holds for one model more often than for the other, [items] bool each."""
    from scipy.stats import binomtest

    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    discordant = only_first + only_second
    p = binomtest(only_first, discordant, 0.5).pvalue if discordant else 1.0
    return Discordance(only_first, only_second, float(p))


def _value(measure: Measure) -> float:
    sums = [(np.asarray(part.numerator.sum()), np.asarray(part.denominator.sum())) for part in measure.parts]
    return float(_combine(measure, sums))


def _combine(measure: Measure, sums: Sequence[tuple[Column, Column]]) -> Column:
    numerators, denominators = (np.stack(each).astype(np.float64) for each in zip(*sums, strict=True))
    if measure.combined == "sum":
        numerators, denominators = numerators.sum(0, keepdims=True), denominators.sum(0, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = measure.scale * numerators / denominators
    ratios[denominators == 0] = np.nan
    known = np.isfinite(ratios)
    counted = known.sum(0)
    # A part without a denominator has no ratio and does not count, as in `Scores.average`.
    return np.where(counted > 0, np.where(known, ratios, 0).sum(0) / np.maximum(counted, 1), np.nan)
