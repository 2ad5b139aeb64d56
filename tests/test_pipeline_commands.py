"""`onptq quantize` on models of the zoo: their prompts and tasks, the comparison afterwards, and what is printed."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Tiny
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from onptq.cli import app, result
from onptq.data.manifest import manifest_digest
from onptq.evaluate.answers import Answer, write_answers
from onptq.evaluate.baselines import comparison_folder
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.store import path_of
from onptq.evaluate.tasks import Item
from onptq.recipe import Recipe
from onptq.run import HOME, run_home
from onptq.zoo import catalog, suite
from onptq.zoo.outliers import PRODUCERS, Outliers
from onptq.zoo.random import write_random

TINY: dict[str, Any] = {
    "rounds": 1,
    "init_steps": 2,
    "data.prompts": 4,
    "data.holdout": 2,
    "follow.max_tokens": 6,
    "calibrate.epochs": 1,
    "calibrate.batch": 2,
    "calibrate.lr_smoothing": 0.05,
    "calibrate.lr_step": 0.05,
    "calibrate.keep": "last",
}
ALONE = {name: value for name, value in TINY.items() if name != "rounds"}  # of a base method
DEMO = "qwen2.5-vl+outliers-W4A8"


@pytest.fixture(scope="module")
def random_zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model = folder / "qwen2.5-vl"
    write_random("qwen2.5-vl", model, prompts=1, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512)
    blocks = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    Outliers(({name: {3: 16, 7: 4} for name in PRODUCERS},) * blocks).write(model / catalog.CHOSEN)
    return folder


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_zoo: Path) -> Path:
    """A zoo of random models, and an empty current folder."""
    monkeypatch.setattr(catalog, "MODELS", random_zoo)
    monkeypatch.setenv("ONPTQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("onptq.cli.quantize.EVALUATED", 3)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def call(*arguments: object, changes: Mapping[str, Any] = TINY) -> Any:
    options = [argument for name, value in changes.items() for argument in ("--set", f"{name}={value}")]
    return CliRunner().invoke(app, [str(argument) for argument in (*arguments, *options)], env={"COLUMNS": "200"})


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_home(run) / "summary.json").read_text())
    return content


def report(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((comparison_folder(run) / "report.json").read_text())
    return content


# --- the first command ----------------------------------------------------------------------------------------------


def test_quantize_alone_quantizes_the_embedded_model_and_prints_the_comparison(zoo: Path) -> None:
    done = call("quantize", "--items", 2)
    assert done.exit_code == 0, done.stderr
    run = zoo / DEMO
    assert sorted(path.name for path in zoo.iterdir()) == [run.name, run_home(run).name]
    lines = done.stdout.splitlines()
    [head] = [line for line in lines if "average" in line]
    tasks = suite.tasks_of("qwen2.5-vl")
    assert re.split(r"\s{2,}", head.strip()) == [
        *tasks, "average", "flips %", "changed %", "mismatch %", "KL",
    ]  # fmt: skip
    first = lines.index(head) + 1
    rows = [line.split() for line in lines[first : first + 4]]
    assert [row[0] for row in rows] == ["dense", "RTN", "static", "OnPTQ"]
    models = report(run)["models"]
    assert list(models) == ["dense", "rtn", "static", "onptq"]
    for row, model in zip(rows, models.values(), strict=True):
        for cell, key in zip(row[1:], [*tasks, "average", "flips", "changed", "mismatch", "kl"], strict=True):
            value = model["figures"].get(key, {}).get("value")
            assert cell == ("-" if value is None else f"{value:.{4 if key == 'kl' else 1}f}")
    assert rows[0][-4:] == ["-"] * 4
    assert report(run)["origin"] == "embedded items and prompts of the test split"
    assert (report(run)["items"], report(run)["prompts"]) == (2 * len(tasks), 3)
    assert f"With intervals: {comparison_folder(Path(run.name)) / 'report.md'}" in done.stdout
    assert "Answer onptq" in done.stderr

    recorded = yaml.safe_load((run_home(run) / "recipe.yaml").read_text())
    assert Recipe.model_validate(recorded["recipe"]) == Recipe.preset("zoo", TINY)
    prompts = [*suite.prompts("qwen2.5-vl", "calibration", 4), *suite.prompts("qwen2.5-vl", "held-out", 2)]
    assert recorded["prompts"]["sha256"] == manifest_digest(prompts)
    assert recorded["model"]["source"] == "zoo:qwen2.5-vl+outliers"

    again = call("quantize", "--items", 2)
    assert again.stdout == done.stdout
    assert "finished run" in again.stderr
    assert not [phase for phase in ("Load", "Answer", "Follow", "Build", "Calibrate") if phase in again.stderr]


@pytest.mark.slow
def test_the_commands_that_are_printed_at_the_end_work(zoo: Path) -> None:
    done = call("quantize", "--no-evaluate")
    lines = [line.strip() for line in done.stdout.splitlines()]
    commands = lines[lines.index("Next:") + 1 :]
    verify = shlex.split(next(line for line in commands if line.startswith("onptq verify ")))
    assert verify[1:] == ["verify", DEMO, "--against", "zoo:qwen2.5-vl+outliers"]
    checks = json.loads(CliRunner().invoke(app, [*verify[1:], "--json"]).stdout)["checks"]
    assert {"reload", "logits: image"} <= {check["name"] for check in checks}
    # A random model may give one token over and over, which a question takes for a defect.
    assert [check for check in checks if not check["passed"] and not check["name"].startswith("question")] == []
    [serve] = [line for line in commands if line.startswith("vllm serve ")]
    assert shlex.split(serve)[2] == DEMO


@pytest.mark.slow
def test_json_has_the_summary_with_the_comparison_and_rtn_has_its_own_folder(zoo: Path) -> None:
    done = call("quantize", "zoo:qwen2.5-vl", "--method", "rtn", "--items", 1, "--json", changes=ALONE)
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])["result"]
    run = zoo / "qwen2.5-vl-W4A8-rtn"
    assert list(values["comparison"]["models"]) == ["dense", "rtn"]
    assert values == summary(run) | {"comparison": report(run)}
    assert "comparison" not in summary(run)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "baselines"), [("uniform", ["rtn", "static"]), ("search", ["rtn"])])
def test_every_method_can_be_shipped_and_is_compared(method: str, baselines: list[str], zoo: Path) -> None:
    changes = TINY if method == "uniform" else {name: value for name, value in ALONE.items() if name != "init_steps"}
    done = call("quantize", "zoo:qwen2.5-vl", "--method", method, "--items", 1, changes=changes)
    assert done.exit_code == 0, done.stderr
    run = zoo / f"qwen2.5-vl-W4A8-{method}"
    assert list(report(run)["models"]) == ["dense", *baselines, method]
    assert summary(run)["method"] == method
    assert (run / "config.json").exists()


@pytest.mark.slow
def test_a_zoo_model_can_go_unevaluated_and_take_other_prompts_preset_and_folder(zoo: Path, small: Path) -> None:
    done = call(
        "quantize", "zoo:qwen2.5-vl", "--no-evaluate", "--preset", "light", "--out", "mine", "--scheme", "W8A8",
        "--calibration", small / "prompts.jsonl",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert not comparison_folder(zoo / "mine").exists()
    assert "average" not in done.stdout
    recorded = yaml.safe_load((run_home(zoo / "mine") / "recipe.yaml").read_text())
    assert Recipe.model_validate(recorded["recipe"]) == Recipe.preset("light", TINY | {"scheme": "W8A8"})
    assert recorded["prompts"]["source"] == str(small / "prompts.jsonl")


@pytest.mark.slow
def test_a_run_can_be_evaluated_later(zoo: Path) -> None:
    first = call("quantize", "zoo:qwen2.5-vl", "--no-evaluate")
    assert first.exit_code == 0, first.stderr
    later = call("quantize", "zoo:qwen2.5-vl", "--items", 1)
    assert later.exit_code == 0, later.stderr
    assert "finished run" in later.stderr
    assert "Calibrate 1" not in later.stderr.replace("static Calibrate 1", "")
    assert list(report(zoo / "qwen2.5-vl-W4A8")["models"]) == ["dense", "rtn", "static", "onptq"]


@pytest.mark.slow
def test_quiet_prints_no_table(zoo: Path) -> None:
    done = call("quantize", "--items", 1, "--quiet")
    assert (done.exit_code, done.stdout) == (0, "")
    assert all(line.startswith("warning: ") for line in done.stderr.splitlines())
    assert list(report(zoo / DEMO)["models"]) == ["dense", "rtn", "static", "onptq"]


@pytest.mark.slow
def test_a_folder_is_evaluated_on_demand_and_named_after_itself(zoo: Path, random_zoo: Path, small: Path) -> None:
    folder = random_zoo / "qwen2.5-vl"
    without = call("quantize", folder)
    assert (without.exit_code, list(zoo.iterdir())) == (2, [])
    assert "needs --calibration" in without.stderr
    done = call("quantize", folder, "--calibration", small / "prompts.jsonl", "--evaluate", "--items", 1)
    assert done.exit_code == 0, done.stderr
    assert "OnPTQ" in done.stdout
    assert report(zoo / "qwen2.5-vl-W4A8")["items"] == len(suite.tasks_of("qwen2.5-vl"))


@pytest.mark.slow
def test_a_text_model_is_compared_on_embedded_prompts(zoo: Path, tiny: Callable[[str], Tiny]) -> None:
    model = tiny("llama")
    done = call("quantize", model.folder, "--calibration", model.manifest, "--evaluate", "--out", "mine")
    assert done.exit_code == 0, done.stderr
    compared = report(zoo / "mine")
    assert (compared["items"], compared["prompts"]) == (0, 3)
    assert compared["origin"] == "embedded prompts of the test split"


@pytest.fixture
def without_tasks(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As with a family that nothing is embedded for."""
    monkeypatch.setattr(suite, "SIDES", {})
    return zoo


