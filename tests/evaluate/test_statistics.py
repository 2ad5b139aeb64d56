"""Paired statistics against brute force, formulas and coverage on made-up data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onptq.bank import AGREE, MISMATCH, States
from onptq.cycle.rounds import bank_figures, first_fork
from onptq.evaluate.answers import Answer
from onptq.evaluate.metrics import Label, behaviour_measures, change_measures, labels, per_prompt, score_measures
from onptq.evaluate.report import notes, sentences, summary_table, tables
from onptq.evaluate.statistics import (
    Interval,
    Measure,
    Part,
    Resampler,
    Seeded,
    differing,
    draw,
    fewest_differing,
    mcnemar,
    spread,
)
from onptq.evaluate.summary import Results, summarize, verdict
from onptq.evaluate.tasks import Item, exact


def ratio(numerator: Any, denominator: Any = None, stratum: str = "s", **options: Any) -> Measure:
    top = np.asarray(numerator, float)
    return Measure(
        (Part(stratum, top, np.ones(len(top)) if denominator is None else np.asarray(denominator, float)),), **options
    )


def item(name: str, task: str = "choice", measure: Any = "accuracy") -> Item:
    return Item(name, task, None, "yes", exact("yes"), 4, measure)  # type: ignore[arg-type]


def answered(name: str, text: str = "yes", points: float = 1, total: float = 1, task: str = "choice") -> Answer:
    return Answer(name, task, text, points, total)


# --- the bootstrap ----------------------------------------------------------------------------------------------------


def test_resamples_are_drawn_with_replacement_as_often_as_there_are_clusters() -> None:
    drawn = draw(7, 300, (1, 2))
    assert drawn.shape == (300, 7)
    assert (drawn.sum(1) == 7).all()
    assert drawn.max() > 1
    assert abs(drawn.mean(0) - 1).max() < 0.25
    assert (drawn == draw(7, 300, (1, 2))).all()
    assert (drawn != draw(7, 300, (2, 2))).any()


def test_an_interval_of_a_difference_is_that_of_a_loop_over_the_same_resamples() -> None:
    rng = np.random.default_rng(0)
    tops, bottoms = rng.normal(size=(2, 40)), rng.integers(1, 9, size=(2, 40))
    resampler = Resampler(seed=5, replicates=400)
    found = resampler.difference(ratio(tops[0], bottoms[0], scale=100), ratio(tops[1], bottoms[1], scale=100))
    loop = []
    for counts in resampler._draws("s", 40):
        rows = np.repeat(np.arange(40), counts.astype(int))
        a, b = (100 * sum(top[rows]) / sum(bottom[rows]) for top, bottom in zip(tops, bottoms, strict=True))
        loop.append(b - a)
    a, b = (100 * top.sum() / bottom.sum() for top, bottom in zip(tops, bottoms, strict=True))
    assert found.value == pytest.approx(b - a)
    assert (found.low, found.high) == pytest.approx((np.quantile(loop, 0.025), np.quantile(loop, 0.975)))


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Prompts are clusters of correlated states: taking states for independent would cover far too rarely."""
    rng, covered = np.random.default_rng(1), 0
    for trial in range(200):
        level = rng.normal(size=60)
        states = rng.integers(3, 20, size=60)
        means = [level + 0.5 + rng.normal(scale=0.3, size=60), level + rng.normal(scale=0.3, size=60)]
        a, b = (ratio(mean * states, states) for mean in means)
        found = Resampler(seed=trial, replicates=200).difference(a, b)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= -0.5 <= found.high
    assert 178 <= covered <= 200


def test_pairing_makes_intervals_narrow_where_two_models_move_together() -> None:
    shared = np.random.default_rng(2).normal(size=50)
    a, b = ratio(shared), ratio(shared + 0.1)
    apart = Resampler().difference(a, b)
    assert apart.value == pytest.approx(0.1)
    assert (apart.low, apart.high) == pytest.approx((0.1, 0.1))
    alone = Resampler().estimate(a)
    assert alone.high is not None
    assert alone.low is not None
    assert alone.high - alone.low > 0.3


