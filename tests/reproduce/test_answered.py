"""Answers to the real benchmarks: the logs that lmms-eval itself wrote, in the paper's columns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_reproduce_command import call
from test_sample_logs import LOGS, REPORTED

from onptq.errors import OnPTQError
from onptq.evaluate.answers import Answer
from onptq.evaluate.sample_logs import Question, read_log
from onptq.evaluate.statistics import Resampler
from onptq.evaluate.summary import Results, summarize
from onptq.reproduce import main_table
from onptq.reproduce.answered import COLUMNS, parse_arm, read_given
from onptq.reproduce.compared import Compared
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.settings import Settings

# The same items in known words, under the names that the benchmarks have.
NAMED = {"scienceqa_known": "scienceqa_img", "librispeech_known": "librispeech_test_clean"}
BENCHMARKS = ("MMMU", "OCRBench", "VizWiz", "ScienceQA", "TextVQA")
TASKS = {"MMMU": "mmmu_val", "OCRBench": "ocrbench", "VizWiz": "vizwiz_vqa_val", "ScienceQA": "scienceqa_known"}


@pytest.fixture(scope="module")
def evals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of answers: the dense model's, those of W4A6 as RTN's, and the dense model's again as OnPTQ's."""
    out = tmp_path_factory.mktemp("evals")
    for arm, log in (("dense", "dense"), ("rtn", "W4A6"), ("onptq", "dense")):
        for file in (LOGS / log).iterdir():
            (out / arm).mkdir(exist_ok=True)
            shutil.copyfile(file, out / arm / f"{NAMED.get(file.stem, file.stem)}.jsonl")
    return out


def options(evals: Path, out: Path) -> list[object]:
    arms = {"dense": "dense", "rtn:w4a6": "rtn", "onptq:W4A6": "onptq"}
    given = [word for arm, folder in arms.items() for word in ("--answers", f"{arm}={evals / folder}")]
    return [*given, "--out", out]


def page(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


def cells(table: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table["heads"], row, strict=True)) for row in table["rows"]}


def accuracy(arm: str, task: str) -> float:
    """The score of a log, from what the tool reported; OCRBench's is out of 1,000 items, of which 16 were asked."""
    return 100 * REPORTED[task][arm] * (1000 / 16 if task == "ocrbench" else 1)


def test_tables_1_and_2_and_the_flips_are_made_of_given_answers_in_the_papers_columns(
    evals: Path, tmp_path: Path
) -> None:
    done = call("run", "main-table", "flip-rate", "omni-table", *options(evals, tmp_path))
    assert done.exit_code == 0, done.stderr
    assert "Elapsed: " in done.stdout

    vision = page(tmp_path, "main-table")
    here = cells(vision["tables"][0])
    assert list(here) == ["Dense", "RTN", "OnPTQ"]
    for row, arm in (("Dense", "dense"), ("RTN", "W4A6"), ("OnPTQ", "dense")):
        scores = [accuracy(arm, task) for task in TASKS.values()]
        assert [float(here[row][name]) for name in TASKS] == pytest.approx(scores, abs=0.051)
        assert float(here[row]["average score"]) == pytest.approx(np.mean(scores), abs=0.051)
    assert "TextVQA" not in here["Dense"]
    assert "Not answered: TextVQA. The average is over the others." in vision["differs"]
    [claim] = vision["claims"]
    assert claim["says"] == "OnPTQ has the highest average of all methods in W4A6"
    assert "65.8 against 63.0 (MASQuant)" in claim["paper"]

    omni = page(tmp_path, "omni-table")
    here = cells(omni["tables"][0])
    assert float(here["Dense"]["WenetSpeech WER"]) == pytest.approx(
        REPORTED["wenet_speech_test_net"]["dense"], abs=0.051
    )
    assert float(here["RTN"]["LibriSpeech WER"]) == pytest.approx(REPORTED["librispeech_known"]["W4A6"], abs=0.051)
    assert float(here["RTN"]["OmniBench"]) == pytest.approx(REPORTED["omni_bench"]["W4A6"], abs=0.051)
    assert [claim["says"].removeprefix("OnPTQ has the ").split(" (")[0] for claim in omni["claims"]] == [
        "lowest word error rate on LibriSpeech in W4A6",
        "lowest word error rate on WenetSpeech in W4A6",
        "highest accuracy on MMMU in W4A6",
        "highest accuracy on OmniBench",
    ]

    flips = page(tmp_path, "flip-rate")
    rows = {row[1]: row for row in flips["tables"][0]["rows"]}
    right = {
        arm: [
            one.grade.points == 1
            for task in ("mmmu_val", "scienceqa_known")
            for one in read_log(LOGS / arm / f"{task}.jsonl").samples.values()
        ]
        for arm in ("dense", "W4A6")
    }
    changed = np.array(right["dense"]) != np.array(right["W4A6"])
    assert float(rows["RTN"][2].split()[0]) == pytest.approx(100 * changed.mean(), abs=0.051)
    assert [float(cell) for cell in rows["RTN"][5:]] == pytest.approx(
        [100 * changed[:16].mean(), 100 * changed[16:].mean()], abs=0.051
    )
    assert rows["OnPTQ"][2].startswith("0.0 ")
    assert flips["tables"][0]["heads"][5:] == ["MMMU flips %", "ScienceQA flips %"]


