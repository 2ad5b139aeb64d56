"""A finished run beside plain rounding and the static control, and the answers that show the difference."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import onptq
from onptq.checkpoint.source import find_source
from onptq.data.manifest import load_manifest
from onptq.errors import OnPTQError
from onptq.evaluate.answers import Answer, read_answers, write_answers
from onptq.evaluate.baselines import compare_with_baselines, comparison_folder, telling_examples
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.comparison import compare_models
from onptq.evaluate.report import markdown
from onptq.evaluate.store import path_of
from onptq.evaluate.summary import Report
from onptq.evaluate.tasks import Grade, Item, exact
from onptq.pipeline import Result
from onptq.progress import Bar, QuietReporter
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import HOME, run_home

TINY: dict[str, Any] = {
    "rounds": 2,
    "init": "smoothquant",
    "data.prompts": 4,
    "data.holdout": 2,
    "follow.max_tokens": 6,
    "calibrate.epochs": 1,
    "calibrate.batch": 2,
    "calibrate.lr_smoothing": 0.05,
    "calibrate.lr_step": 0.05,
    "calibrate.keep": "last",
    "compute.batch_tokens": 200,
}
ROUND_FILES = ("theta.safetensors", "trajectories.parquet", "bank.parquet", "holdout.parquet")


def recipe(method: str = "onptq", changes: Mapping[str, Any] | None = None) -> Recipe:
    return Recipe.preset("risk", TINY | dict(changes or {})).with_overrides({"method": method})


@pytest.fixture(scope="module")
def items(small: Path) -> list[Item]:
    """Items whose answers the random model gives at random: one task right or wrong, one by facts."""
    prompts = load_manifest(small / "prompts.jsonl")
    letters = [Item(f"q{n}", "first letter", prompts[n], "", lambda text: Grade(text[:1] < "m"), 2) for n in range(6)]
    facts = [
        Item(f"t{n}", "tell", prompts[n], "", lambda text: Grade(text.count("e"), len(text)), 8, "facts")
        for n in range(3)
    ]
    return [*letters, *facts]


Quantize = Callable[..., Result]


@pytest.fixture(scope="module")
def quantize(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    """`quantize(method)`: the run of the small model by that method, computed once per module."""
    runs: dict[str, Result] = {}

    def get(method: str = "onptq") -> Result:
        if method not in runs:
            out = tmp_path_factory.mktemp(method) / "out"
            runs[method] = onptq.quantize(
                small, out, calibration=small / "prompts.jsonl", recipe=recipe(method), verify=False
            )
        return runs[method]

    return get


def compare(small: Path, result: Result, items: list[Item], method: str = "onptq", **options: Any) -> Report:
    """As `onptq quantize --evaluate` does it, on the held-out prompts."""
    given = {"prompts": result.prompts.holdout} | options
    return compare_with_baselines(
        find_source(small),
        result.path,
        recipe(method),
        items=items,
        calibration=result.prompts.calibration,
        holdout=result.prompts.holdout,
        **given,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def compared(small: Path, items: list[Item], quantize: Quantize) -> tuple[Result, Report]:
    result = quantize()
    before = files(result.path), files(run_home(result.path))
    report = compare(small, result, items)
    home = {name: content for name, content in files(run_home(result.path)).items() if "comparison/" not in name}
    assert (files(result.path), home) == before  # the run itself is only read
    return result, report


def home_of(result: Result, name: str) -> Path:
    parts = (DENSE,) if name == DENSE else path_of(name)
    return comparison_folder(result.path).joinpath(HOME, *parts)


# --- the comparison -------------------------------------------------------------------------------------------------


def test_a_run_is_compared_with_dense_plain_rounding_and_the_static_control(
    compared: tuple[Result, Report], items: list[Item]
) -> None:
    result, report = compared
    assert list(report.models) == ["dense", "rtn", "static", "onptq"]
    folder = comparison_folder(result.path)
    assert folder == run_home(result.path) / "comparison"
    assert json.loads((folder / "report.json").read_text()) == report.to_dict()
    assert (folder / "report.md").read_text() == markdown(report)
    graders = {item.id: item.grade for item in items}
    texts = {}
    for name, model in report.models.items():
        rows = pq.read_table(home_of(result, name) / "answers.parquet").to_pylist()
        assert list(rows[0]) == ["arm", "item", "task", "answer", "points", "total", "disagrees"]
        assert [row["item"] for row in rows] == [item.id for item in items]
        assert {row["arm"] for row in rows} == {name}
        for row in rows:
            earned = graders[row["item"]](row["answer"])
            assert (row["points"], row["total"]) == (earned.points, earned.total)
        for task in ("first letter", "tell"):
            mine = [row for row in rows if row["task"] == task]
            expected = 100 * sum(row["points"] for row in mine) / sum(row["total"] for row in mine)
            assert model.figures[task].value == pytest.approx(expected)
        texts[name] = tuple(row["answer"] for row in rows)
    assert len(set(texts.values())) == 4  # four models that speak differently
    right = {
        name: [bool(one.points) for one in read_answers(home_of(result, name) / "answers.parquet")[name][:6]]
        for name in report.models
    }
    for name in ("rtn", "static", "onptq"):
        flips = sum(a != b for a, b in zip(right[name], right[DENSE], strict=True))
        assert report.models[name].figures["flips"].value == pytest.approx(100 * flips / 6)


def test_the_control_starts_from_the_run_s_own_theta_and_first_rollouts_and_is_a_static_run(
    compared: tuple[Result, Report], quantize: Quantize
) -> None:
    ours, _ = compared
    home, static = home_of(ours, "static") / "run", run_home(quantize("static").path)
    inits = comparison_folder(ours.path) / HOME / "inits" / "static"
    assert (inits / "theta.safetensors").read_bytes() == (run_home(ours.path) / "init.safetensors").read_bytes()
    for name in ("trajectories.parquet", "holdout_trajectories.parquet", "holdout.parquet"):
        first = (run_home(ours.path) / "rounds/0" / name).read_bytes()
        assert (home / "rounds/0" / name).read_bytes() == (inits / "rounds/0" / name).read_bytes() == first
    for k in range(2):
        for name in ROUND_FILES:
            where = Path("rounds") / str(k) / name
            assert (home / where).read_bytes() == (static / where).read_bytes(), where
    written, last = (file / "theta.safetensors" for file in (home_of(ours, "static"), static / "rounds/1"))
    assert_same_theta(Theta.load(written), Theta.load(last))
    assert (static / "rounds/1/theta.safetensors").read_bytes() != (
        run_home(ours.path) / "rounds/1/theta.safetensors"
    ).read_bytes()


def assert_same_theta(one: Theta, other: Theta) -> None:
    mine, theirs = one.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
def test_the_control_computes_neither_the_init_nor_the_first_rollouts_again(
    small: Path, items: list[Item], quantize: Quantize, tmp_path: Path
) -> None:
    result = copied(quantize(), tmp_path)
    reporter = Stopping()
    compare(small, result, items, reporter=reporter)
    assert not [name for name in reporter.begun if "Initialize" in name or "search" in name]
    assert "static Follow 1" not in reporter.begun
    assert "static Follow 2" in reporter.begun
    assert [name for name in reporter.begun if name.startswith("Build")] == ["Build rtn"]


@pytest.mark.slow
def test_what_is_compared_are_the_models_that_quantize_writes(
    compared: tuple[Result, Report], small: Path, items: list[Item], quantize: Quantize, tmp_path: Path
) -> None:
    """Every candidate by theta beside the checkpoint that `quantize --method` exports, in another comparison."""
    ours, report = compared
    checkpoints = [f"{name}={quantize(name).path}" for name in ("rtn", "static", "onptq")]
    prompts = ours.prompts.holdout
    written = compare_models(small, checkpoints, tmp_path / "written", items=items, prompts=prompts, recipe=recipe())
    for name in ("rtn", "static", "onptq"):
        mine, theirs = home_of(ours, name), tmp_path / "written" / HOME / Path(*path_of(name))
        for file in ("answers.parquet", "trajectories.parquet", "states.parquet"):
            assert pq.read_table(mine / file).equals(pq.read_table(theirs / file)), (name, file)
        assert report.models[name].figures == written.models[name].figures


@pytest.mark.slow
def test_the_control_of_an_off_policy_run_still_follows_the_quantized_model(
    compared: tuple[Result, Report], small: Path, quantize: Quantize, tmp_path: Path
) -> None:
    """That run's rollouts are the dense model's, so they cannot begin the control."""
    result = copied(quantize("offpolicy"), tmp_path)
    compare(small, result, [], "offpolicy")
    for k in range(2):
        for name in ROUND_FILES:
            mine, theirs = (home_of(one, "static") / f"run/rounds/{k}/{name}" for one in (result, compared[0]))
            assert mine.read_bytes() == theirs.read_bytes(), name
    first = "rounds/0/trajectories.parquet"
    assert (run_home(result.path) / first).read_bytes() != (home_of(result, "static") / "run" / first).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("onptq", ["rtn", "static", "onptq"]),
        ("uniform", ["rtn", "static", "uniform"]),
        ("offpolicy", ["rtn", "static", "offpolicy"]),
        ("static", ["rtn", "static"]),
        ("search", ["rtn", "search"]),
        ("rtn", ["rtn"]),
    ],
)
def test_a_run_is_never_its_own_baseline(
    method: str, names: list[str], small: Path, quantize: Quantize, tmp_path: Path
) -> None:
    result = copied(quantize(method), tmp_path)
    report = compare(small, result, [], method)
    assert list(report.models) == [DENSE, *names]
    assert report.prompts == 2
    assert all((report.models[name].figures["kl"].value or 0) > 0 for name in names)


def copied(result: Result, folder: Path) -> Result:
    """The run without its comparison, in another place."""
    out = folder / "copy" / result.path.name
    shutil.copytree(result.path, out)
    shutil.copytree(run_home(result.path), run_home(out), ignore=shutil.ignore_patterns("comparison"))
    return replace(result, path=out)


def test_without_prompts_only_the_answers_are_compared(
    small: Path, items: list[Item], quantize: Quantize, tmp_path: Path
) -> None:
    report = compare(small, copied(quantize("rtn"), tmp_path), items, "rtn", prompts=())
    assert list(report.models) == [DENSE, "rtn"]
    assert report.models["rtn"].change is not None
    assert report.models["rtn"].change.total.items == 6
    assert "kl" not in report.models["rtn"].figures


def test_a_comparison_that_is_whole_computes_nothing_again(
    compared: tuple[Result, Report], small: Path, items: list[Item]
) -> None:
    result, report = compared
    reporter = Stopping()
    assert compare(small, result, items, reporter=reporter) == report
    assert reporter.begun == ["Hash the model"]


def test_other_items_are_another_comparison(compared: tuple[Result, Report], small: Path, items: list[Item]) -> None:
    result, _ = compared
    before = files(comparison_folder(result.path))
    for others in (items[:-1], [replace(items[0], max_tokens=9), *items[1:]], []):
        with pytest.raises(OnPTQError, match=r"holds another run.*\n.*items\.sha256"):
            compare(small, result, others)
    assert files(comparison_folder(result.path)) == before


def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    small: Path, items: list[Item], quantize: Quantize, tmp_path: Path
) -> None:
    result = copied(quantize(), tmp_path)
    with pytest.raises(OnPTQError, match="item ids are there more than once"):
        compare(small, result, [items[0], items[0]])
    with pytest.raises(OnPTQError, match="nothing to compare by"):
        compare(small, result, [], prompts=())
    assert not comparison_folder(result.path).exists()


def test_the_seconds_of_the_control_are_its_own(compared: tuple[Result, Report]) -> None:
    result, report = compared
    log = (comparison_folder(result.path) / HOME / "log.jsonl").read_text().splitlines()
    phases = [one for one in map(json.loads, log) if one["event"] == "phase" and one["state"] == "end"]
    own = [one["seconds"] for one in phases if one.get("arm") == "candidates/static/run"]
    assert len(own) >= 6
    assert len(own) < len(phases)
    assert report.models["static"].cost["seconds"] == pytest.approx(sum(own), abs=0.01)
    assert report.models["onptq"].cost["seconds"] is None  # it was calibrated elsewhere


# --- interrupted ----------------------------------------------------------------------------------------------------


class Stopping(QuietReporter):
    """Interrupts the comparison when the phase begins, and remembers which phases began."""

    def __init__(self, stop: str | None = None) -> None:
        self.stop, self.begun = stop, list[str]()

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        self.begun.append(name)
        if name == self.stop:
            raise KeyboardInterrupt
        with super().phase(name, total, unit) as bar:
            yield bar


def assert_same_results(one: Result, other: Result) -> None:
    """Every file but logs, costs with their seconds, and locks."""
    varying = ("log.jsonl", "SHA256SUMS", "cost.json", "report.json", "report.md", "identity.json", "recipe.yaml")
    mine, theirs = (files(comparison_folder(result.path)) for result in (one, other))
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert name.endswith(varying) or mine[name] == theirs[name], name


def without_cost(report: Report) -> Report:
    return replace(report, models={name: replace(model, cost={}) for name, model in report.models.items()})


@pytest.mark.slow
def test_a_comparison_that_is_interrupted_again_and_again_ends_with_the_same_bytes(
    compared: tuple[Result, Report], small: Path, items: list[Item], quantize: Quantize, tmp_path: Path
) -> None:
    result = copied(quantize(), tmp_path)

    def begin(stop: str) -> list[str]:
        reporter = Stopping(stop)
        with pytest.raises(KeyboardInterrupt):
            compare(small, result, items, reporter=reporter)
        assert reporter.begun[-1] == stop
        return reporter.begun

    begin("static Calibrate 1")
    assert "static Compare 1" not in begin("static Follow 2")
    assert "static Calibrate 1" not in begin("Encode items")
    begin("Answer rtn")
    assert "Answer dense" not in begin("Answer static")
    assert "Answer rtn" not in begin("Compare onptq")
    last = Stopping()
    report = compare(small, result, items, reporter=last)
    assert [name for name in last.begun if name.startswith(("Answer", "Follow", "static", "Build"))] == ["Follow onptq"]
    whole, expected = compared
    assert_same_results(result, whole)
    assert without_cost(report) == without_cost(expected)


RESULTS = (
    "theta.safetensors",
    "cost.json",
    "answers.parquet",
    "trajectories.parquet",
    "states.parquet",
    "mismatches.parquet",
    "dense_path.parquet",
    "report.json",
    "report.md",
)


@pytest.mark.slow
def test_a_kill_between_two_files_loses_neither(
    compared: tuple[Result, Report],
    small: Path,
    items: list[Item],
    quantize: Quantize,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = copied(quantize(), tmp_path)
    rename, died = os.replace, set[str]()

    def replace_once(source: Any, target: Any) -> None:
        rename(source, target)
        name = Path(target).name
        if name in RESULTS and name not in died:
            died.add(name)
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_once)
    for _ in RESULTS:
        with pytest.raises(KeyboardInterrupt):
            compare(small, result, items)
    report = compare(small, result, items)
    assert died == set(RESULTS)
    assert without_cost(report) == without_cost(compared[1])
    assert_same_results(result, compared[0])


# --- examples -------------------------------------------------------------------------------------------------------

# Of the dense model, plain rounding and the run: which answers are right.
OUTCOMES = {
    "a1": (True, False, True),
    "a2": (True, False, True),
    "a3": (True, False, True),
    "a4": (True, True, True),
    "a5": (True, False, False),
    "a6": (False, False, True),
    "b1": (True, False, True),
    "c1": (True, False, True),
}


@pytest.fixture
def answered(tmp_path: Path) -> tuple[list[Item], Path]:
    """Items of three tasks, `c` not right or wrong, and the answers of a comparison to them."""
    prompt: Any = None
    tasks = {"a": "choice", "b": "read", "c": "caption"}
    items = [
        Item(name, tasks[name[0]], prompt, "yes", exact("yes"), 4, "facts" if name[0] == "c" else "accuracy")
        for name in OUTCOMES
    ]
    out = tmp_path / "out"
    for place, model in enumerate((DENSE, "rtn", "onptq")):
        answers = [
            Answer(item.id, item.task, f"{model} {item.id}", float(OUTCOMES[item.id][place]), 1.0) for item in items
        ]
        file = comparison_folder(out).joinpath(HOME, *((DENSE,) if model == DENSE else path_of(model)))
        file.mkdir(parents=True)
        write_answers({model: answers}, file / "answers.parquet")
    return items, out


def test_examples_are_right_answers_that_plain_rounding_spoils_and_the_run_restores(
    answered: tuple[list[Item], Path],
) -> None:
    items, out = answered
    examples = telling_examples(items, out, "onptq")
    assert [example.item.id for example in examples] == ["a1", "b1", "a2"]  # of every task in turn
    assert examples[0].answers == {DENSE: "dense a1", "rtn": "rtn a1", "onptq": "onptq a1"}
    assert [one.item.id for one in telling_examples(items, out, "onptq", limit=9)] == ["a1", "b1", "a2", "a3"]
    assert telling_examples([items[3]], out, "onptq") == []


def test_there_are_no_examples_without_all_three_models_answers(answered: tuple[list[Item], Path]) -> None:
    items, out = answered
    assert telling_examples(items, out, "uniform") == []
    assert telling_examples(items, out.with_name("nowhere"), "onptq") == []
    assert telling_examples(items, out, "rtn") == []


def test_examples_of_a_real_comparison_say_what_the_models_answered(
    compared: tuple[Result, Report], items: list[Item]
) -> None:
    result, _ = compared
    texts = {
        name: {one.item: one.text for one in read_answers(home_of(result, name) / "answers.parquet")[name]}
        for name in (DENSE, "rtn", "onptq")
    }
    right = {
        name: {one.item: one.points == 1 for one in read_answers(home_of(result, name) / "answers.parquet")[name]}
        for name in texts
    }
    expected = [
        item.id
        for item in items
        if item.measure == "accuracy"
        and right[DENSE][item.id]
        and right["onptq"][item.id]
        and not right["rtn"][item.id]
    ]
    examples = telling_examples(items, result.path, "onptq", limit=len(items))
    assert [example.item.id for example in examples] == expected
    for example in examples:
        assert example.answers == {name: texts[name][example.item.id] for name in texts}