@pytest.mark.slow
def test_a_family_without_tasks_is_compared_on_its_held_out_prompts(without_tasks: Path, small: Path) -> None:
    weights_alone = ("--scheme", "W4A16")  # rounded activations differ with the sizes of batches
    manifest = small / "prompts.jsonl"
    done = call("quantize", small, *weights_alone, "--calibration", manifest, "--evaluate", "--out", "mine")
    assert done.exit_code == 0, done.stderr
    [head] = [line for line in done.stdout.splitlines() if "mismatch %" in line]
    assert head.split() == ["mismatch", "%", "KL"]
    run = without_tasks / "mine"
    compared = report(run)
    assert (compared["items"], compared["prompts"]) == (0, 2)
    assert compared["origin"] == "held-out prompts, which also chose the iterate"
    text = (comparison_folder(run) / "report.md").read_text()
    assert "Measured on held-out prompts, which also chose the iterate." in text
    final = summary(run)["holdout"]["final"]
    assert compared["models"]["onptq"]["figures"]["mismatch"]["value"] == pytest.approx(final["mismatch_percent"])
    assert compared["models"]["onptq"]["figures"]["kl"]["value"] == pytest.approx(final["kl"], rel=1e-4)


def test_where_there_is_nothing_to_evaluate_on_the_checkpoint_stays_and_the_error_says_what_helps(
    without_tasks: Path, small: Path
) -> None:
    done = call("quantize", small, "--method", "rtn", "--evaluate", "--out", "mine", changes=ALONE)
    assert done.exit_code == 2
    assert "there is nothing to evaluate" in done.stderr
    assert "no embedded tasks for qwen2.5-vl and no held-out prompts" in done.stderr
    assert "expected --no-evaluate, or a calibration set with more prompts" in done.stderr
    assert (without_tasks / "mine" / "config.json").exists()