def test_both_parts_of_a_benchmark_are_one_column(evals: Path, tmp_path: Path) -> None:
    for arm in ("dense", "rtn"):
        shutil.copytree(evals / arm, tmp_path / arm)
        shutil.copyfile(evals / "rtn" / "librispeech_test_clean.jsonl", tmp_path / arm / "librispeech_test_other.jsonl")
    arms = (("dense", tmp_path / "dense"), ("rtn:W4A6", tmp_path / "rtn"))
    found = read_given(Settings(out=tmp_path, answers=arms), ["LibriSpeech"], ["W4A6"])
    assert found.columns == {"LibriSpeech": ["librispeech_test_clean", "librispeech_test_other"]}
    assert {one.task for one in found.questions} == {"LibriSpeech"}
    grades = [
        one.grade
        for arm in ("dense", "W4A6")
        for one in read_log(LOGS / arm / "librispeech_known.jsonl").samples.values()
    ]
    expected = 100 * sum(one.points for one in grades) / sum(one.total for one in grades)
    assert found.compared.figure("dense", "LibriSpeech").value == pytest.approx(expected)


def test_a_comparison_is_narrowed_to_some_items_whose_average_is_over_the_seeds() -> None:
    questions = [Question(f"{task}/{number}", task, "accuracy") for task in ("a", "b", "c") for number in range(8)]

    def answers(right: dict[str, int]) -> list[Answer]:
        """So many right answers to the first items of each task."""
        return [
            Answer(one.id, one.task, "", float(int(one.id.partition("/")[2]) < right[one.task]), 1.0)
            for one in questions
        ]

    ours = ["onptq:W4A6", "onptq:W4A6#1"]
    given = {
        "dense": answers({"a": 8, "b": 8, "c": 8}),
        "rtn:W4A6": answers({"a": 4, "b": 4, "c": 8}),
        ours[0]: answers({"a": 8, "b": 4, "c": 0}),
        ours[1]: answers({"a": 8, "b": 8, "c": 0}),
    }
    results = {name: Results(of, scheme=name.partition(":")[2] or None) for name, of in given.items()}
    report = summarize(questions, (), results, Resampler(), seeds={ours[0]: ours})
    seen = Compared(report, Path("nowhere"), given).among([one for one in questions if one.task != "c"])
    assert seen.report.items == 16
    assert seen.seeds(ours[0]) == ours
    assert seen.figure(ours[0], "average").value == pytest.approx(100 * (0.75 + 1) / 2)
    assert seen.gain("rtn:W4A6", ours[0]).value == pytest.approx(37.5)
    assert "c" not in seen.report.labels


def test_methods_without_answers_have_no_row_and_without_ours_no_claim_is_judged(evals: Path, tmp_path: Path) -> None:
    arms = (("dense", evals / "dense"), parse_arm(f"MASQuant:w8a8={evals / 'rtn'}"))
    found = read_given(Settings(out=tmp_path, answers=arms), BENCHMARKS, main_table.SCHEMES)
    page = main_table.result(found.compared, found.schemes, found.differs("a model"), {})
    assert found.schemes == ["W8A8"]
    assert [row[0] for row in page.tables[0].rows] == ["Dense", "MASQuant"]
    assert [claim.verdict for claim in page.claims] == ["not measured"]
    assert any("colours" in text for text in page.differs)  # a task that no column of the paper is of


def test_every_column_of_the_paper_is_a_benchmark() -> None:
    *vision, average = paper("main-table")["columns"]
    assert tuple(vision) == BENCHMARKS
    assert average == "average"
    heard = [column.removesuffix(" WER") for column in paper("omni-table")["columns"]]
    assert {*vision, *heard} == set(COLUMNS)


def test_arms_are_named_by_method_and_scheme() -> None:
    assert parse_arm("dense=a") == ("dense", Path("a"))
    assert parse_arm("masquant:w4a8=a=b") == ("masquant:W4A8", Path("a=b"))
    assert parse_arm("ONPTQ:W4A6=x") == ("onptq:W4A6", Path("x"))
    for text, error in (
        ("dense", "--answers dense: expected dense=FOLDER, or METHOD:SCHEME=FOLDER with one of RTN, AWQ"),
        ("gptq:W4A8=x", "unknown method 'gptq'"),
        ("rtn=x", "unknown method 'rtn'|expected dense=FOLDER"),
        ("rtn:W4=x", "W4"),
    ):
        with pytest.raises(OnPTQError, match=error):
            parse_arm(text)


def test_what_cannot_be_compared_is_refused(evals: Path, tmp_path: Path) -> None:
    def read(*arms: tuple[str, Path]) -> None:
        read_given(Settings(out=tmp_path, answers=arms), BENCHMARKS, ["W4A6"])

    with pytest.raises(OnPTQError, match="expected dense=FOLDER and others"):
        read(("rtn:W4A6", evals / "rtn"))
    with pytest.raises(OnPTQError, match="names an arm twice"):
        read(("dense", evals / "dense"), ("dense", evals / "rtn"))
    (tmp_path / "other").mkdir()
    shutil.copyfile(LOGS / "dense" / "colours.jsonl", tmp_path / "other" / "colours.jsonl")
    with pytest.raises(OnPTQError, match=r"has answers to colours alone; expected some of mmmu_val"):
        read(("dense", evals / "dense"), ("rtn:W4A6", tmp_path / "other"))
    refused = call("run", "signals", *options(evals, tmp_path))
    assert refused.exit_code == 2
    assert "--answers is for main-table, flip-rate, omni-table" in refused.stderr
