"""Statistics that are resampled by prompt: against scipy, against counting by hand, and against a bootstrap written out."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_by_hand import column
from scipy import stats

from onptq.evaluate.metrics import PROMPTS
from onptq.evaluate.statistics import Column, draw
from onptq.reproduce.resampling import (
    auroc,
    difference,
    mass_of_top,
    mean,
    overlap,
    pearson,
    ranks,
    resampled,
    rows_of_mass,
    share,
    spearman,
)

quickly = settings(max_examples=40, deadline=None)
coarse = arrays(np.float64, 12, elements=st.integers(-3, 3).map(float))  # ties are the rule
EVERY = np.arange(12)


@quickly
@given(first=coarse, second=coarse)
def test_ranks_and_correlations_are_those_of_scipy(first: Column, second: Column) -> None:
    assert ranks(first) == pytest.approx(stats.rankdata(first))
    if len(set(first)) > 1 and len(set(second)) > 1:
        assert pearson(first, second)(EVERY) == pytest.approx(stats.pearsonr(first, second).statistic)
        assert spearman(first, second)(EVERY) == pytest.approx(stats.spearmanr(first, second).statistic)
    else:
        assert np.isnan(pearson(first, second)(EVERY))
        assert np.isnan(spearman(first, second)(EVERY))


@quickly
@given(score=coarse, positive=arrays(np.bool_, 12))
def test_auroc_counts_pairs_and_half_of_the_equal_ones(score: Column, positive: Column) -> None:
    pairs = [(a > b) + (a == b) / 2 for a in score[positive] for b in score[~positive]]
    found = auroc(score, positive)(EVERY)
    assert np.isnan(found) if not pairs else found == pytest.approx(np.mean(pairs))


def test_shares_and_means_are_of_the_rows_among() -> None:
    of, among = np.array([True, True, False, False]), np.array([True, False, True, False])
    assert share(of)(np.array([0, 1, 2])) == pytest.approx(2 / 3)
    assert share(of, among)(np.arange(4)) == 0.5
    assert mean(column(2, 8, 4, 100), among)(np.arange(4)) == 3
    assert np.isnan(share(of, among)(np.array([1, 3])))
    assert difference(share(among), share(of))(np.array([0, 1])) == 0.5


def test_the_overlap_of_the_largest_fifth() -> None:
    first, second = column(*range(10)), column(0, 1, 2, 3, 4, 5, 6, 9, 7, 8)
    assert overlap(first, second, 0.2)(np.arange(10)) == 0.5  # 8 and 9 against 7 and 9
    assert overlap(first, first, 0.2)(np.arange(10)) == 1
    assert overlap(first, -first, 0.2)(np.arange(10)) == 0


def test_the_mass_of_the_largest_and_the_rows_that_hold_a_mass() -> None:
    risk, every = column(1, 4, 0, 2, 3), np.arange(5)  # 10 in all; 4, 7, 9 and 10 in the largest ones
    assert [mass_of_top(risk, top)(every) for top in (0.2, 0.4, 1.0)] == pytest.approx([0.4, 0.7, 1.0])
    assert mass_of_top(risk, 0.01)(every) == pytest.approx(0.4)  # one row at least
    assert [rows_of_mass(risk, mass)(every) for mass in (0.4, 0.5, 0.7, 0.8, 1.0)] == pytest.approx(
        [0.2, 0.4, 0.4, 0.6, 0.8]
    )
    assert np.isnan(mass_of_top(column(0, 0), 0.5)(np.arange(2)))
    assert np.isnan(rows_of_mass(column(0, 0), 0.5)(np.arange(2)))


def test_intervals_resample_whole_prompts_with_the_draws_of_the_harness() -> None:
    prompt, values = np.array([7, 7, 3, 3, 3, 9]), column(1, 5, 2, 2, 8, 40)
    [found] = resampled([mean(values)], prompt, seed=4, replicates=300)
    of_prompt = {3: [2, 2, 8], 7: [1, 5], 9: [40]}
    naive = []
    for times in draw(3, 300, (4, zlib.crc32(PROMPTS.encode()))):
        drawn = [
            value for key, count in zip(sorted(of_prompt), times, strict=True) for value in of_prompt[key] * int(count)
        ]
        naive.append(np.mean(drawn))
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(naive, (0.025, 0.975))))


def test_one_prompt_has_no_interval_and_what_is_unknown_no_value() -> None:
    alone, unknown = resampled([mean(column(1, 3)), mean(column(1, 3), np.zeros(2, np.bool_))], np.zeros(2, np.int64))
    assert (alone.value, alone.low, unknown.value) == (2, None, None)
