"""`python -m benchmarks.suite`: resumed and shared benchmarks, tables made from their reports, goals in words."""

from __future__ import annotations

import copy
import fcntl
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.suite import figures as suite_figures
from benchmarks.suite.__main__ import app
from benchmarks.suite.goals import Standing
from benchmarks.suite.overview import at_a_glance
from benchmarks.suite.pooled import Pooled
from benchmarks.suite.suites import SUITES, BenchmarkData, Suite, benchmark_folder, candidate_names, run_suite
from benchmarks.suite.tables import collect, markdown
from onptq.bank import States, read_trajectories
from onptq.data.manifest import load_manifest
from onptq.errors import OnPTQError
from onptq.evaluate.candidates import MethodCandidate, parse_candidates
from onptq.evaluate.store import path_of
from onptq.evaluate.tasks import Grade, Item
from onptq.page.vega import draw_svg
from onptq.progress import Bar, QuietReporter, Reporter
from onptq.recipe import CYCLES, Recipe
from onptq.run import HOME
from onptq.zoo import catalog

RECIPE = Recipe.preset(
    "light",
    {
        "rounds": 1,
        "init_steps": 2,
        "data.prompts": 3,
        "data.holdout": 1,
        "follow.max_tokens": 6,
        "calibrate.epochs": 1,
        "calibrate.batch": 3,
        "compute.batch_tokens": 200,
    },
)
METHODS = ("rtn", "smoothquant", "static", "uniform", "onptq")


class Killed(BaseException):
    pass


class KillingReporter(QuietReporter):
    def __init__(self, name: str) -> None:
        self.name = name

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        if name == self.name:
            raise Killed
        with super().phase(name, total, unit) as bar:
            yield bar


def data_of(folder: Path) -> BenchmarkData:
    prompts = load_manifest(folder / "prompts.jsonl")
    letters = [Item(f"q{n}", "letter", prompts[n], "", lambda text: Grade(text[:1] < "m"), 2) for n in range(6)]
    transcripts = [
        Item(f"t{n}", "speech", prompts[n], "", lambda text: Grade(text.count("e"), len(text)), 8, "word errors")
        for n in range(3)
    ]
    return BenchmarkData([*letters, *transcripts], prompts[3:], prompts[:3], prompts[3:4])


def run(small: Path, out: Path, suite: Suite, **given: Any) -> dict[str, Any]:
    def draw(family: str, reporter: Reporter) -> BenchmarkData:
        assert family == "qwen2.5-vl"
        return data_of(small)

    return run_suite(suite, out, draw, RECIPE, replicates=100, **given)


def of_models(*models: Path, methods: Sequence[str] = METHODS, schemes: Sequence[str] = ("W4A8",)) -> Suite:
    return Suite("tried", tuple(map(str, models)), tuple(schemes), tuple(methods), None, 3)