def test_a_name_that_the_zoo_does_not_have_is_refused_first(zoo: Path) -> None:
    done = call("quantize", "zoo:qwen2.5vl")
    assert (done.exit_code, list(zoo.iterdir())) == (2, [])
    assert "did you mean zoo:qwen2.5-vl" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"calibrate.keep": "best"}, "the 2 held-out prompts that also chose the iterate"),
        ({"calibrate.keep": "last"}, "2 held-out prompts"),
        ({"calibrate.keep": "best", "rounds": 0}, "2 held-out prompts"),
    ],
)
def test_the_card_says_whether_the_held_out_prompts_also_chose_the_iterate(
    changes: dict[str, Any], expected: str, zoo: Path
) -> None:
    without_steps = {name: value for name, value in TINY.items() if name != "init_steps"}
    done = call("quantize", "--no-evaluate", "--init", "rtn", changes=without_steps | changes)
    assert done.exit_code == 0, done.stderr
    card = (zoo / DEMO / "README.md").read_text(encoding="utf-8")
    assert f"on each model's own answers to {expected} (" in " ".join(card.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "claimed", "unclaimed"),
    [
        ("onptq", "on-policy calibration: the quantized model answers the calibration prompts itself", "off-policy"),
        ("uniform", "(all states alike)", "off-policy"),
        ("static", "static calibration:", "answers the calibration prompts itself"),
        ("offpolicy", "off-policy calibration: the source answers the calibration prompts", "on-policy"),
    ],
)
def test_the_card_says_whose_answers_the_weights_were_fitted_on(
    method: str, claimed: str, unclaimed: str, zoo: Path, small: Path
) -> None:
    changes = {name: value for name, value in TINY.items() if name != "init_steps"}
    prompts = ("--calibration", small / "prompts.jsonl", "--init", "search", "--no-verify", "--quiet")
    done = call("quantize", small, "--method", method, "--out", "out", *prompts, changes=changes)
    assert done.exit_code == 0, done.stderr
    facts = (zoo / "out" / "README.md").read_text().split("## How it was made")[-1].split("\n## ")[0]
    assert claimed in facts
    assert unclaimed not in facts