def test_tasks_are_resampled_apart_and_averaged_unweighted() -> None:
    rng = np.random.default_rng(3)
    long, short = rng.integers(0, 2, size=80).astype(float), rng.integers(0, 2, size=20).astype(float)
    parts = (Part("long", long, np.ones(80)), Part("short", short, np.ones(20)))
    resampler = Resampler(replicates=500)
    mean, pooled = (resampler.estimate(Measure(parts, 100, how)) for how in ("mean", "sum"))
    assert mean.value == pytest.approx(50 * (long.mean() + short.mean()))
    assert pooled.value == pytest.approx(100 * np.concatenate((long, short)).mean())
    draws = [resampler._draws(name, size) for name, size in (("long", 80), ("short", 20))]
    loop = 50 * (draws[0] @ long / 80 + draws[1] @ short / 20)
    assert (mean.low, mean.high) == pytest.approx((np.quantile(loop, 0.025), np.quantile(loop, 0.975)))
    assert not np.array_equal(resampler._draws("one", 20), resampler._draws("two", 20))


def test_what_cannot_be_measured_has_no_interval() -> None:
    resampler = Resampler(replicates=50)
    assert resampler.estimate(ratio([0, 0], [0, 0])) == Interval(None)
    assert resampler.estimate(ratio([3.0])) == Interval(3.0)
    both = Measure((Part("a", np.zeros(2), np.zeros(2)), Part("b", np.ones(3), np.ones(3))), 100, "mean")
    assert resampler.estimate(both) == Interval(100, 100, 100)
    rare = resampler.estimate(
        ratio([0, 0, 0, 2.0], [0, 0, 0, 1.0], "rare")
    )  # resamples without the last cluster say nothing
    assert rare == Interval(2, 2, 2)


def test_equal_models_differ_by_exactly_nothing() -> None:
    values = np.random.default_rng(4).normal(size=30) / 3
    found = Resampler(replicates=100).difference(ratio(values, scale=100), ratio(values.copy(), scale=100))
    assert found == Interval(0, 0, 0)


def test_the_last_bits_of_a_sum_are_no_difference() -> None:
    """The same shares, summed over other numbers of states, differ in the last bit of every resample."""
    numerators, denominators = np.array([0.1, 0.2, 0.3, 0.7] * 5), np.array([1.0, 3.0, 7.0, 9.0] * 5)
    first, second = ratio(numerators, denominators), ratio(numerators / 3, denominators / 3)
    resampler = Resampler(replicates=300)
    apart = resampler._distribution(second) - resampler._distribution(first)
    assert 0 < np.abs(apart).max() < 1e-12, "the case occurs"
    assert resampler.difference(first, second) == Interval(0, 0, 0)
    assert resampler.difference(first, ratio(numerators + 1e-6, denominators)).value != 0


def test_a_stratum_has_one_size() -> None:
    resampler = Resampler(replicates=10)
    resampler.estimate(ratio([1, 2]))
    with pytest.raises(ValueError, match="2 clusters in one measure, 3 in another"):
        resampler.estimate(ratio([1, 2, 3]))


# --- several seeds ------------------------------------------------------------------------------------------------------


def loop_over_resamples(resampler: Resampler, tops: np.ndarray, bottoms: np.ndarray) -> np.ndarray:
    """The mean over drawn seeds of sum(top) / sum(bottom) over drawn clusters; tops and bottoms [seeds, clusters]."""
    seeds, clusters = tops.shape
    found = []
    for drawn_seeds, drawn in zip(resampler._draws_of_seeds(seeds), resampler._draws("s", clusters), strict=True):
        rows = np.repeat(np.arange(clusters), drawn.astype(int))
        chosen = np.repeat(np.arange(seeds), drawn_seeds.astype(int))
        assert (len(rows), len(chosen)) == (clusters, seeds)
        found.append(np.mean([sum(tops[seed][rows]) / sum(bottoms[seed][rows]) for seed in chosen]))
    return np.array(found)


def seeded(tops: np.ndarray, bottoms: np.ndarray) -> Seeded:
    return Seeded(tuple(ratio(top, bottom) for top, bottom in zip(tops, bottoms, strict=True)))