@pytest.fixture(scope="module")
def done(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("suite") / "out"
    return out, run(small, out, of_models(small), seeds=[0, 1], critical=True)


def report_of(out: Path, model: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((benchmark_folder(out, str(model)) / "report.json").read_text())
    return report


# --- benchmarks ----------------------------------------------------------------------------------------------------------


def test_the_main_suite_is_every_model_scheme_and_method_on_whole_splits() -> None:
    main = SUITES["main"]
    names = candidate_names(main.methods, main.schemes)
    assert (len(main.models), len(names), len(set(names))) == (5, 7 * 13, 7 * 13)
    assert (main.items, main.prompts, main.preset) == (None, 512, "best")
    assert set(main.models) <= set(catalog.ENTRIES)
    parsed = parse_candidates(names, Recipe.preset(main.preset, main.changes))
    assert {one.recipe.data.prompts for one in parsed if isinstance(one, MethodCandidate)} == {128}


def test_the_suite_of_controls_compares_every_control_with_the_preset_default() -> None:
    controls = SUITES["controls"]
    names = candidate_names(controls.methods, controls.schemes)
    built = parse_candidates(names, Recipe.preset(controls.preset, controls.changes))
    parsed = {one.name: one.recipe for one in built if isinstance(one, MethodCandidate)}
    assert len(parsed) == len(controls.methods) * 3
    own = parsed["onptq:W4A8"]
    assert (own.calibrate.pair, own.calibrate.hidden, own.data.prompts) == (0, 0, 512)
    assert parsed["onptq:W4A8@calibrate.hidden=1,calibrate.pair=0.02"].branches
    assert parsed["onptq:W4A8@init=awq"].init == "awq"
    assert parsed["offpolicy:W4A8"].follow.policy == "dense"
    assert {recipe.calibrate.micro_batch for recipe in parsed.values()} == {8}


def test_further_seeds_are_for_methods_that_have_one() -> None:
    assert candidate_names(["rtn", "onptq"], ["W4A8"], seed=0, seeds=[0, 1, 2]) == [
        "rtn:W4A8", "onptq:W4A8", "onptq:W4A8#1", "onptq:W4A8#2",
    ]  # fmt: skip
    [plain, seeded, preset] = parse_candidates(["onptq:W4A8", "onptq:W4A8#3", "onptq:W4A8@paper#3"], RECIPE)
    assert isinstance(plain, MethodCandidate)
    assert isinstance(seeded, MethodCandidate)
    assert isinstance(preset, MethodCandidate)
    assert seeded.recipe == plain.recipe.with_overrides({"seed": 3})
    assert (preset.name, preset.recipe.seed) == ("onptq:W4A8@paper#3", 3)
    with pytest.raises(OnPTQError, match=f"nothing in rtn is random; only {', '.join(CYCLES)} take a seed"):
        parse_candidates(["rtn:W4A8#1"], RECIPE)
    with pytest.raises(OnPTQError, match="'one' is no seed"):
        parse_candidates(["onptq:W4A8#one"], RECIPE)


def test_uniform_is_onptq_with_every_on_policy_state_weighted_alike() -> None:
    uniform, ours = parse_candidates(["uniform:W4A8", "onptq:W4A8"], RECIPE)
    assert isinstance(uniform, MethodCandidate)
    assert isinstance(ours, MethodCandidate)
    assert uniform.recipe.rounds == RECIPE.rounds
    assert (uniform.recipe.select.rule, ours.recipe.select.rule) == ("all", "risk")
    changed = ours.recipe.model_copy(update={"method": "uniform", "select": uniform.recipe.select})
    assert uniform.recipe == changed
    assert uniform.recipe.select == ours.recipe.select.model_copy(update={"rule": "all"})


@pytest.mark.slow
def test_uniform_calibrates_on_the_states_that_onptq_visits_first(done: Any, small: Path) -> None:
    out, _ = done
    homes = {
        name: benchmark_folder(out, str(small)).joinpath(HOME, *path_of(f"{name}:W4A8", "run", "rounds", "0"))
        for name in METHODS[3:]
    }
    rollouts = [read_trajectories(home / "trajectories.parquet") for home in homes.values()]
    assert rollouts[0] == rollouts[1]
    banks = {name: States.read(home / "bank.parquet") for name, home in homes.items()}
    assert banks["uniform"].weight == pytest.approx(np.full(len(banks["uniform"]), 1 / len(banks["uniform"])))
    assert len(np.unique(banks["onptq"].weight)) > 2


@pytest.mark.slow
def test_benchmarks_have_all_candidates_and_the_tables_have_their_reports_figures(done: Any, small: Path) -> None:
    out, tables = done
    report = report_of(out, small)
    seeded = [f"{method}:W4A8{seed}" for method in ("static", "uniform", "onptq") for seed in ("", "#1")]
    names = ["rtn:W4A8", "smoothquant:W4A8", *seeded]
    assert sorted(report["models"]) == sorted(["dense", *names])
    [benchmark] = tables["benchmarks"]
    [scheme] = benchmark["schemes"]
    assert (benchmark["model"], scheme["scheme"], list(scheme["rows"])) == (str(small), "W4A8", names)
    assert (tables["missing"], benchmark["missing"], scheme["missing"]) == ([], [], [])
    for name, row in scheme["rows"].items():
        assert row["figures"] == report["models"][name]["figures"]
    assert {ours: list(others) for ours, others in scheme["differences"].items()} == {
        "onptq:W4A8": ["rtn:W4A8", "smoothquant:W4A8", "static:W4A8", "uniform:W4A8"],
        "onptq:W4A8#1": ["rtn:W4A8", "smoothquant:W4A8", "static:W4A8#1", "uniform:W4A8#1"],
    }
    for ours, others in scheme["differences"].items():
        for other, row in others.items():
            figures = [report["models"][name]["figures"] for name in (ours, other)]
            for measure in ("mismatch", "erosion", "kl", "flips"):
                first, second = (one[measure]["value"] for one in figures)
                assert row[measure]["value"] == pytest.approx(first - second, abs=1e-9)
    assert json.loads((out / "suite.json").read_text()) == json.loads(json.dumps(tables))
    assert (out / "suite.md").read_text() == markdown(tables)


@pytest.mark.slow
def test_killed_or_shared_by_processes_a_suite_ends_with_the_same_tables(small: Path, tmp_path: Path) -> None:
    other = shutil.copytree(small, tmp_path / "other")
    suite = of_models(small, other, methods=("rtn", "smoothquant"), schemes=("W4A8", "W3A8"))
    whole = run(small, tmp_path / "whole", suite)
    with pytest.raises(Killed):
        run(small, tmp_path / "killed", suite, reporter=KillingReporter(f"{other} Compare smoothquant:W4A8"))
    partly = collect(tmp_path / "killed", suite.name, suite.models, suite.schemes, suite.methods)
    assert partly["missing"] == [str(other)]
    assert f"Not measured yet: {other}." in markdown(partly)
    assert without_cost(run(small, tmp_path / "killed", suite)) == without_cost(whole)
    for model in (other, small):
        for scheme in suite.schemes:
            shared = run(small, tmp_path / "shared", suite, models=[str(model)], schemes=[scheme])
    assert without_cost(shared) == without_cost(whole)


def without_cost(tables: Mapping[str, Any]) -> dict[str, Any]:
    copied = copy.deepcopy(dict(tables))
    for benchmark in copied["benchmarks"]:
        for model in (benchmark["dense"], *(one for scheme in benchmark["schemes"] for one in scheme["rows"].values())):
            del model["cost"]
    return copied


@pytest.mark.slow
def test_two_processes_cannot_have_the_same_benchmark(done: Any, small: Path) -> None:
    out, _ = done
    lock = benchmark_folder(out, str(small)) / "onptq" / ".lock"
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OnPTQError, match=f"{lock.parent.parent} is in use by another process"):
            run(small, out, of_models(small))


# --- tables and goals -----------------------------------------------------------------------------------------------------


def verdicts(**by_measure: str) -> dict[str, Any]:
    values = {"better": (-2, -3, -1), "worse": (2, 1, 3), "open": (-1, -2, 1), "same": (0, 0, 0)}
    return {
        name: dict(zip(("value", "low", "high"), values[verdict], strict=True)) | {"verdict": verdict}
        for name, verdict in by_measure.items()
    }


def figures(**values: float) -> dict[str, Any]:
    return {name: {"value": value, "low": value, "high": value} for name, value in values.items()}


def label(name: str, less: bool = True, percent: bool = False) -> dict[str, Any]:
    return {"name": name, "less_is_better": less, "percent": percent, "digits": 1}


LABELS = {
    "read": label("read", False, True),
    "speech": label("speech WER", True, True),
    "average": label("average score", False, True),
    "flips": label("flips", True, True),
    "mismatch": label("mismatch", True, True),
    "erosion": label("erosion"),
    "kl": label("KL"),
    "critical_flips": label("margin flips", True, True),
}


def standing(scheme: str = "W4A8", **changes: Any) -> Standing:
    ours = figures(read=80, speech=9, average=80, flips=2, mismatch=3, erosion=0.5, kl=0.1)
    better = verdicts(flips="better", mismatch="better", erosion="better", kl="better", average="better")
    base = Standing(
        scheme,
        "",
        ours,
        {"awq": figures(read=80.9, speech=8.1), "static": figures(read=70, speech=20)},
        {"awq": better, "static": better},
        [],
        LABELS,
        ["read", "speech"],
    )
    return replace(base, **changes)


def outcomes(one: Standing) -> dict[str, str]:
    return {goal.goal: goal.outcome for goal in one.goals()}


TASKS = "no task more than 1 point behind the best other method"


def test_a_goal_is_met_where_every_interval_excludes_zero() -> None:
    assert outcomes(standing()) == {
        "lowest mismatch": "met",
        "lowest erosion": "met",
        "lowest flips": "met",
        "KL no worse than static": "met",
        TASKS: "met",
    }


@pytest.mark.parametrize("verdict", ["open", "same", "worse"])
def test_one_method_that_is_not_shown_to_be_worse_misses_the_goal_and_is_named(verdict: str) -> None:
    one = standing()
    changed = standing(
        differences=dict(one.differences) | {"awq": dict(one.differences["awq"]) | verdicts(mismatch=verdict)}
    )
    [missed] = [goal for goal in changed.goals() if goal.outcome == "missed"]
    assert missed.goal == "lowest mismatch"
    assert "not shown against awq (" in missed.evidence
    assert "static" not in missed.evidence


def test_kl_may_be_level_with_the_control_but_not_worse() -> None:
    one = standing()
    for verdict, expected in (("open", "met"), ("worse", "missed")):
        changed = standing(
            differences=dict(one.differences) | {"static": dict(one.differences["static"]) | verdicts(kl=verdict)}
        )
        assert outcomes(changed)["KL no worse than static"] == expected


@pytest.mark.parametrize(("task", "value"), [("read", 79.8), ("speech", 9.2)])
def test_a_task_more_than_a_point_behind_is_named_word_errors_included(task: str, value: float) -> None:
    [missed] = [
        goal
        for goal in standing(ours=dict(standing().ours) | figures(**{task: value})).goals()
        if goal.outcome != "met"
    ]
    assert missed.goal == TASKS
    assert missed.evidence.startswith(f"{LABELS[task]['name']} is 1.1 points behind ({value} against ")
    assert "of awq" in missed.evidence


def test_mild_schemes_ask_for_nothing_to_be_worse() -> None:
    one = standing("W8A8")
    level = verdicts(flips="open", mismatch="same", erosion="open", kl="open", average="open")
    level_outcomes = outcomes(standing("W8A8", differences={"awq": level, "static": level}))
    assert level_outcomes == {
        f"{name} no worse than any other method": "met"
        for name in ("mismatch", "erosion", "flips", "KL", "average score")
    }
    worse = outcomes(standing("W8A8", differences=dict(one.differences) | {"awq": level | verdicts(average="worse")}))
    assert [goal for goal, outcome in worse.items() if outcome == "missed"] == [
        "average score no worse than any other method"
    ]


def test_a_goal_is_open_until_every_method_is_measured() -> None:
    assert set(outcomes(standing(missing=["gptq"])).values()) == {"open", "met"}
    assert outcomes(standing(missing=["gptq"]))["KL no worse than static"] == "met"
    taken = standing(ours=dict(standing().ours) | figures(critical_flips=10))
    [goal] = [goal for goal in taken.goals() if goal.goal == "lowest margin flips"]
    assert (goal.outcome, "not measured yet: awq, static" in goal.evidence) == ("open", True)


@pytest.mark.slow
def test_the_order_of_two_models_does_not_turn_their_difference_around(done: Any, small: Path, tmp_path: Path) -> None:
    out, tables = done
    report = report_of(out, small)
    opposite = {"better": "worse", "worse": "better"}
    for pair in report["pairs"]:
        pair["first"], pair["second"] = pair["second"], pair["first"]
        pair["verdicts"] = {name: opposite.get(verdict, verdict) for name, verdict in pair["verdicts"].items()}
        for interval in pair["differences"].values():
            if interval["value"] is not None:
                interval["value"], interval["low"], interval["high"] = (
                    -interval["value"],
                    -interval["high"],
                    -interval["low"],
                )
    home = tmp_path / benchmark_folder(out, str(small)).name
    home.mkdir()
    (home / "report.json").write_text(json.dumps(report))
    assert collect(tmp_path, "tried", [str(small)], ["W4A8"], METHODS) == tables


@pytest.mark.slow
def test_the_table_has_the_best_method_of_a_column_in_bold_and_others_beside_it(
    done: Any, small: Path, tmp_path: Path
) -> None:
    out, _ = done
    report = report_of(out, small)
    values = {"rtn:W4A8": (50.04, 9.0), "onptq:W4A8": (49.96, 3.0), "smoothquant:W4A8": (40, 8.0)}
    for name, (score, errors) in values.items():
        report["models"][name]["figures"] |= figures(letter=score, speech=errors)
    report["models"]["rtn:W4A8"]["figures"] |= figures(mismatch=0)
    report["models"]["peer:W4A8"] = copy.deepcopy(report["models"]["rtn:W4A8"])
    report["models"]["peer:W4A8"]["figures"] |= figures(letter=99, speech=0.1)
    for name in ("static:W4A8", "static:W4A8#1", "uniform:W4A8", "uniform:W4A8#1", "onptq:W4A8#1"):
        del report["models"][name]
    home = tmp_path / "benchmark"
    home.mkdir()
    (home / "report.json").write_text(json.dumps(report))
    lines = markdown(collect(tmp_path, "tried", [str(small)], ["W4A8"], METHODS)).splitlines()
    first = lines[lines.index(next(line for line in lines if line.startswith("| W4A8"))) :]
    cells = [line.strip("| ").split(" | ") for line in first[: first.index("")]]
    rows = {row[0]: row for row in cells}
    head = rows["W4A8"]
    assert head[1:5] == ["letter", "average", "speech WER", "flips %"]
    assert head[-1] == "seconds"
    letter, speech = head.index("letter"), head.index("speech WER")
    assert [rows[name][letter] for name in ("rtn", "onptq", "smoothquant", "peer")] == [
        "**50.0**", "**50.0**", "40.0", "99.0",
    ]  # fmt: skip
    assert [rows[name][speech] for name in ("rtn", "onptq", "peer")] == ["9.0", "**3.0**", "0.1"]
    assert any("**" in cell for cell in rows["rtn"][head.index("flips %") :])
    assert not any("**" in cell for cell in rows["peer"])  # though it equals rtn there
    assert any(line.startswith("Not measured yet: ") and line.endswith("W4A8 (static, uniform).") for line in lines)


def test_the_picture_in_the_docs_is_that_of_the_committed_tables() -> None:
    """Its specification is drawn as those of pages are."""
    root = Path(__file__).parents[2]
    rows = list(suite_figures.read((root / "results/suite.md").read_text(), "mismatch %"))
    assert len(rows) == 5 * (7 * 13 - 3)  # blockwise was not measured in three schemes
    assert {"model": "zoo:qwen2.5-vl", "scheme": "W4A16", "method": "awq", "value": 2.4} in rows
    drawn, kept = (
        (re.findall(r"<text[^>]*>([^<]*)<", svg), svg.count('fill="#8A8A8A"'), svg.count('fill="#D55E00"'))
        for svg in (
            draw_svg(suite_figures.plot(rows, "mismatch %")),
            (root / "docs/assets/suite-mismatch.svg").read_text(),
        )
    )
    assert drawn == kept
    assert {"W4A8", "changed decisions, %", "OnPTQ", "search+signround"} <= set(kept[0])


# --- the command ----------------------------------------------------------------------------------------------------------


def unit(scheme: str, values: Mapping[str, float], others: Mapping[str, str]) -> dict[str, Any]:
    """A scheme of a benchmark: mismatch of every method, and the verdict on OnPTQ against the others."""
    rows = {
        f"{name}:{scheme}": {"label": name, "of_the_suite": True, "figures": figures(mismatch=value)}
        for name, value in values.items()
    }
    differences = {
        f"{name}:{scheme}": {"mismatch": {"verdict": verdict, "value": values["onptq"] - values[name]}}
        for name, verdict in others.items()
    }
    return {"scheme": scheme, "rows": rows, "differences": {f"onptq:{scheme}": differences}}


def test_at_a_glance_counts_verdicts_and_means_only_what_all_benchmarks_have() -> None:
    mine = [
        unit("W4A8", {"rtn": 5.0, "awq": 3.0, "onptq": 1.0}, {"rtn": "better", "awq": "open"}),
        unit("W3A8", {"rtn": 9.0, "awq": 2.0, "onptq": 4.0}, {"rtn": "better", "awq": "worse"}),
    ]
    other = [unit("W4A8", {"rtn": 6.0, "onptq": 2.0}, {"rtn": "same"})]
    labels = {"mismatch": label("mismatch", percent=True)}
    tables = {"benchmarks": [{"labels": labels, "schemes": mine}, {"labels": labels, "schemes": other}]}
    lines = list(at_a_glance(tables))
    assert "| rtn | 2 / 1 / 0 |" in lines
    assert "| awq | 0 / 1 / 1 |" in lines
    assert "| mismatch % | W4A8 (2) | W3A8 (1) |" in lines
    assert "| rtn | -4.33 | 0 / 3 | 0.25 | 0.25 |" in lines
    assert "| awq | +0.00 | 1 / 1 | 1 | 1 |" in lines
    assert any("are nominal" in line for line in lines)
    means = lines[lines.index("| mismatch % | W4A8 (2) | W3A8 (1) |") + 2 :]
    assert [line.replace(" ", "") for line in means] == ["|rtn|5.5|9.0|", "|awq|-|**2.0**|", "|onptq|**1.5**|4.0|"]
    assert list(at_a_glance({"benchmarks": [{"labels": labels, "schemes": other}]})) == []


def naive_signed_rank_p(differences: Sequence[float]) -> float:
    """Every way of giving signs to the ranks: in how many the positive ones sum to something as far from the middle."""
    apart = sorted((one for one in differences if one), key=abs)
    middle = len(apart) * (len(apart) + 1) / 4
    found = abs(sum(rank for rank, one in enumerate(apart, start=1) if one > 0) - middle)
    sums = [
        sum(rank for rank, sign in enumerate(signs, start=1) if sign)
        for signs in product((False, True), repeat=len(apart))
    ]
    return sum(abs(one - middle) >= found for one in sums) / len(sums)


def test_pooled_differences_are_tested_by_their_signs_and_by_their_ranks() -> None:
    """Uniform weights change fewer decisions in nine of eleven pairs by a little, onptq in two by a lot, one pair is level."""
    differences = [0.1, 0.2, 0.3, 0.15, 0.25, 0.05, 0.12, 0.22, 0.31, -0.9, -0.8, 0.0]
    found = Pooled.of(differences)
    assert found.mean == pytest.approx(0.0)
    assert (found.higher, found.lower) == (9, 2)
    assert found.sign_p == pytest.approx(2 * sum(math.comb(11, k) for k in range(3)) / 2**11)
    assert found.signed_rank_p == pytest.approx(naive_signed_rank_p(differences))
    assert found.signed_rank_p > 0.2
    assert Pooled.of([-one for one in differences]).sign_p == found.sign_p
    assert Pooled.of([0.0, 0.0]) == Pooled(0.0, 0, 0, 1.0, 1.0)
    assert Pooled.of([0.5]).sign_p == 1.0


def test_a_merged_method_is_called_so_in_the_tables_of_a_suite(tmp_path: Path) -> None:
    measured = {"figures": figures(mismatch=1.0), "cost": {"seconds": 1.0}}
    names = ("masquant:W4A8", "onptq:W4A8")
    difference = {"value": 0.5, "low": 0.1, "high": 0.9}
    report = {
        "dense": "some", "prompts": 4, "bootstrap": {"confidence": 0.95, "replicates": 9}, "labels": LABELS,
        "models": {"dense": {"figures": {}, "cost": {}}} | dict.fromkeys(names, measured),
        "pairs": [{"first": names[0], "second": names[1], "differences": {"mismatch": difference},
                   "verdicts": {"mismatch": "worse"}}],
    }  # fmt: skip
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "report.json").write_text(json.dumps(report))
    text = markdown(collect(tmp_path, "tried", ["some"], ["W4A8"], ["masquant", "onptq"]))
    assert "| masquant (merged) | **1.0** | 1.0 |" in text
    assert "| masquant (merged) | +0.50 [+0.10, +0.90] ✗ |" in text
    assert "| masquant |" not in text


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_the_command_runs_a_suite_and_prints_where_its_tables_are(tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen = ("--methods", "rtn", "--tasks", "answer", "--items", 4, "--prompts", 2, "--out", out)
    result = call("smoke", *chosen)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"Tables: {out / 'suite.md'}"
    printed = " ".join(result.stdout.split())
    assert "Only 4 items in a task and 2 prompts: intervals from so few are too narrow" in printed
    assert SUITES["smoke"].caveats[0] in printed
    tables = json.loads((out / "suite.json").read_text())
    [benchmark] = tables["benchmarks"]
    assert (benchmark["model"], benchmark["items"], benchmark["prompts"]) == ("zoo:qwen2.5-vl", {"answer": 4}, 2)
    assert benchmark["schemes"][0]["missing"] == ["static", "onptq"]
    report = (out / "qwen2.5-vl" / "report.md").read_text()
    assert "Measured on embedded items and prompts of the test split." in report
    again = call("smoke", *chosen, "--json")
    assert json.loads(again.stdout.splitlines()[-1])["result"] == tables
    other = call("smoke", *chosen[:4], "--items", 5, *chosen[6:])
    assert (other.exit_code, "holds another run" in other.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["mian"], "unknown suite; expected one of main, controls, floats, smoke"),
        (["smoke", "--schemes", "W4A8,"], "--schemes 'W4A8,': expected names with commas"),
        (["smoke", "--schemes", "int4"], "unknown scheme 'int4'"),
        (["smoke", "--methods", "rnt"], "did you mean rtn?"),
        (["smoke", "--seeds", "a"], "--seeds 'a': expected whole numbers"),
        (["smoke", "--models", "zoo:qwen2.5"], "unknown model 'zoo:qwen2.5'"),
    ],
)
def test_the_command_refuses_unknown_names(tmp_path: Path, arguments: list[str], expected: str) -> None:
    result = call(*arguments, "--out", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_installed_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MODELS", tmp_path / "none")
    result = call("main", "--models", "zoo:qwen3-vl", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "zoo:qwen3-vl is not part of this installation" in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr("benchmarks.suite.__main__.draw_calibration", refuse)
    (tmp_path / "file").write_text("something")
    result = call("smoke", "--out", tmp_path / "file")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is a file; expected a folder" in " ".join(result.stderr.split())


def test_data_that_cannot_be_drawn_are_named_before_any_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    chosen = ("--models", "zoo:qwen2.5-vl,zoo:qwen2.5-omni", "--methods", "rtn", "--tasks", "answer")
    result = call("smoke", *chosen, "--out", tmp_path / "out")
    assert result.exit_code == 2
    error = " ".join(result.stderr.split())
    assert "error: zoo:qwen2.5-omni: speech needs the package espeakng-loader: pip install 'onptq[speech]'" in error
    assert "--models runs the suite on others" in error
    assert not list(tmp_path.iterdir())
