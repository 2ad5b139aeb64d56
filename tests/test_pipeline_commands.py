"""The main job: a model of the zoo, quantized and compared with dense, plain rounding and the static control."""

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
import yaml
from conftest import Tiny
from typer.testing import CliRunner

import onptq
from onptq.cli import app
from onptq.cli.comparison import explanation
from onptq.data.manifest import load_manifest, manifest_digest
from onptq.errors import OnPTQError
from onptq.evaluate.items import Grade, Item
from onptq.progress import Bar, QuietReporter
from onptq.recipe import Recipe
from onptq.run import run_home
from onptq.zoo import catalog, suite
from onptq.zoo.random import write_random

TINY: dict[str, Any] = {
    "rounds": 2,
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
COMPARED = ("answers.parquet", "comparison.json")
CHECKPOINT = ("model.safetensors", "config.json")


def letters(text: str) -> Grade:
    return Grade(text.count("e"), len(text))


@pytest.fixture(scope="module")
def items(small: Path) -> list[Item]:
    """Items whose answers the random model gives at random: some tasks right or wrong, one by facts."""
    prompts = load_manifest(small / "prompts.jsonl")
    asked = [Item(f"q{n}", "first letter", prompts[n], "", lambda text: Grade(text[:1] < "m"), 2) for n in range(6)]
    told = [Item(f"t{n}", "tell", prompts[n], "", letters, 8, "facts") for n in range(3)]
    return [*asked, *told]


def recipe(changes: Mapping[str, Any] | None = None) -> Recipe:
    return Recipe.preset("default", TINY | dict(changes or {}))


Quantize = Callable[..., Path]


@pytest.fixture(scope="module")
def quantize(small: Path, items: list[Item], tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    """`quantize(method, evaluated)`: the run of the small model, computed once per module."""
    done: dict[tuple[str, bool], Path] = {}

    def get(method: str = "onptq", evaluated: bool = True) -> Path:
        if (method, evaluated) not in done:
            done[method, evaluated] = out = tmp_path_factory.mktemp("run")
            changes = {"method": method} | ({"rounds": 0} if method == "rtn" else {})
            onptq.quantize(
                small,
                out,
                calibration=small / "prompts.jsonl",
                recipe=recipe(changes),
                evaluation=items if evaluated else None,
            )
        return done[method, evaluated]

    return get


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run_home(run) / "summary.json").read_text())  # type: ignore[no-any-return]


def same(first: Path, second: Path, *names: str) -> None:
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


# --- the comparison -------------------------------------------------------------------------------------------------


def test_every_arm_is_compared_with_the_dense_model(quantize: Quantize, items: list[Item]) -> None:
    run = quantize()
    comparison = summary(run)["comparison"]
    assert comparison == json.loads((run_home(run) / "comparison.json").read_text())
    assert comparison["items"] == 9
    assert list(comparison["arms"]) == ["dense", "rtn", "static", "onptq"]
    rows = pq.read_table(run_home(run) / "answers.parquet").to_pylist()
    assert list(rows[0]) == ["arm", "item", "task", "answer", "points", "total"]
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in comparison["arms"]}
    graders = {item.id: item.grade for item in items}
    for arm, figures in comparison["arms"].items():
        assert [row["item"] for row in by_arm[arm]] == [item.id for item in items]
        for row in by_arm[arm]:
            earned = graders[row["item"]](row["answer"])
            assert (row["points"], row["total"]) == (earned.points, earned.total)
        for task in ("first letter", "tell"):
            mine = [row for row in by_arm[arm] if row["task"] == task]
            expected = 100 * sum(row["points"] for row in mine) / sum(row["total"] for row in mine)
            assert figures["tasks"][task]["percent"] == pytest.approx(expected)
        flipped = sum(
            row["points"] != dense["points"]
            for row, dense in zip(by_arm[arm], by_arm["dense"], strict=True)
            if row["task"] == "first letter"
        )
        assert (arm == "dense") == ("flips" not in figures)
        assert arm == "dense" or figures["flips"]["percent"] == pytest.approx(100 * flipped / 6)
    answers = {arm: [row["answer"] for row in mine] for arm, mine in by_arm.items()}
    assert len({tuple(texts) for texts in answers.values()}) == 4  # four models that speak differently


def test_the_checkpoint_and_the_rounds_are_the_same_without_an_evaluation(quantize: Quantize) -> None:
    with_, without = quantize(), quantize(evaluated=False)
    rounds = [
        f"rounds/{k}/{name}"
        for k in range(2)
        for name in ("theta.safetensors", "bank.parquet", "trajectories.parquet", "holdout.parquet")
    ]
    same(with_, without, *CHECKPOINT)
    same(run_home(with_), run_home(without), *rounds, "init.safetensors", "final/holdout.parquet")
    one, two = summary(with_), summary(without)
    assert "comparison" not in two
    assert "evaluation" not in yaml.safe_load((run_home(without) / "recipe.yaml").read_text())
    for name in ("rounds", "holdout", "verification", "checkpoint", "prompts"):
        assert one[name] == two[name]
    assert one["verification"]["max_abs_difference"] == 0.0