def test_an_interval_of_several_seeds_is_that_of_a_loop_that_draws_seeds_and_clusters() -> None:
    rng = np.random.default_rng(6)
    tops, bottoms = rng.normal(size=(3, 3, 30)) + rng.normal(size=(3, 3, 1)), rng.integers(1, 9, size=(3, 3, 30))
    resampler = Resampler(seed=4, replicates=300)
    first, second = (seeded(tops[model], bottoms[model]) for model in (0, 1))
    loops = [loop_over_resamples(resampler, tops[model], bottoms[model]) for model in (0, 1)]
    values = [np.mean(tops[model].sum(1) / bottoms[model].sum(1)) for model in (0, 1)]
    alone = resampler.estimate(first)
    assert alone.value == pytest.approx(values[0])
    assert (alone.low, alone.high) == pytest.approx(tuple(np.quantile(loops[0], (0.025, 0.975))))
    apart = resampler.difference(first, second)
    assert apart.value == pytest.approx(values[1] - values[0])
    assert (apart.low, apart.high) == pytest.approx(tuple(np.quantile(loops[1] - loops[0], (0.025, 0.975))))
    one = ratio(tops[2][0], bottoms[2][0])
    against_one = resampler.difference(one, second)
    expected = loops[1] - loop_over_resamples_of_one(resampler, tops[2][0], bottoms[2][0])
    assert (against_one.low, against_one.high) == pytest.approx(tuple(np.quantile(expected, (0.025, 0.975))))


def loop_over_resamples_of_one(resampler: Resampler, top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    rows = [np.repeat(np.arange(len(top)), drawn.astype(int)) for drawn in resampler._draws("s", len(top))]
    return np.array([sum(top[each]) / sum(bottom[each]) for each in rows])


def test_an_interval_of_several_seeds_knows_how_far_the_seeds_lie_apart() -> None:
    """Two recipes that differ by chance alone: over prompts of one seed each the difference would look certain."""
    rng, covered, covered_by_one = np.random.default_rng(7), 0, 0
    for trial in range(100):
        tops = rng.normal(size=(2, 8, 1)) + 0.3 * rng.normal(size=(2, 8, 40))
        models, resampler = [seeded(each, np.ones((8, 40))) for each in tops], Resampler(trial, replicates=150)
        for measures, among in ((models, "seeds"), ([each.seeds[0] for each in models], "one")):
            found = resampler.difference(measures[0], measures[1])
            assert found.low is not None
            assert found.high is not None
            if among == "seeds":
                covered += found.low <= 0 <= found.high
            else:
                covered_by_one += found.low <= 0 <= found.high
    assert covered >= 84
    assert covered_by_one < 30


def test_seeds_are_paired_and_their_draws_change_nothing_else() -> None:
    values = np.random.default_rng(8).normal(size=(4, 1)) * np.ones((4, 20))
    first, second = seeded(values, np.ones((4, 20))), seeded(values + 0.1, np.ones((4, 20)))
    resampler = Resampler(seed=2, replicates=200)
    apart = resampler.difference(first, second)
    assert (apart.low, apart.high) == pytest.approx((0.1, 0.1))
    one = ratio(np.arange(20.0))
    assert resampler.estimate(one) == Resampler(seed=2, replicates=200).estimate(one)
    assert (resampler._draws_of_seeds(4) == Resampler(seed=2, replicates=200)._draws_of_seeds(4)).all()


def test_equal_seeds_give_the_interval_of_one_of_them() -> None:
    top, bottom = np.random.default_rng(9).normal(size=25), np.ones(25)
    resampler = Resampler(replicates=200)
    alone, three = resampler.estimate(ratio(top, bottom)), seeded(np.tile(top, (3, 1)), np.tile(bottom, (3, 1)))
    found = resampler.estimate(three)
    assert (found.value, found.low, found.high) == pytest.approx((alone.value, alone.low, alone.high))
    assert spread(three) == pytest.approx(0)
    assert resampler.difference(ratio(top, bottom), three) == Interval(0, 0, 0)
    assert differing(ratio(top, bottom), three) == 0
    assert differing(ratio(top + np.eye(25)[3], bottom), three) == 1


def test_the_spread_is_the_standard_deviation_over_seeds_and_unknown_seeds_do_not_count() -> None:
    tops = np.array([[1.0, 3.0], [2.0, 2.0], [4.0, 6.0]])
    assert spread(seeded(tops, np.ones((3, 2)))) == pytest.approx(np.std([2, 2, 5], ddof=1))
    half = seeded(tops, np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]))
    assert Resampler(replicates=50).estimate(half).value == pytest.approx(3.5)
    assert spread(half) == pytest.approx(np.std([2, 5], ddof=1))
    assert spread(seeded(tops[:2], np.zeros((2, 2)))) is None


