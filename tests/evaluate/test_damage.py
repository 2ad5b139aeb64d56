"""Metrics of damage on banks, responses and answers that are known by hand, and against loops over single states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from onptq.bank import AGREE, MISMATCH, NEAR_MISS, States, Trajectory
from onptq.evaluate.answers import Answer
from onptq.evaluate.damage import (
    NEAR_TIE,
    consequence_measures,
    content_measures,
    damage_measures,
    dense_path_measures,
    ends_in_loop,
    loop_measures,
    percentile_measures,
    response_measures,
    tie_measures,
)
from onptq.evaluate.metrics import Label, behaviour_measures, labels
from onptq.evaluate.percentiles import Percentile
from onptq.evaluate.report import markdown, sentences, tables
from onptq.evaluate.statistics import Interval, Measure, Part, Resampler, Seeded, differing
from onptq.evaluate.summary import Results, summarize, verdict
from onptq.evaluate.tasks import Item, exact

State = tuple[int, int, float, float, float]  # prompt, kind, margin of the dense model, consequence, KL


def bank(rows: Sequence[State]) -> States:
    prompt, kind, margin, consequence, kl = (np.array(column) for column in zip(*rows, strict=True))
    numbers, zeros = np.arange(len(rows), dtype=np.int32), np.zeros(len(rows), np.float32)
    states = States.compared(
        prompt=prompt, t=numbers, token=numbers, reference=numbers, competitor=numbers, quantized=numbers,
        margin_dense=margin.astype(np.float32), margin_quant=zeros, erosion=zeros, js=zeros, kl=kl, kind=kind,
    )  # fmt: skip
    return states.with_columns(consequence=consequence)


def mismatches(states: States) -> States:
    return states.take(np.flatnonzero(states.kind == MISMATCH))


def values(measures: Any) -> dict[str, float | None]:
    resampler = Resampler(replicates=20)
    return {name: resampler.estimate(one).value for name, one in measures.items()}


KNOWN = bank(
    [
        (3, MISMATCH, 0.10, 0.6, 1.0),
        (3, AGREE, 0.10, 0.0, 2.0),
        (3, MISMATCH, 4.00, 0.2, 3.0),
        (3, AGREE, 9.00, 0.0, 4.0),
        (7, MISMATCH, 0.25, 0.5, 5.0),
        (7, NEAR_MISS, 0.05, 0.0, 6.0),
        (7, MISMATCH, 0.24, 0.0, 7.0),
        (7, AGREE, 1.00, 0.0, 8.0),
    ]
)


# --- mismatches -----------------------------------------------------------------------------------------------------------


def test_near_ties_and_clear_mismatches_are_told_by_the_dense_margin_and_add_up() -> None:
    """Of eight states four differ: two where the dense model is below a quarter of a logit, two at or above it."""
    assert NEAR_TIE == 0.25
    assert values(tie_measures(KNOWN, [3, 7])) == {"near_tie": 25, "clear": 25, "noise_clear": 0}
    assert values(behaviour_measures(KNOWN, [3, 7]))["mismatch"] == 50


def test_a_mismatch_counts_as_much_as_its_consequence_over_all_states() -> None:
    found = values(consequence_measures(KNOWN, mismatches(KNOWN), [3, 7]))
    assert found == {"cwm": pytest.approx(100 * (0.6 + 0.2 + 0.5 + 0.0) / 8)}
    nothing = KNOWN.with_columns(kind=np.full_like(KNOWN.kind, AGREE))
    assert values(consequence_measures(nothing, mismatches(nothing), [3, 7])) == {"cwm": 0}


def test_the_dense_path_has_its_own_mismatch_and_kl() -> None:
    assert values(dense_path_measures(KNOWN, [7, 3])) == {
        "dense_path_mismatch": 50,
        "dense_path_kl": 4.5,
        "noise_dense_path": 0,
    }


rows = st.tuples(
    st.integers(0, 3), st.sampled_from((AGREE, NEAR_MISS, MISMATCH)),
    *(st.floats(0, 1, width=32) for _ in range(3)),
)  # fmt: skip


@given(st.lists(rows, min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_measures_of_mismatches_are_those_of_a_loop_over_the_states(drawn: list[State]) -> None:
    states, prompts = bank(drawn), range(4)
    near, clear, weighted, kl = 0, 0, 0.0, 0.0
    for _, kind, margin, consequence, divergence in drawn:
        near += kind == MISMATCH and margin < 0.25
        clear += kind == MISMATCH and margin >= 0.25
        weighted += consequence if kind == MISMATCH else 0.0
        kl += divergence
    found = values(
        tie_measures(states, prompts)
        | consequence_measures(states, mismatches(states), prompts)
        | dense_path_measures(states, prompts)
    )
    count = len(drawn)
    assert found == {
        "near_tie": pytest.approx(100 * near / count),
        "clear": pytest.approx(100 * clear / count),
        "cwm": pytest.approx(100 * weighted / count),
        "dense_path_mismatch": pytest.approx(100 * (near + clear) / count),
        "dense_path_kl": pytest.approx(kl / count),
        "noise_clear": 0,
        "noise_dense_path": 0,
    }


def test_the_noise_floor_of_clear_mismatches_leaves_out_near_ties_of_q_with_itself() -> None:
    """Three disagreements: a near tie of reference and competitor, a clear one of them, and one with a third token."""
    states = KNOWN.with_columns(
        reference=np.full(8, 1, np.int32), competitor=np.full(8, 2, np.int32), quantized=np.full(8, 1, np.int32),
        token=np.array([2, 2, 5, 1, 1, 1, 1, 1], np.int32),
        margin_quant=np.array([0.2, 0.3, 0.1, 0, 0, 0, 0, 0], np.float32),
    )  # fmt: skip
    assert values(tie_measures(states, [3, 7]))["noise_clear"] == 25
    found = values(behaviour_measures(states, [3, 7]))
    assert (found["noise"], found["noise_responses"]) == (37.5, 50)
    assert values(dense_path_measures(states, [3, 7]))["noise_dense_path"] == 37.5


def test_prompts_are_the_clusters_of_every_measure() -> None:
    """A bootstrap by state would see eight of them."""
    measures = damage_measures(
        [3, 7],
        states=KNOWN,
        mismatches=mismatches(KNOWN),
        dense_path=KNOWN,
        responses=[Trajectory(3, (1,), True), Trajectory(7, (2,), True)],
        dense_responses=[Trajectory(3, (1,), True), Trajectory(7, (1,), True)],
    )
    for one in measures.values():
        clusters = one.clusters if isinstance(one, Percentile) else {len(part.numerator) for part in one.parts}
        assert clusters in (2, {2})


# --- responses ------------------------------------------------------------------------------------------------------------


def test_responses_are_reworded_where_any_token_differs_and_their_lengths_are_compared_in_all() -> None:
    dense = [Trajectory(0, (1, 2, 3, 4), True), Trajectory(1, (5, 6), True), Trajectory(2, (7, 8), False)]
    other = [Trajectory(2, (7, 8), True), Trajectory(0, (1, 2, 9, 4), True), Trajectory(1, (5, 6, 6, 6), False)]
    assert values(response_measures(dense, other, [0, 1, 2])) == {
        "reworded": pytest.approx(100 * 2 / 3),
        "length": pytest.approx(100 * 10 / 8),
    }
    assert values(response_measures(dense, dense, [2, 1, 0])) == {"reworded": 0, "length": 100}


OTHER = list(range(1000, 1040))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        ([5] * 23, False),
        ([5] * 24, True),
        ([5] * 24 + [6], False),  # a loop that was left again
        (OTHER + [5] * 24, True),
        ([7, 8] * 12, True),
        (OTHER + [8] + [7, 8] * 12, True),  # cut off in the middle of the cycle
        ([1, 2, 3, 4, 5, 6, 7, 8] * 3, True),
        ([1, 2, 3, 4, 5, 6, 7, 8] * 2 + [1, 2, 3, 4, 5, 6, 7, 9], False),
        (list(range(16)) * 3, True),
        (list(range(16)) * 3 + [0, 1], True),
        ((list(range(16)) * 3)[1:], False),  # not quite three times
        (list(range(17)) * 3, False),  # longer cycles are no loops
        ([1, 2, 3] * 4, False),  # too short
        (OTHER, False),
    ],
)
def test_a_loop_is_a_short_cycle_that_fills_the_end(tokens: list[int], expected: bool) -> None:
    assert ends_in_loop(tokens) is expected
    assert ends_in_loop(tuple(tokens)) is expected


@given(
    st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=18), st.integers(0, 60)
)
@settings(max_examples=150, deadline=None)
def test_loops_are_those_that_a_search_token_by_token_finds(before: list[int], cycle: list[int], length: int) -> None:
    tokens = before + [cycle[place % len(cycle)] for place in range(length)]
    looping = False
    for period in range(1, 17):
        same = 0  # tokens at the end that equal the one a period earlier
        while same < len(tokens) - period and tokens[-1 - same] == tokens[-1 - same - period]:
            same += 1
        looping |= same + period >= max(24, 3 * period)
    assert ends_in_loop(tokens) == looping


def test_a_response_that_ended_by_itself_is_no_loop() -> None:
    responses = [
        Trajectory(0, (1,) * 30, False), Trajectory(1, (*[1] * 30, 2), True), Trajectory(2, (1,) * 30, True),
        Trajectory(3, tuple(range(64)), False),
    ]  # fmt: skip
    assert values(loop_measures(responses, [0, 1, 2, 3])) == {"loops": 25}


# --- percentiles ----------------------------------------------------------------------------------------------------------


def percentile(kl: ArrayLike, cluster: ArrayLike, share: float, clusters: int = 4) -> Percentile:
    return Percentile("prompts", np.array(kl, np.float64), np.array(cluster), clusters, share)


def test_a_percentile_is_the_smallest_value_that_its_share_does_not_exceed() -> None:
    hundred = list(range(1, 101))
    for share, expected in ((0.5, 50), (0.95, 95), (0.99, 99), (0.991, 100), (0.001, 1)):
        assert percentile(hundred, [0] * 100, share).value == expected
    assert percentile([3.0], [0], 0.99).value == 3
    assert values(percentile_measures(KNOWN, [3, 7])) == {"kl_p50": 4, "kl_p95": 8, "kl_p99": 8}


@given(
    st.lists(st.tuples(st.floats(0, 9), st.integers(0, 3)), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=5),
    st.sampled_from((0.5, 0.95, 0.99)),
)
@settings(max_examples=80, deadline=None)
def test_resampled_percentiles_are_those_of_values_written_out_as_often_as_they_were_drawn(
    drawn: list[tuple[float, int]], counts: list[list[int]], share: float
) -> None:
    kl, cluster = zip(*drawn, strict=True)
    found = percentile(kl, cluster, share).resampled(np.array(counts, np.float64))
    for times, value in zip(counts, found, strict=True):
        written_out = sorted(kl for kl, cluster in drawn for _ in range(times[cluster]))
        if not written_out:
            assert np.isnan(value)
        else:
            assert value == written_out[math.ceil(round(share * len(written_out), 9)) - 1]


def test_an_interval_of_a_percentile_is_that_of_a_loop_over_the_same_resamples() -> None:
    rng = np.random.default_rng(0)
    cluster = np.repeat(np.arange(40), rng.integers(1, 9, 40))
    first, second = (percentile(rng.exponential(size=len(cluster)), cluster, 0.95, 40) for _ in range(2))
    resampler = Resampler(seed=3, replicates=200)
    ratio = Measure((Part("prompts", np.ones(40), np.ones(40)),))
    resampler.estimate(ratio)  # percentiles share the draws of other measures of their stratum
    apart = []
    for counts in resampler._draws("prompts", 40):
        states = np.concatenate(
            [np.flatnonzero(cluster == one) for one in np.repeat(np.arange(40), counts.astype(int))]
        )
        a, b = (np.quantile(one.values[states], 0.95, method="inverted_cdf") for one in (first, second))
        apart.append(b - a)
    found = resampler.difference(first, second)
    assert found.value == pytest.approx(second.value - first.value)
    assert (found.low, found.high) == pytest.approx((np.quantile(apart, 0.025), np.quantile(apart, 0.975)))


def test_one_prompt_has_a_percentile_and_no_interval() -> None:
    assert Resampler(replicates=20).estimate(percentile([1, 2, 3], [0, 0, 0], 0.5, 1)) == Interval(2)


def test_clusters_differ_where_their_own_percentiles_do() -> None:
    first = percentile([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 2], 0.5)
    second = percentile([9, 2, 1, 4, 7, 7], [0, 0, 0, 1, 1, 2], 0.5)
    assert differing(first, second) == 1, "cluster 2 alone: half of 0 is below 2 in both, and nothing is in 3"
    assert differing(first, first) == 0


def test_seeds_of_a_model_have_a_mean_percentile() -> None:
    seeds = Seeded(tuple(percentile([value, value], [0, 1], 0.5, 2) for value in (1.0, 3.0)))
    assert Resampler(replicates=20).estimate(seeds).value == 2
    assert differing(seeds, percentile([2, 4], [0, 1], 0.5, 2)) == 1


# --- answers --------------------------------------------------------------------------------------------------------------


def item(name: str, task: str, measure: Any = "accuracy") -> Item:
    return Item(name, task, None, "yes", exact("yes"), 4, measure)  # type: ignore[arg-type]


ITEMS = [
    *(item(f"c{n}", "choice") for n in range(3)), *(item(f"f{n}", "caption", "facts") for n in range(4)),
    *(item(f"w{n}", "speech", "word errors") for n in range(3)),
]  # fmt: skip


def answers(points: Sequence[tuple[float, float]], text: str) -> list[Answer]:
    return [Answer(one.id, one.task, text, *earned) for one, earned in zip(ITEMS, points, strict=True)]


BEFORE = answers([(1, 1), (0, 1), (1, 1), (3, 4), (3, 4), (4, 4), (2, 2), (1, 5), (0, 5), (2, 5)], "a")
AFTER = answers([(0, 1), (1, 1), (1, 1), (2, 4), (4, 5), (3, 3), (2, 2), (2, 5), (0, 5), (1, 5)], "b")


def test_content_is_worse_or_better_by_what_an_answer_scores() -> None:
    """A wrong letter, a false fact, a wrong word. Another wording, or fewer facts that are all right, is neither."""
    assert values(content_measures(ITEMS, BEFORE, list(reversed(AFTER)))) == {
        "content_worse": pytest.approx(100 * 3 / 10),
        "content_better": pytest.approx(100 * 3 / 10),
    }
    assert values(content_measures(ITEMS, BEFORE, BEFORE)) == {"content_worse": 0, "content_better": 0}


def test_content_agrees_with_a_loop_over_the_scores() -> None:
    better = worse = 0
    for one, was, now in zip(ITEMS, BEFORE, AFTER, strict=True):
        sign = -1 if one.measure == "word errors" else 1
        gain = sign * (now.points / now.total - was.points / was.total)
        better += gain > 0
        worse += gain < 0
    found = values(content_measures(ITEMS, BEFORE, AFTER))
    assert found == {"content_worse": pytest.approx(10 * worse), "content_better": pytest.approx(10 * better)}


# --- the report -----------------------------------------------------------------------------------------------------------


def test_a_difference_of_what_is_neither_better_nor_worse_is_only_a_difference() -> None:
    assert verdict(Interval(2, 1, 3), Label("x", None), True) == "different"
    assert verdict(Interval(2, -1, 3), Label("x", None), False) == "open"
    assert verdict(Interval(0, 0, 0), Label("x", None), False) == "same"


def model(rows: Sequence[State], tokens: Sequence[int] = (1, 2)) -> Results:
    states = bank(rows)
    responses = [Trajectory(prompt, tuple(tokens), True) for prompt in range(8)]
    return Results(states=states, mismatches=mismatches(states), dense_path=states, responses=responses)


def clear(count: int) -> list[State]:
    """Eight prompts of one state, of which so many are clear mismatches."""
    return [(prompt, MISMATCH if prompt < count else AGREE, 1.0, 0.5, 0.1) for prompt in range(8)]


def compared() -> Any:
    dense = Results(responses=[Trajectory(prompt, (1, 2), True) for prompt in range(8)])
    results = {"dense": dense, "A": model(clear(0)), "B": model(clear(8), (1, 3))}
    return summarize([], range(8), results, Resampler(replicates=100))


def test_damage_has_a_table_of_its_own_with_the_dense_model_s_loops() -> None:
    report = compared()
    by_title = {table.title: table for table in tables(report)}
    assert list(by_title) == ["Behaviour", "Damage", "Percentiles"]
    table = by_title["Damage"]
    assert list(table.header) == [
        "", "near ties %", "clear mismatch %", "CWM %", "dense-path mismatch %", "dense-path KL", "reworded %", "length %",
        "loops %",
    ]  # fmt: skip
    shown = {row[0]: [cell.partition(" [")[0] for cell in row[1:]] for row in table.rows}
    assert shown == {
        "dense": ["-", "-", "-", "-", "-", "-", "-", "0.0"],
        "A": ["0.0", "0.0", "0.00", "0.0", "0.1000", "0.0", "100.0", "0.0"],
        "B": ["0.0", "100.0", "50.00", "100.0", "0.1000", "100.0", "100.0", "0.0"],
    }
    assert [row[0] for row in by_title["Percentiles"].rows] == ["A", "B"]
    assert set(report.models["B"].figures) <= set(report.labels)


def test_a_sentence_names_clear_mismatches_and_their_weight_and_leaves_the_rest_to_the_tables() -> None:
    last = sentences(compared())[-1]
    assert "worse in mismatch (" in last
    assert "clear mismatch (+100.00 points [" in last
    assert "CWM (+50.00 points [" in last
    for name in ("near ties", "dense-path", "reworded", "length", "loops", "p99"):
        assert name not in last


def test_items_alone_have_changed_content_and_no_table_of_percentiles() -> None:
    results = {"dense": Results(BEFORE), "A": Results(AFTER)}
    report = summarize(ITEMS, [], results, Resampler(replicates=20))
    by_title = {table.title: table for table in tables(report)}
    assert list(by_title) == ["Answers", "Damage"]
    assert list(by_title["Damage"].header) == ["", "content worse %", "content better %"]
    assert [row[0] for row in by_title["Damage"].rows] == ["A"]
    assert {"content_worse", "content_better"} < set(labels(ITEMS))


def test_what_an_earlier_version_did_not_measure_is_a_dash() -> None:
    states = bank(clear(4))
    earlier = Results(states=states, responses=[Trajectory(prompt, (1, 2), True) for prompt in range(8)])
    report = summarize(
        [], range(8), {"dense": Results(), "old": earlier, "new": model(clear(2))}, Resampler(replicates=20)
    )
    [damage] = [table for table in tables(report) if table.title == "Damage"]
    cells = {row[0]: dict(zip(damage.header[1:], row[1:], strict=True)) for row in damage.rows}
    assert cells["old"]["CWM %"] == cells["old"]["dense-path KL"] == "-"
    assert cells["old"]["clear mismatch %"].startswith("50.0 [")
    assert cells["new"]["CWM %"] != "-"
    assert "reworded %" not in cells["old"], "nothing is known of the dense model's responses"
    assert "clear mismatch" in markdown(report)
