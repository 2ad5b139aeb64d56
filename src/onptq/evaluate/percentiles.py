"""Percentiles over the states of all clusters, and what becomes of them where clusters are resampled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]

DUST = 1e-9  # of a count: shares are no exact binary numbers


@dataclass(frozen=True, eq=False)  # known by identity, as a measure is
class Percentile:
    """The smallest value that `share` of all values do not exceed."""

    stratum: str
    values: Column  # [values]
    cluster: Column  # [values], the cluster of each
    clusters: int
    share: float

    @property
    def value(self) -> float:
        return float(self.resampled(np.ones((1, self.clusters)))[0])

    @cached_property
    def alone(self) -> Column:
        """The percentile of every cluster by itself, [clusters]; NaN where it has no value."""
        return self.resampled(np.eye(self.clusters))

    def resampled(self, draws: Column) -> Column:
        """The percentile in every resample, [replicates], where `draws` [replicates, clusters] says how often each cluster
        is in it. One resample after the other: a table of [replicates x values] would not fit into memory."""
        order = np.argsort(self.values, kind="stable")
        values, cluster = self.values[order].astype(np.float64), self.cluster[order]
        percentiles = np.full(len(draws), np.nan)
        for number, drawn in enumerate(draws):
            reached = np.cumsum(drawn[cluster])
            if len(reached) and reached[-1]:
                percentiles[number] = values[np.searchsorted(reached, self.share * reached[-1] - DUST)]
        return percentiles