def test_the_control_is_a_static_run_and_rtn_is_plain_rounding(quantize: Quantize) -> None:
    ours, static, rtn = (quantize(method) for method in ("onptq", "static", "rtn"))
    for k in range(2):
        for name in ("theta.safetensors", "trajectories.parquet", "bank.parquet", "holdout.parquet"):
            same(run_home(ours) / "static", run_home(static), f"rounds/{k}/{name}")
    same(run_home(ours) / "static", run_home(static), "final/holdout.parquet")
    same(run_home(ours) / "rtn", run_home(rtn), "final/holdout.parquet")
    arms = {run: summary(run)["comparison"]["arms"] for run in (ours, static, rtn)}
    assert list(arms[static]) == ["dense", "rtn", "static"]
    assert list(arms[rtn]) == ["dense", "rtn"]
    for run in (static, rtn):
        for name, figures in arms[run].items():
            assert figures == arms[ours][name]


def test_on_policy_figures_are_those_of_each_arms_own_rollouts(quantize: Quantize) -> None:
    runs = {method: summary(quantize(method)) for method in ("onptq", "static", "rtn")}
    arms = runs["onptq"]["comparison"]["arms"]
    for method, found in runs.items():
        assert arms[method]["on_policy"] == found["holdout"]["final"]
    assert len({arms[method]["on_policy"]["kl"] for method in runs}) == 3


def test_without_held_out_prompts_only_the_answers_are_compared(small: Path, items: list[Item], tmp_path: Path) -> None:
    result = onptq.quantize(small, tmp_path, recipe=recipe({"method": "rtn", "rounds": 0}), evaluation=items)
    arms = result.summary["comparison"]["arms"]
    assert list(arms) == ["dense", "rtn"]
    assert arms["rtn"]["on_policy"] is None
    assert arms["rtn"]["flips"]["items"] == 6


def test_other_items_are_another_run(small: Path, items: list[Item], quantize: Quantize) -> None:
    run, log = quantize(), (run_home(quantize()) / "log.jsonl").read_bytes()
    for others in (items[:-1], [replace(items[0], max_tokens=9), *items[1:]], None):
        with pytest.raises(OnPTQError, match=r"holds another run.*\n.*evaluation"):
            onptq.quantize(small, run, calibration=small / "prompts.jsonl", recipe=recipe(), evaluation=others)
    assert (run_home(run) / "log.jsonl").read_bytes() == log


def test_items_that_cannot_be_evaluated_are_refused_before_anything_is_written(
    small: Path, items: list[Item], tmp_path: Path
) -> None:
    for bad in ([], [items[0], items[0]]):
        with pytest.raises(OnPTQError, match="expected"):
            onptq.quantize(
                small, tmp_path / "run", calibration=small / "prompts.jsonl", recipe=recipe(), evaluation=bad
            )
    assert not (tmp_path / "run").exists()