# --- examples -------------------------------------------------------------------------------------------------------


@pytest.fixture
def answered(tmp_path: Path) -> tuple[list[Item], Path]:
    """Embedded items with images, which plain rounding gets wrong and the run right, and one that both get right."""
    items = [*suite.items("qwen2.5-vl", "choice", "test", 2), *suite.items("qwen2.5-vl", "read", "test", 2)]
    out = tmp_path / "out"
    for model in (DENSE, "rtn", "onptq"):
        answers = []
        for item in items:
            right = model != "rtn" or item is items[1]
            answers.append(Answer(item.id, item.task, item.reference if right else "[wrong]", float(right), 1.0))
        home = comparison_folder(out).joinpath(HOME, *((DENSE,) if model == DENSE else path_of(model)))
        home.mkdir(parents=True)
        write_answers({model: answers}, home / "answers.parquet")
    return items, out


def test_examples_show_question_answers_and_where_the_image_is(
    answered: tuple[list[Item], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    items, out = answered
    result.print_examples(items, out, "onptq")
    shown = capsys.readouterr().out
    assert shown.splitlines()[1] == "Answers that plain rounding spoils:"
    chosen = [items[0], items[2], items[3]]  # of every task in turn
    for number, item in enumerate(chosen, start=1):
        question = " ".join(part["text"] for part in item.prompt.messages[-1]["content"] if "text" in part).strip()
        for line in question.splitlines():
            assert line in shown
        file = comparison_folder(out) / "examples" / f"{number}.png"
        assert f"  image   {file}" in shown.splitlines()
        assert file.read_bytes() == item.prompt.images[0].read()
        assert Image.open(file).size == (112, 112)
    blocks = shown.split("  image   ")
    for block, item in zip(blocks, chosen, strict=False):
        assert f"  dense   {item.reference}" in block
        assert "  RTN     [wrong]" in block  # brackets are no markup
        assert f"  OnPTQ   {item.reference}" in block
    assert len(list((comparison_folder(out) / "examples").iterdir())) == 3


def test_without_a_telling_answer_nothing_is_printed_or_written(
    answered: tuple[list[Item], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    items, out = answered
    result.print_examples([items[1]], out, "onptq")
    shutil.rmtree(comparison_folder(out) / HOME)
    result.print_examples(items, out, "onptq")
    assert capsys.readouterr().out == ""
    assert not (comparison_folder(out) / "examples").exists()


def test_an_image_is_drawn_where_the_terminal_has_colours() -> None:
    image = Image.new("RGB", (40, 40), (200, 10, 10))
    image.paste((10, 10, 200), (0, 20, 40, 40))
    data = io.BytesIO()
    image.save(data, "PNG")
    text = result._drawn(data.getvalue())
    lines = text.plain.splitlines()
    assert (len(lines), {len(line) for line in lines}) == (16, {result.IMAGE_COLUMNS})
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    console.print(text)
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue().splitlines()
    assert "38;2;200;10;10;48;2;200;10;10" in drawn[0]
    assert "38;2;10;10;200;48;2;10;10;200" in drawn[-1] or "38;2;10;10;200;48;2;10;10;200" in drawn[-2]