# --- exact tests --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
@settings(max_examples=60, deadline=None)
def test_mcnemar_is_the_two_sided_binomial_test_of_the_discordant_items(pairs: list[tuple[bool, bool]]) -> None:
    first, second = (np.array([pair[side] for pair in pairs], bool) for side in (0, 1))
    found = mcnemar(first, second)
    b, c = sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs)
    assert (found.only_first, found.only_second) == (b, c)
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
    assert found.p == pytest.approx(min(1.0, 2 * tail))


def test_a_difference_needs_enough_differing_clusters_to_be_told_from_chance() -> None:
    """One flipped answer among thousands resamples to an interval that never crosses zero; five prove no more."""
    assert [fewest_differing(level) for level in (0.9, 0.95, 0.99)] == [5, 6, 8]
    for level in (0.9, 0.95, 0.99):
        fewest = fewest_differing(level)
        assert 2 * 0.5**fewest <= 1 - level < 2 * 0.5 ** (fewest - 1)


def test_clusters_differ_where_their_shares_do() -> None:
    a, b = ratio([1, 2, 0, 4], [1, 2, 0, 5]), ratio([2, 2, 0, 4], [2, 4, 0, 5])
    assert differing(a, b) == 1  # 1/1 and 2/2 are the same share, nothing of nothing is none
    assert differing(ratio([1, 2, 3], [1, 2, 3]), ratio([2, 4, 6], [2, 4, 6])) == 0, "though all numerators differ"
    assert differing(ratio([1, 2, 3], [1, 2, 3]), ratio([1, 2, 3], [2, 4, 6])) == 3, "though no numerator does"


@pytest.mark.parametrize(
    ("value", "less_is_better", "told", "expected"),
    [
        (-2.0, True, True, "better"),
        (-2.0, False, True, "worse"),
        (2.0, True, True, "worse"),
        (2.0, False, True, "better"),
        (2.0, False, False, "open"),
    ],
)
def test_a_verdict_knows_which_way_is_better(value: float, less_is_better: bool, told: bool, expected: str) -> None:
    assert verdict(Interval(value, value - 1, value + 1), Label("x", less_is_better), told) == expected


def test_no_difference_is_said_to_be_none() -> None:
    assert verdict(Interval(0, 0, 0), Label("x"), False) == "same"
    assert verdict(Interval(0, -1, 1), Label("x"), False) == "open"
    assert verdict(Interval(None), Label("x"), False) == "unknown"


# --- states -------------------------------------------------------------------------------------------------------------


def states(*rows: tuple[int, int, bool, float, float, float]) -> States:
    """(prompt, t, whether the decision differs, erosion, js, kl)."""
    prompt, t, differs, erosion, js, kl = (np.array(column) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), np.int32)
    return States.compared(
        prompt=prompt, t=t, token=zeros, reference=zeros, competitor=zeros, quantized=zeros, margin_dense=erosion,
        margin_quant=erosion, erosion=erosion, js=js, kl=kl, kind=np.where(differs, MISMATCH, AGREE),
    )  # fmt: skip


FORKED = states(
    (0, 1, False, 0.0, 1.0, 10.0), (0, 2, True, 2.0, 2.0, 20.0), (0, 3, False, 0.5, 4.0, 40.0), (0, 4, True, 1.0, 8.0, 80.0),
    (1, 1, False, 0.0, 16.0, 160.0), (1, 2, False, 0.5, 32.0, 320.0),
    (2, 1, True, 3.0, 64.0, 640.0),
)  # fmt: skip