def test_the_controls_lines_of_the_log_are_not_taken_for_the_runs_own(
    small: Path, items: list[Item], quantize: Quantize, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(quantize(), run)
    shutil.copytree(run_home(quantize()), run_home(run))
    expected = summary(run)["rounds"]
    (run_home(run) / "summary.json").unlink()
    with (run_home(run) / "log.jsonl").open("a") as log:
        log.write('{"event": "calibrated", "arm": "static", "round": 1, "steps": 2, "best_step": 77}\n')
    call = {"calibration": small / "prompts.jsonl", "recipe": recipe(), "evaluation": items}
    assert onptq.quantize(small, run, **call).summary["rounds"] == expected
    lines = [json.loads(line) for line in (run_home(run) / "log.jsonl").read_text().splitlines()]
    calibrated = [line.get("arm") for line in lines if line["event"] == "calibrated"]
    assert calibrated == [None, None, "static", "static", "static"]


# --- interrupted ----------------------------------------------------------------------------------------------------


class Stopping(QuietReporter):
    """Interrupts the job when the phase begins, and remembers which phases began."""

    def __init__(self, stop: str | None = None) -> None:
        self.stop, self.begun = stop, list[str]()

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        self.begun.append(name)
        if name == self.stop:
            raise KeyboardInterrupt
        with super().phase(name, total, unit) as bar:
            yield bar


def test_a_run_that_is_interrupted_again_and_again_ends_with_the_same_bytes(
    small: Path, items: list[Item], quantize: Quantize, tmp_path: Path
) -> None:
    def begin(stop: str | None = None) -> list[str]:
        reporter = Stopping(stop)
        call = {"calibration": small / "prompts.jsonl", "recipe": recipe(), "evaluation": items, "reporter": reporter}
        if stop is None:
            onptq.quantize(small, tmp_path, **call)
        else:
            with pytest.raises(KeyboardInterrupt):
                onptq.quantize(small, tmp_path, **call)
        return reporter.begun

    begin("static Calibrate 1")
    assert "Calibrate 1" not in begin("static Follow 2")
    assert "static Calibrate 1" not in begin("Encode items")
    begin("Answer rtn")
    assert "Answer dense" not in begin("Answer static")
    assert "rtn Follow held-out at the end" not in begin("Answer onptq")
    begin("Verify")
    last = begin()
    assert not [phase for phase in last if phase.startswith(("Answer", "Follow", "static", "rtn", "Encode items"))]
    whole = quantize()
    varying = {"log.jsonl", "summary.json", "recipe.yaml", "SHA256SUMS"}
    for mine, theirs in ((tmp_path, whole), (run_home(tmp_path), run_home(whole))):
        names = [str(path.relative_to(mine)) for path in sorted(mine.rglob("*")) if path.is_file()]
        assert names == [str(path.relative_to(theirs)) for path in sorted(theirs.rglob("*")) if path.is_file()]
        same(mine, theirs, *(name for name in names if name not in varying))
    one, two = summary(tmp_path), summary(whole)
    assert {**one, "seconds": None} == {**two, "seconds": None}


def test_a_kill_between_two_files_of_the_comparison_loses_neither(
    small: Path, items: list[Item], quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, died = os.replace, set[str]()

    def replace_once(source: Any, target: Any) -> None:
        rename(source, target)
        name = Path(target).name
        if name in (*COMPARED, ".answers-dense.parquet") and name not in died:
            died.add(name)
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_once)
    call = {"calibration": small / "prompts.jsonl", "recipe": recipe(), "evaluation": items}
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            onptq.quantize(small, tmp_path, **call)
    onptq.quantize(small, tmp_path, **call)
    assert len(died) == 3
    same(tmp_path, quantize(), "model.safetensors")
    same(run_home(tmp_path), run_home(quantize()), *COMPARED)
    assert not list(run_home(tmp_path).glob(".answers-*"))


# --- the command ----------------------------------------------------------------------------------------------------

SMALL = TINY | {"rounds": 1}


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_zoo: Path) -> Path:
    """A zoo of random models, and an empty current folder."""
    monkeypatch.setattr(catalog, "MODELS", random_zoo)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.fixture(scope="module")
def random_zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_random("qwen2.5-vl", folder / "qwen2.5-vl", prompts=1, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512)
    return folder


def call(*arguments: object, changes: Mapping[str, Any] = SMALL) -> Any:
    options = [argument for name, value in changes.items() for argument in ("--set", f"{name}={value}")]
    return CliRunner().invoke(app, [str(argument) for argument in (*arguments, *options)])


def test_quantize_alone_quantizes_the_embedded_model_and_prints_the_comparison(zoo: Path) -> None:
    done = call("quantize", "--items", 2)
    assert done.exit_code == 0, done.stderr
    run = zoo / "qwen2.5-vl-W4A8"
    assert sorted(path.name for path in zoo.iterdir()) == [run.name, run_home(run).name]
    lines = done.stdout.splitlines()
    [head] = [line for line in lines if "average" in line]
    tasks = suite.tasks_of("qwen2.5-vl")
    assert head.split() == [*tasks, "average", "flips", "mismatch", "KL"]
    first = lines.index(head) + 1
    rows = [line.split() for line in lines[first : first + 4]]
    assert [row[0] for row in rows] == ["dense", "RTN", "static", "OnPTQ"]
    arms = summary(run)["comparison"]["arms"]
    for row, arm in zip(rows, arms.values(), strict=True):
        assert row[1 : 2 + len(tasks)] == [
            f"{value:.1f}" for value in (*(one["percent"] for one in arm["tasks"].values()), arm["average_percent"])
        ]
    ours = arms["onptq"]
    assert rows[3][-3:] == [
        f"{ours['flips']['percent']:.1f}%",
        f"{ours['on_policy']['mismatch_percent']:.1f}%",
        f"{ours['on_policy']['kl']:.4f}",
    ]
    assert rows[0][-3:] == ["-", "-", "-"]
    assert "qwen2.5-vl-W4A8-run" in done.stdout
    assert "Answer onptq" in done.stderr

    recorded = yaml.safe_load((run_home(run) / "recipe.yaml").read_text())
    assert recorded["recipe"] == Recipe.preset("zoo", SMALL).model_dump()
    assert recorded["evaluation"]["items"] == 2 * len(tasks)
    prompts = [*suite.prompts("qwen2.5-vl", "calibration", 4), *suite.prompts("qwen2.5-vl", "held-out", 2)]
    assert recorded["prompts"]["sha256"] == manifest_digest(prompts)

    again = call("quantize", "--items", 2)
    assert again.stdout == done.stdout
    assert "finished run" in again.stderr


