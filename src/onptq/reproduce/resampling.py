"""Intervals of statistics that are no ratios of sums, by resampling prompts: ranks, correlations, shares of the largest."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from onptq.evaluate.metrics import PROMPTS
from onptq.evaluate.statistics import CONFIDENCE, REPLICATES, Column, Interval, draw

Statistic = Callable[[Column], float]  # of the rows of states, some of them several times


def resampled(
    statistics: Sequence[Statistic], prompt: Column, seed: int = 0, replicates: int = REPLICATES
) -> tuple[Interval, ...]:
    """Each statistic over all rows, with the percentile interval over resampled prompts, the same ones for all of them.

    `prompt` is the prompt of each row. A statistic that is NaN in a resample does not count there.
    """
    every = np.arange(len(prompt))
    values = [statistic(every) for statistic in statistics]
    prompts = np.unique(prompt)
    if len(prompts) < 2:
        return tuple(_interval(value, np.zeros(0)) for value in values)
    of_prompt = np.split(np.argsort(prompt, kind="stable"), np.cumsum(np.unique(prompt, return_counts=True)[1])[:-1])
    drawn_values = np.full((replicates, len(statistics)), np.nan)
    for number, drawn in enumerate(draw(len(prompts), replicates, (seed, zlib.crc32(PROMPTS.encode())))):
        times = drawn.astype(np.int64)
        rows = np.concatenate([np.tile(of_prompt[place], times[place]) for place in np.flatnonzero(times)])
        drawn_values[number] = [statistic(rows) for statistic in statistics]
    return tuple(_interval(value, drawn_values[:, column]) for column, value in enumerate(values))


def difference(first: Statistic, second: Statistic) -> Statistic:
    """second - first."""
    return lambda rows: second(rows) - first(rows)


def share(of: Column, among: Column | None = None) -> Statistic:
    """How many of the rows `among` are `of` them."""

    def statistic(rows: Column) -> float:
        chosen = of[rows] if among is None else of[rows][among[rows]]
        return float(chosen.mean()) if len(chosen) else float("nan")

    return statistic


def mean(values: Column, among: Column | None = None) -> Statistic:
    return share(values.astype(np.float64), among)


def pearson(first: Column, second: Column) -> Statistic:
    return lambda rows: _correlation(first[rows].astype(np.float64), second[rows].astype(np.float64))


def spearman(first: Column, second: Column, among: Column | None = None) -> Statistic:
    """The correlation of ranks, of the rows `among` where these are not all; equals share theirs."""

    def statistic(rows: Column) -> float:
        chosen = rows if among is None else rows[among[rows]]
        return _correlation(ranks(first[chosen]), ranks(second[chosen]))

    return statistic


def auroc(score: Column, positive: Column) -> Statistic:
    """The chance that a positive row has a larger score than a negative one; equals count half."""

    def statistic(rows: Column) -> float:
        chosen, rank = positive[rows], ranks(score[rows])
        ones, zeros = int(chosen.sum()), int((~chosen).sum())
        if not ones or not zeros:
            return float("nan")
        return float((rank[chosen].sum() - ones * (ones + 1) / 2) / (ones * zeros))

    return statistic


def overlap(first: Column, second: Column, top: float) -> Statistic:
    """How many of the rows that are largest by the one are among the largest by the other; the earlier of equals count."""

    def statistic(rows: Column) -> float:
        count = max(1, round(top * len(rows)))
        chosen = [set(np.argsort(-column[rows], kind="stable")[:count].tolist()) for column in (first, second)]
        return len(chosen[0] & chosen[1]) / count

    return statistic


def mass_of_top(values: Column, top: float) -> Statistic:
    """The share of the sum that the largest rows hold."""

    def statistic(rows: Column) -> float:
        ordered = np.sort(values[rows].astype(np.float64))[::-1]
        total = ordered.sum()
        return float(ordered[: max(1, round(top * len(ordered)))].sum() / total) if total else float("nan")

    return statistic


def rows_of_mass(values: Column, mass: float) -> Statistic:
    """The smallest share of the rows that holds so much of the sum."""

    def statistic(rows: Column) -> float:
        held = np.cumsum(np.sort(values[rows].astype(np.float64))[::-1])
        if not len(held) or not held[-1]:
            return float("nan")
        return float((np.searchsorted(held, mass * held[-1] * (1 - 1e-12)) + 1) / len(held))

    return statistic


def ranks(values: Column) -> Column:
    """Ranks from 1; equals have the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    rank: Column = (last - (counts - 1) / 2)[place]
    return rank


def _correlation(first: Column, second: Column) -> float:
    if len(first) < 2:
        return float("nan")
    first, second = first - first.mean(), second - second.mean()
    spread = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / spread) if spread else float("nan")


def _interval(value: float, distribution: Column) -> Interval:
    if not np.isfinite(value):
        return Interval(None)
    known = distribution[np.isfinite(distribution)]
    if not len(known):
        return Interval(value)
    low, high = np.quantile(known, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Interval(value, float(low), float(high))