def test_a_prompt_s_states_lie_before_at_or_after_its_first_fork() -> None:
    sums = {name: column.tolist() for name, column in per_prompt(FORKED, [0, 1, 2]).items()}
    assert sums["common"] == [1, 2, 0]  # without a fork, the whole answer
    assert sums["forked"] == [1, 0, 1]
    assert (sums["states_before_fork"], sums["js_before_fork"]) == ([1, 2, 0], [1, 48, 0])
    assert (sums["states_at_fork"], sums["js_at_fork"], sums["kl_at_fork"]) == ([1, 0, 1], [2, 0, 64], [20, 0, 640])
    assert (sums["states_after_fork"], sums["kl_after_fork"]) == ([2, 0, 0], [120, 0, 0])
    assert (sums["states"], sums["mismatches"], sums["erosion"]) == ([4, 2, 1], [2, 0, 1], [3.5, 0.5, 3])
    reordered = per_prompt(FORKED, [2, 0, 1])
    assert all(reordered[name].tolist() == [column[2], column[0], column[1]] for name, column in sums.items())


def test_behaviour_is_averaged_over_states_and_forks_over_prompts_as_a_bank_is() -> None:
    found = {
        name: Resampler(replicates=50).estimate(m).value for name, m in behaviour_measures(FORKED, [0, 1, 2]).items()
    }
    bank = bank_figures(FORKED)
    for name, key in (("kl", "kl"), ("js", "js"), ("mismatch", "mismatch_percent"), ("erosion", "erosion")):
        assert found[name] == pytest.approx(bank[key])
    assert found["first_fork"] == pytest.approx(first_fork(FORKED)) == 1
    assert found["js_before_fork"] == pytest.approx(49 / 3)
    assert found["js_after_fork"] == pytest.approx(12 / 2)
    assert found["forked"] == pytest.approx(200 / 3)


def test_the_noise_floor_is_how_often_decoding_wrote_another_token_than_the_forward_chooses() -> None:
    """Whatever the dense model says: here no decision of it differs."""
    count = len(FORKED)
    wrote = FORKED.with_columns(kind=np.full(count, AGREE), token=np.array([1, 0, 0, 2, 0, 0, 3], np.int32))
    found = behaviour_measures(wrote, [0, 1, 2])
    assert per_prompt(wrote, [0, 1, 2])["disagreements"].tolist() == [2, 0, 1]
    resampler = Resampler(replicates=50)
    assert resampler.estimate(found["noise"]).value == pytest.approx(100 * 3 / 7)
    assert resampler.estimate(found["noise"]).value == pytest.approx(
        100 * bank_figures(wrote)["rollout_disagreements"] / count
    )
    assert resampler.estimate(found["mismatch"]).value == 0
    assert labels([])["noise"].less_is_better is None


def test_without_any_fork_nothing_is_after_it() -> None:
    never = behaviour_measures(states((0, 1, False, 0.0, 1.0, 1.0), (1, 1, False, 0.0, 2.0, 1.0)), [0, 1])
    resampler = Resampler(replicates=50)
    assert resampler.estimate(never["js_after_fork"]) == Interval(None)
    assert resampler.estimate(never["js_before_fork"]).value == pytest.approx(1.5)


# --- answers ------------------------------------------------------------------------------------------------------------


def test_flips_changes_and_scores_are_measured_item_by_item() -> None:
    items = [*(item(f"c{n}") for n in range(4)), item("f", "caption", "facts"), item("w", "speech", "word errors")]
    dense = [
        answered("c0"), answered("c1"), answered("c2", "no", 0), answered("c3", "no", 0),
        answered("f", "a", 3, 4, "caption"), answered("w", "b", 1, 5, "speech"),
    ]  # fmt: skip
    other = [
        answered("c0"), answered("c1", "no", 0), answered("c2"), answered("c3", "none", 0),
        answered("f", "c", 1, 2, "caption"), answered("w", "b", 1, 5, "speech"),
    ]  # fmt: skip
    resampler = Resampler(replicates=50)
    changes = {
        name: resampler.estimate(m).value for name, m in change_measures(items, dense, list(reversed(other))).items()
    }
    assert changes == {
        "flips": 50,
        "changed": pytest.approx(100 * 4 / 6),
        "changed_wrong": 25,
    }
    scores = {name: resampler.estimate(m).value for name, m in score_measures(items, other).items()}
    assert scores == {"choice": 50, "caption": 50, "speech": 20, "average": 50}
    known = labels(items)
    assert (known["speech"].name, known["speech"].less_is_better) == ("speech WER", True)
    assert (known["choice"].less_is_better, known["average"].less_is_better) == (False, False)
    assert set(scores) | set(changes) <= set(known)


