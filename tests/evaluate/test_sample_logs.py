"""Per-sample logs: those of lmms-eval 0.7.3 and lm-eval 0.4.13 in sample_logs/, written by `python clients/benchmarks.py`.

dense/ and W4A6/ have the same items; reported.json has the scores that the tools themselves reported for them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from onptq.cli import app
from onptq.errors import OnPTQError
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.sample_logs import changed_answers, edits, paired_arms, read_arm, read_log
from onptq.evaluate.statistics import Resampler
from onptq.evaluate.summary import Report, Results, summarize

LOGS = Path(__file__).with_name("sample_logs")
REPORTED: dict[str, dict[str, float]] = json.loads((LOGS / "reported.json").read_text(encoding="utf-8"))
# What a tool reports, as a share of the items' points.
SCALES = {"ocrbench_accuracy": 16 / 1000, "wer": 100, "mer": 100, "accuracy": 100}


def lines(arm: str, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (LOGS / arm / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def write(folder: Path, *records: Any, name: str = "log.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def sample(number: int = 0, **fields: Any) -> dict[str, Any]:
    return {"doc_id": number, "target": "A", "input": f"Question {number}", "filtered_resps": "A", **fields}


def report_on(**arms: Path) -> tuple[Report, list[dict[str, Any]]]:
    items, answers = paired_arms({name: read_arm(place) for name, place in arms.items()})
    results = {name: Results(given) for name, given in answers.items()}
    return summarize(items, (), results, Resampler(0), "dense"), list(changed_answers(answers))


@pytest.mark.parametrize("arm", ["dense", "W4A6"])
@pytest.mark.parametrize("task", sorted(REPORTED))
def test_the_points_of_a_log_give_the_score_that_the_tool_reported(task: str, arm: str) -> None:
    log = read_log(LOGS / arm / f"{task}.jsonl")
    grades = [one.grade for one in log.samples.values()]
    share = sum(one.points for one in grades) / sum(one.total for one in grades)
    metric = "wer" if log.metric == "word_errors" else log.metric
    assert share * SCALES.get(metric, 1) == pytest.approx(REPORTED[task][arm], abs=1e-6)


def test_the_report_counts_flips_as_a_loop_over_the_logs_does() -> None:
    report, changed = report_on(dense=LOGS / "dense", quantized=LOGS / "W4A6")
    was, now = (
        {one["doc_id"]: one["exact_match"] for one in lines(arm, "scienceqa_known")} for arm in ("dense", "W4A6")
    )
    to_wrong = sum(was[key] == 1 and now[key] == 0 for key in was)
    to_right = sum(was[key] == 0 and now[key] == 1 for key in was)
    change = report.models["quantized"].change
    assert change is not None
    flips = change.flips["scienceqa_known"]
    assert (flips.items, flips.right_to_wrong, flips.wrong_to_right) == (len(was), to_wrong, to_right)
    assert to_wrong + to_right > 0
    scores = report.models["quantized"].scores
    assert scores is not None
    assert scores.tasks["scienceqa_known"].percent == pytest.approx(100 * sum(now.values()) / len(now))
    assert "librispeech_known" not in change.flips
    assert report.labels["librispeech_known"].less_is_better
    other = [
        (task, one["doc_id"])
        for task in REPORTED
        for one, two in zip(lines("dense", task), lines("W4A6", task), strict=True)
        if task != "colours" and one["filtered_resps"] != two["filtered_resps"]
    ]
    named = {(one["task"], int(one["item"].rpartition("/")[2])) for one in changed if one["task"] != "colours"}
    assert named == set(other)


def test_an_arm_against_itself_differs_in_nothing() -> None:
    report, changed = report_on(dense=LOGS / "dense", same=LOGS / "dense")
    assert changed == []
    assert set(report.pairs[0].verdicts.values()) == {"same"}


def test_a_choice_by_likelihood_is_the_likeliest_option() -> None:
    log = read_log(LOGS / "dense" / "colours.jsonl")
    for line in lines("dense", "colours"):
        likelihoods = [float(one[0]) for one in line["filtered_resps"]]
        best = likelihoods.index(max(likelihoods))
        given = log.samples[str(line["doc_id"])]
        assert given.text == f"choice {best}"
        assert given.grade.points == float(best == int(line["target"]))


def test_librispeech_without_counts_is_scored_by_the_normalizer_that_lmms_eval_has_too(tmp_path: Path) -> None:
    bare = [
        {key: value for key, value in one.items() if key != "word_errors"} for one in lines("W4A6", "librispeech_known")
    ]
    log = read_log(write(tmp_path, *bare))
    counted = read_log(LOGS / "W4A6" / "librispeech_known.jsonl")
    assert log.metric == "wer"
    assert [one.grade for one in log.samples.values()] == [one.grade for one in counted.samples.values()]


@pytest.mark.parametrize(
    ("answer", "parsed", "right"),
    [
        ("25", [[25.0, "about 25"]], True),
        ("1,000.004", [[1000.0]], True),
        ("blue", [["it is blue, mostly"]], True),
        ("a", [["a banana"]], True),
        ("a", [["bar"]], False),
        (["red", "crimson"], [["crimson"]], True),
        ("red", [["green"], ["red"]], True),
        ("25", [["about 25"]], False),
    ],
)
def test_open_questions_of_mmmu_are_judged_as_mmmu_judges_them(
    answer: Any, parsed: Any, right: bool, tmp_path: Path
) -> None:
    value = {"id": "x", "question_type": "open", "answer": answer, "parsed_pred": parsed}
    log = read_log(write(tmp_path, sample(mmmu_acc=value)))
    assert log.samples["0"].grade.points == float(right)


def test_the_first_metric_that_grades_every_item_counts_or_the_one_that_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        sample(0, metrics=["bleu", "acc", "acc_norm"], bleu=["a", "b"], acc=1.0, acc_norm=0.0),
        sample(1, metrics=["bleu", "acc", "acc_norm"], bleu=["a", "b"], acc=0.0, acc_norm=0.0),
    )
    assert read_log(path).metric == "acc"
    assert [one.grade.points for one in read_log(path, "acc_norm").samples.values()] == [0, 0]
    with pytest.raises(OnPTQError, match=r"--metric bleu: .* has no such grade of every item; it has acc, acc_norm"):
        read_log(path, "bleu")
    with pytest.raises(OnPTQError, match="grades no item: of bleu"):
        read_log(write(tmp_path, sample(metrics=["bleu"], bleu=["a", "b"])))


def test_lines_of_a_second_filter_do_not_count(tmp_path: Path) -> None:
    strict, flexible = ({"filter": name, "exact_match": value} for name, value in (("strict", 0.0), ("flexible", 1.0)))
    log = read_log(
        write(tmp_path, sample(0, **strict), sample(1, **strict), sample(0, **flexible), sample(1, **flexible))
    )
    assert [one.grade.points for one in log.samples.values()] == [0, 0]


def test_items_with_part_of_the_points_have_no_flips(tmp_path: Path) -> None:
    dense = write(tmp_path, sample(0, exact_match=0.3), sample(1, exact_match=1.0), name="dense.jsonl")
    other = write(tmp_path, sample(0, exact_match=0.6), sample(1, exact_match=0.0), name="other.jsonl")
    report, _ = report_on(dense=dense, other=other)
    change = report.models["other"].change
    assert change is not None
    assert change.flips == {}
    assert report.models["other"].figures["dense"].value == pytest.approx(30)


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([{"text": "x"}], "a record without `doc_id`"),
        ([[1]], "is a list"),
        ([sample()], "grades no item: of no metric"),
        ([sample(acc=1.0), sample(acc=1.0)], "item 0 is there already"),
        ([sample(acc=7.0)], "grades no item: of acc"),
        ([], "has no samples"),
    ],
)
def test_files_that_are_no_logs_are_refused(records: Sequence[Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match=why):
        read_log(write(tmp_path, *records))


def test_arms_with_other_items_prompts_tasks_or_metrics_are_refused(tmp_path: Path) -> None:
    dense = write(tmp_path / "dense", sample(0, acc=1.0), sample(1, acc=1.0), name="t.jsonl")

    def refused(*records: Any, name: str = "t.jsonl") -> str:
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        write(other, *records, name=name)
        with pytest.raises(OnPTQError) as caught:
            report_on(dense=dense.parent, other=other)
        return str(caught.value)

    assert "dense answers 2 items of t, other 1: item 1 is in one alone" in refused(sample(0, acc=1.0))
    assert "asked other questions in 1 of 2 items of t, e.g. item 1" in refused(
        sample(0, acc=0.0), sample(1, acc=1.0, input="Another question")
    )
    assert "is graded by acc" in refused(sample(0, exact_match=1.0), sample(1, exact_match=1.0))
    (tmp_path / "more").mkdir()
    shutil.copytree(dense.parent, tmp_path / "two")
    write(tmp_path / "two", sample(0, acc=1.0), name="u.jsonl")
    with pytest.raises(OnPTQError, match="dense and two have other tasks: u in one alone"):
        report_on(dense=dense.parent, two=tmp_path / "two")
    with pytest.raises(OnPTQError, match=r"has no \.jsonl"):
        report_on(dense=dense.parent, more=tmp_path / "more")


def test_tasks_are_known_by_the_names_that_the_tools_give_their_logs(tmp_path: Path) -> None:
    for name in (
        "20261119_101500_samples_onptq_mmmu_val.jsonl",
        "samples_arc_easy_2026-11-19T10-15-00.123456.jsonl",
        "x.jsonl",
    ):
        write(tmp_path, sample(acc=1.0), name=name)
    assert set(read_arm(tmp_path)) == {"mmmu_val", "arc_easy", "x"}


def test_the_command_prints_flips_and_writes_report_and_changed_answers(tmp_path: Path) -> None:
    words = ["compare", "--samples", str(LOGS / "dense"), f"quantized={LOGS / 'W4A6'}", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "answers flipped" in result.output
    assert "Cost" not in result.output
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(report["models"]) == [DENSE, "quantized"]
    _, changed = report_on(dense=LOGS / "dense", quantized=LOGS / "W4A6")
    assert [json.loads(line) for line in (tmp_path / "changed.jsonl").read_text().splitlines()] == changed
    assert "scienceqa_known" in (tmp_path / "report.md").read_text()


def test_a_log_without_a_name_is_called_after_its_file_or_folder(tmp_path: Path) -> None:
    folder, file = tmp_path / "qwen2.5-vl", tmp_path / "v1.5.jsonl"
    for log in (write(folder, sample(acc=1.0)), file):
        write(log.parent, sample(acc=1.0), name=log.name)
    result = CliRunner().invoke(
        app, ["compare", "--samples", *map(str, (file, folder, file)), "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert list(report["models"]) == [DENSE, "qwen2.5-vl", "v1.5"]


def test_the_command_refuses_two_logs_of_one_name_and_a_metric_without_logs() -> None:
    log = str(LOGS / "dense" / "mmmu_val.jsonl")
    twice = CliRunner().invoke(app, ["compare", "--samples", log, log, log])
    assert twice.exit_code == 2
    assert "two logs are called mmmu_val" in twice.output
    alone = CliRunner().invoke(app, ["compare", "zoo:qwen2.5-vl", "rtn:W4A8", "--metric", "acc"])
    assert alone.exit_code == 2
    assert "expected --samples with it" in alone.output


@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_edits_are_those_of_the_recursive_definition(first: list[str], second: list[str]) -> None:
    @cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        replaced = distance(i - 1, j - 1) + (first[i - 1] != second[j - 1])
        return min(replaced, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    assert edits(first, second) == distance(len(first), len(second))