def test_json_has_the_comparison_and_rtn_has_its_own_folder(zoo: Path) -> None:
    done = call("quantize", "zoo:qwen2.5-vl", "--method", "rtn", "--items", 1, "--json", changes=TINY | {"rounds": 0})
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])["result"]
    assert list(result["comparison"]["arms"]) == ["dense", "rtn"]
    assert result == summary(zoo / "qwen2.5-vl-W4A8-rtn")


def test_a_zoo_model_can_go_unevaluated_and_take_other_prompts_preset_and_folder(zoo: Path, small: Path) -> None:
    done = call(
        "quantize", "zoo:qwen2.5-vl", "--no-evaluate", "--preset", "light", "--out", "mine", "--scheme", "W8A8",
        "--calibration", small / "prompts.jsonl",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "comparison" not in summary(zoo / "mine")
    assert "average" not in done.stdout
    recorded = yaml.safe_load((run_home(zoo / "mine") / "recipe.yaml").read_text())
    assert recorded["recipe"] == Recipe.preset("light", SMALL | {"scheme": "W8A8"}).model_dump()
    assert recorded["prompts"]["source"] == str(small / "prompts.jsonl")


def test_quiet_prints_no_table(zoo: Path) -> None:
    done = call("quantize", "--items", 1, "--quiet")
    assert (done.exit_code, done.stdout) == (0, "")
    assert all(line.startswith("warning: ") for line in done.stderr.splitlines())


def test_a_folder_is_evaluated_when_asked_and_named_after_itself(zoo: Path, random_zoo: Path, small: Path) -> None:
    folder = random_zoo / "qwen2.5-vl"
    without = call("quantize", folder)
    assert (without.exit_code, list(zoo.iterdir())) == (2, [])
    assert "needs --calibration" in without.stderr
    done = call("quantize", folder, "--calibration", small / "prompts.jsonl", "--evaluate", "--items", 1)
    assert done.exit_code == 0, done.stderr
    assert "OnPTQ" in done.stdout
    assert "comparison" in summary(zoo / "qwen2.5-vl-W4A8")


def test_tasks_are_not_put_to_a_family_that_has_none(zoo: Path, tiny: Callable[[str], Tiny]) -> None:
    model = tiny("llama")
    done = call("quantize", model.folder, "--calibration", model.manifest, "--evaluate")
    assert (done.exit_code, list(zoo.iterdir())) == (2, [])
    assert "not made for 'llama'" in done.stderr


def test_a_name_that_the_zoo_does_not_have_is_refused_first(zoo: Path) -> None:
    done = call("quantize", "zoo:qwen2.5vl")
    assert (done.exit_code, list(zoo.iterdir())) == (2, [])
    assert "did you mean zoo:qwen2.5-vl" in done.stderr


def test_the_explanation_says_how_many_items_and_that_fewer_word_errors_are_better() -> None:
    tasks = {"choice": {"items": 5, "measure": "accuracy"}, "speech": {"items": 3, "measure": "word errors"}}
    text = explanation({"arms": {"dense": {"tasks": tasks}}}, "")
    assert "3 to 5 test items" in text
    assert "WER: lower is better" in text
    assert "mismatch" not in text
    assert "WER" not in explanation({"arms": {"dense": {"tasks": {"choice": tasks["choice"]}}}}, "")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"calibrate.keep": "best"}, "the 2 held-out prompts that also chose the iterate"),
        ({"calibrate.keep": "last"}, "2 held-out prompts"),
        ({"calibrate.keep": "best", "rounds": 0}, "2 held-out prompts"),
    ],
)
def test_table_and_card_say_whether_the_held_out_prompts_also_chose_the_iterate(
    changes: dict[str, Any], expected: str, zoo: Path
) -> None:
    done = call("quantize", "--items", 1, "--init", "rtn", changes=SMALL | changes)
    assert done.exit_code == 0, done.stderr
    assert f"the model's own rollouts from {expected}." in " ".join(done.stdout.split())
    card = (zoo / "qwen2.5-vl-W4A8/README.md").read_text(encoding="utf-8")
    assert f"the model's own answers to {expected} (" in card