def test_a_task_of_word_errors_alone_has_no_average() -> None:
    items = [item("w", "speech", "word errors")]
    assert set(score_measures(items, [answered("w", task="speech")])) == {"speech"}
    assert "average" not in labels(items)
    assert set(change_measures(items, [answered("w", task="speech")], [answered("w", task="speech")])) == {"changed"}


# --- pairs --------------------------------------------------------------------------------------------------------------


def test_flips_that_cancel_in_the_score_are_told_by_their_own_test() -> None:
    """B loses four answers and gains four: as good as A by score, and eight flips to none."""
    items = [item(f"c{n}") for n in range(40)]

    def model(wrong: set[int]) -> Results:
        return Results([answered(f"c{n}", "no" if n in wrong else "yes", n not in wrong) for n in range(40)])

    wrong = set(range(20))
    results = {"dense": model(wrong), "A": model(wrong), "B": model(wrong - {0, 1, 2, 3} | {20, 21, 22, 23})}
    report = summarize(items, [], results, Resampler(replicates=200), "some model")
    pair = report.pairs[-1]
    assert (pair.first, pair.second) == ("A", "B")
    assert pair.mcnemar["right"].to_dict() == {"only_first": 4, "only_second": 4, "p": pytest.approx(1)}
    assert pair.mcnemar["flips"].to_dict() == {"only_first": 0, "only_second": 8, "p": pytest.approx(2 / 2**8)}
    assert pair.verdicts == {
        "choice": "open", "average": "open", "flips": "worse", "changed": "worse", "changed_wrong": "same",
        "content_worse": "open", "content_better": "open",
    }  # fmt: skip
    first, second, last = sentences(report)
    assert first == "A against dense: no difference in anything measured."
    assert "8 of 40 answers flipped, 4 to wrong and 4 to right (McNemar p = 1)" in second
    assert last.startswith("B against A: worse in flips (+20.00 points [")
    assert "McNemar p = 0.0078), answers changed (" in last
    assert "not distinguishable in choice (+0.00 points [" in last


def test_one_flipped_answer_is_no_difference_though_its_interval_leaves_zero_out() -> None:
    items = [item(f"c{n}") for n in range(2)]
    results = {
        "dense": Results([answered("c0"), answered("c1")]),
        "A": Results([answered("c0", "no", 0), answered("c1", "no", 0)]),
    }
    [pair] = summarize(items, [], results, Resampler(replicates=50)).pairs
    assert pair.differences["choice"] == Interval(-100, -100, -100)
    assert pair.differing["choice"] == 2
    assert pair.verdicts["choice"] == "open"


def test_an_answer_that_earns_a_part_of_its_points_is_wrong() -> None:
    items = [item(f"c{n}") for n in range(8)]
    full, half = ([answered(f"c{n}", text, points) for n in range(8)] for text, points in (("yes", 1), ("ye", 0.5)))
    report = summarize(items, [], {"dense": Results(full), "A": Results(half), "B": Results(full)}, Resampler(0, 50))
    change = report.models["A"].change
    assert change is not None
    assert (change.total.right_to_wrong, change.total.wrong_to_right) == (8, 0)
    assert report.models["A"].figures["flips"].value == 100
    assert report.models["A"].figures["choice"].value == 50
    assert report.pairs[-1].mcnemar["right"].to_dict() == {
        "only_first": 0,
        "only_second": 8,
        "p": pytest.approx(2 / 2**8),
    }


def test_flips_are_judged_by_mcnemars_test_not_by_their_interval() -> None:
    """Of 60 items, A flips 4 and B 13 others: the interval leaves zero out, and chance does so in one of 20 cases."""
    items = [item(f"c{n}") for n in range(60)]

    def model(wrong: range) -> Results:
        return Results([answered(f"c{n}", "no" if n in wrong else "yes", n not in wrong) for n in range(60)])

    results = {"dense": model(range(0)), "A": model(range(4)), "B": model(range(4, 17))}
    pair = summarize(items, [], results, Resampler(replicates=2000)).pairs[-1]
    assert pair.differences["flips"].excludes_zero
    assert pair.differing["flips"] == 17
    assert pair.mcnemar["flips"].p == pytest.approx(2 * sum(math.comb(17, k) for k in range(5)) / 2**17)
    assert pair.mcnemar["flips"].p < 0.05
    assert pair.verdicts["flips"] == "worse"
    results["B"] = model(range(4, 16))
    pair = summarize(items, [], results, Resampler(replicates=2000)).pairs[-1]
    assert pair.differences["flips"].excludes_zero
    assert pair.mcnemar["flips"].p > 0.05
    assert pair.verdicts["flips"] == "open"


