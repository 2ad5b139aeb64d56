"""Paired statistics: cluster-bootstrap intervals of ratios and of their differences, and exact McNemar tests.

Items and prompts are the clusters, never single tokens. Two models are always compared on the same resamples, and the
strata of a measure (its tasks) are resampled apart, each with as many clusters as it has. Where a model was made with several
seeds, its figure is the mean over them, and a resample draws seeds as well as clusters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onptq.evaluate.percentiles import Percentile

REPLICATES = 2000
CONFIDENCE = 0.95
DUST = 1e-10
BATCH_BYTES = 64 * 2**20  # resampled cluster numbers that live at a time

Column = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """The clusters of one stratum: a measure is the sum of the numerators over that of the denominators."""

    stratum: str
    numerator: Column  # [clusters]
    denominator: Column  # [clusters]


@dataclass(frozen=True, eq=False)  # known by identity, so that it is resampled once
class Measure:
    """A ratio over the clusters of its parts: of the sums over all of them, or the unweighted mean of the parts' ratios."""

    parts: tuple[Part, ...]
    scale: float = 1.0
    combined: Literal["sum", "mean"] = "sum"


Single = Measure | Percentile


@dataclass(frozen=True, eq=False)
class Seeded:
    """The mean of one measure over the seeds of a model."""

    seeds: tuple[Single, ...]


@dataclass(frozen=True)
class Interval:
    """An estimate and its percentile interval; None where the data do not give one."""

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
    """The same resamples for every measure and every model: how often each cluster was drawn, by stratum."""

    def __init__(self, seed: int = 0, replicates: int = REPLICATES, confidence: float = CONFIDENCE) -> None:
        self.seed, self.replicates, self.confidence = seed, replicates, confidence
        self._drawn: dict[str, Column] = {}
        self._drawn_seeds: dict[int, Column] = {}
        self._known: dict[Single, Column] = {}

    def estimate(self, measure: Single | Seeded) -> Interval:
        return self._interval(_value(measure), self._distribution(measure))

    def difference(self, first: Single | Seeded, second: Single | Seeded) -> Interval:
        """second - first. Models with as many seeds are paired seed by seed: these have seen the prompts in the same order."""
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

    def _distribution(self, measure: Single | Seeded) -> Column:
        """The measure in every resample, [replicates]."""
        if isinstance(measure, Seeded):
            of_seeds = np.stack([self._distribution(one) for one in measure.seeds], axis=1)
            return _mean(of_seeds, self._draws_of_seeds(len(measure.seeds)))
        if isinstance(measure, Percentile):
            return self._percentiles(measure)
        if measure not in self._known:
            if any(len(part.numerator) < 2 for part in measure.parts):  # one cluster says nothing about others
                return np.full(self.replicates, np.nan)
            sums = [(self._sum(part, part.numerator), self._sum(part, part.denominator)) for part in measure.parts]
            self._known[measure] = _combine(measure, sums)
        return self._known[measure]

    def _percentiles(self, measure: Percentile) -> Column:
        if measure not in self._known:
            if measure.clusters < 2:
                return np.full(self.replicates, np.nan)
            self._known[measure] = measure.resampled(self._draws(measure.stratum, measure.clusters))
        return self._known[measure]

    def _sum(self, part: Part, column: Column) -> Column:
        sums: Column = self._draws(part.stratum, len(column)) @ column.astype(np.float64)
        return sums

    def _draws(self, stratum: str, clusters: int) -> Column:
        """[replicates, clusters]: how often each cluster is in each resample."""
        drawn = self._drawn.get(stratum)
        if drawn is None:
            drawn = self._drawn[stratum] = draw(clusters, self.replicates, (self.seed, zlib.crc32(stratum.encode())))
        if drawn.shape[1] != clusters:
            raise ValueError(f"stratum {stratum!r} has {drawn.shape[1]} clusters in one measure, {clusters} in another")
        return drawn

    def _draws_of_seeds(self, seeds: int) -> Column:
        """[replicates, seeds]: how often each seed is in each resample."""
        if seeds not in self._drawn_seeds:
            own = self.seed, zlib.crc32(b"seeds"), seeds  # three numbers: no stratum has these draws
            self._drawn_seeds[seeds] = draw(seeds, self.replicates, own)
        return self._drawn_seeds[seeds]


def draw(clusters: int, replicates: int, seed: Sequence[int]) -> Column:
    """Bootstrap resamples of `clusters` as counts, [replicates, clusters]; each row sums to `clusters`."""
    from scipy.stats import bootstrap

    def count(numbers: Column, axis: int = -1) -> Column:
        rows = numbers.reshape(-1, clusters) + clusters * np.arange(numbers.size // clusters)[:, None]
        return np.bincount(rows.ravel(), minlength=numbers.size).reshape(-1, clusters).T.astype(np.float64)

    result = bootstrap(
        (np.arange(clusters),),
        count,
        vectorized=True,
        n_resamples=replicates,
        batch=max(1, BATCH_BYTES // (8 * clusters)),
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    counts: Column = np.ascontiguousarray(result.bootstrap_distribution.T)
    return counts


def differing(first: Single | Seeded, second: Single | Seeded) -> int:
    """Clusters whose own ratios or percentiles differ between the two models; only these say which of them is ahead.

    The ratio of a model with several seeds is the mean over them.
    """
    if not (isinstance(first, Measure) and isinstance(second, Measure)):
        apart = np.abs(_own_ratios(first) - _own_ratios(second))  # NaN where a cluster has nothing of what is measured
        return int((apart > DUST).sum())
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


def spread(measure: Seeded) -> float | None:
    """The standard deviation over the seeds; None where it was measured with fewer than two."""
    values = [value for one in measure.seeds if np.isfinite(value := _value(one))]
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _own_ratios(measure: Single | Seeded) -> Column:
    """Every cluster's ratio in every part, one part after the other; or its percentile."""
    if isinstance(measure, Seeded):
        of_seeds = np.stack([_own_ratios(one) for one in measure.seeds], axis=1)
        return _mean(of_seeds, np.ones_like(of_seeds))
    if isinstance(measure, Percentile):
        return measure.alone
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.concatenate([np.asarray(part.numerator / part.denominator, np.float64) for part in measure.parts])


def _mean(values: Column, counts: Column) -> Column:
    """The mean of each row, with so many of each value; of those that are known, NaN without any."""
    counted = np.where(np.isfinite(values), counts, 0)
    total, number = (counted * np.nan_to_num(values)).sum(1), counted.sum(1)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _value(measure: Single | Seeded) -> float:
    if isinstance(measure, Seeded):
        values = np.array([[_value(one) for one in measure.seeds]])
        return float(_mean(values, np.ones_like(values))[0])
    if isinstance(measure, Percentile):
        return measure.value
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