# --- candidates with several seeds --------------------------------------------------------------------------------------


def test_a_candidate_with_several_seeds_has_one_row_with_means_and_each_seed_s_own_figures() -> None:
    items = [item(f"c{n}") for n in range(40)]

    def model(wrong: set[int], seconds: float = 1.0) -> Results:
        answers = [answered(f"c{n}", "no" if n in wrong else "yes", n not in wrong) for n in range(40)]
        return Results(answers, cost={"seconds": seconds, "peak_bytes": int(seconds)}, scheme="W4A8")

    wrong = {"onptq:W4A8": {0, 1}, "onptq:W4A8#1": {0, 1, 2, 3}, "masquant:W4A8": set(range(10))}
    results = {"dense": model(set())} | {name: model(each, len(each)) for name, each in wrong.items()}
    seeds = {"onptq:W4A8": ["onptq:W4A8", "onptq:W4A8#1"]}
    report = summarize(items, [], results, Resampler(replicates=300), seeds=seeds)
    assert list(report.models) == ["dense", "onptq:W4A8 (2 seeds)", "masquant:W4A8"]
    ours = report.models["onptq:W4A8 (2 seeds)"]
    assert ours.figures["flips"].value == pytest.approx(7.5)
    assert ours.spread["flips"] == pytest.approx(np.std([5, 10], ddof=1))
    assert (ours.cost["seconds"], ours.cost["peak_bytes"]) == (3, 4)
    alone = summarize(items, [], results, Resampler(replicates=300))
    recorded = report.to_dict()["models"]["onptq:W4A8 (2 seeds)"]
    assert recorded["seeds"] == {name: alone.models[name].to_dict() for name in seeds["onptq:W4A8"]}
    assert recorded["spread"]["choice"] == pytest.approx(np.std([95, 90], ddof=1))
    assert "seeds" not in report.to_dict()["models"]["masquant:W4A8"]
    [pair] = [one for one in report.pairs if one.first != "dense"]
    assert (pair.first, pair.second, dict(pair.mcnemar)) == ("onptq:W4A8 (2 seeds)", "masquant:W4A8", {})
    assert pair.differences["flips"].value == pytest.approx(17.5)
    assert pair.verdicts["flips"] == "worse"
    table = tables(report)[0]
    cells = dict(zip(table.header, table.rows[1], strict=True))
    assert cells["flips"].startswith("7.5 ± 3.54 [")
    assert (cells["to wrong"], cells["to right"]) == ("3.0", "0.0")
    assert "McNemar" not in sentences(report)[-1]
    assert any(note.startswith("Several seeds: figures are means") for note in notes(report))
    assert "Only 2 seeds: " in " ".join(notes(report))
    assert not any("seeds" in note for note in notes(alone))


def test_a_method_that_promises_more_than_it_is_has_its_label_in_every_table() -> None:
    items = [item(f"c{n}") for n in range(8)]
    answers = [answered(f"c{n}") for n in range(8)]
    names = ("masquant:W4A8", "onptq:W4A8@init=masquant", "awq:W4A8")
    results = {"dense": Results(answers)} | {name: Results(answers, scheme="W4A8") for name in names}
    report = summarize(items, [0, 1, 2], results | {"masquant": Results(answers)}, Resampler(replicates=20))
    expected = ["masquant (merged):W4A8", "onptq:W4A8@init=masquant (merged)", "awq:W4A8", "masquant"]
    for table in (*tables(report), summary_table(report)):
        assert [row[0] for row in table.rows if row[0] != "dense"] in (expected, [])
    assert list(report.to_dict()["models"]) == ["dense", *names, "masquant"], "a checkpoint may be the full form"
    assert "awq:W4A8 against masquant (merged):W4A8: no difference in anything measured." in sentences(report)
