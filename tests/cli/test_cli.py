from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

import onptq
from onptq.cli import app, quantize, result, settings
from onptq.overrides import flatten
from onptq.recipe import PRESETS, Recipe, method_names

FORBIDDEN = ("torch", "transformers", "pydantic", "pyarrow", "numpy", "yaml", "PIL")


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_help_loads_nothing_heavy() -> None:
    source = (
        "import sys\nfrom onptq.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "import json; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout.splitlines()[-1])
    assert "quantize" in done.stdout
    assert [name for name in FORBIDDEN if name in modules] == []


def test_the_package_lists_its_api_without_importing_it() -> None:
    source = "import sys, onptq; dir(onptq); onptq.Scheme; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert set(onptq.__all__) <= set(dir(onptq))
    assert onptq.Recipe is Recipe
    with pytest.raises(AttributeError, match="quantise"):
        onptq.quantise  # noqa: B018


def test_every_public_name_is_where_the_package_says() -> None:
    assert [name for name in onptq.__all__ if getattr(onptq, name, None) is None] == []


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, onptq.__version__)


def test_recipe_prints_what_the_preset_and_changes_resolve_to() -> None:
    result = call("recipe", "--preset", "paper", "--set", "method=static", "--set", "branch.horizon=8")
    assert result.exit_code == 0
    expected = Recipe.preset("paper", ["method=static", "branch.horizon=8"])
    assert Recipe.model_validate(yaml.safe_load(result.stdout)) == expected
    for leaf, value in flatten(expected.model_dump()).items():
        assert flatten(yaml.safe_load(result.stdout))[leaf] == value


def test_recipe_prints_every_field_with_its_meaning() -> None:
    lines = call("recipe").stdout.splitlines()
    for name, field in [*Recipe.model_fields.items(), *Recipe().calibrate.__class__.model_fields.items()]:
        [line] = [line for line in lines if line.strip().startswith(f"{name}:")]
        assert isinstance(field.default, BaseModel) or field.description in line


def test_recipe_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("rounds: 5\n")
    result = call("recipe", "--recipe", tmp_path / "mine.yaml", "--set", "seed=2")
    assert Recipe.model_validate(yaml.safe_load(result.stdout)) == Recipe(rounds=5, seed=2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--preset", "papper"], "did you mean paper?"),
        (["--set", "branch.horizn=8"], "did you mean branch.horizon?"),
        (["--set", "branch.horizon"], "expected field=value"),
        (["--set", "method=static", "--set", "calibrate.gamma=1"], "method=static means calibrate.gamma=0.0"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml"),
        (["--recipe", "nowhere.yaml", "--preset", "paper"], "one of --preset and --recipe"),
    ],
)
def test_an_invalid_recipe_exits_2_with_one_error_and_no_traceback(arguments: list[str], expected: str) -> None:
    result = call("recipe", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--scheme", "int4", "--calibration", "p.jsonl"], "unknown scheme 'int4'"),
        (["--method", "gtpq", "--calibration", "p.jsonl"], "method = 'gtpq': unknown method (did you mean gptq?)"),
        (["--device", "tpu", "--calibration", "p.jsonl"], "compute.device = 'tpu'"),
        (["--seed", "-1", "--calibration", "p.jsonl"], "seed = -1"),
        (["--init", "magic", "--calibration", "p.jsonl"], "init = 'magic'"),
        (["--set", "nothing=1", "--calibration", "p.jsonl"], "unknown field 'nothing'"),
        (["--preset", "huge", "--calibration", "p.jsonl"], "valid: light, default, best, risk, paper"),
        (["--items", "3"], "give --evaluate, or leave out --items"),
        (["--items", "3", "--no-evaluate"], "give --evaluate, or leave out --items"),
        (["--quiet", "--json", "--calibration", "p.jsonl"], "one of --quiet and --json"),
    ],
)
def test_quantize_refuses_bad_settings_before_it_touches_anything(
    arguments: list[str], expected: str, tmp_path: Path
) -> None:
    result = call("quantize", "model", "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_command_is_refused() -> None:
    assert call("quantise").exit_code == 2


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        ("zoo:qwen2.5-vl", {}, "qwen2.5-vl-W4A8"),
        ("zoo:qwen2.5-vl+outliers", {"scheme": "W4A6"}, "qwen2.5-vl+outliers-W4A6"),
        ("real:smollm2", {"scheme": "w4a16-g128"}, "smollm2-W4A16-g128"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", {}, "Qwen2.5-VL-7B-Instruct-W4A8"),
        ("some/where/model/", {"method": "static"}, "model-W4A8-static"),
        ("some/where/model/../other", {"method": "rtn"}, "other-W4A8-rtn"),
    ],
)
def test_without_an_out_the_run_is_named_after_model_scheme_and_method(
    model: str, changes: dict[str, Any], expected: str
) -> None:
    assert quantize.default_out(model, Recipe.preset("risk", changes)) == Path(expected)


def test_the_help_says_what_is_chosen_where_nothing_is_given() -> None:
    shown = " ".join(call("quantize", "--help").stdout.replace("│", " ").split())
    for text in (
        "[default: zoo:qwen2.5-vl+outliers]",
        "zoo for models of the zoo, else default",
        "400 in all",
        "(W4A8)",
    ):
        assert text in shown


def test_the_help_names_the_init_of_every_preset() -> None:
    shown = CliRunner().invoke(app, ["quantize", "--help"], env={"COLUMNS": "400"}).stdout
    inits = {name: Recipe.preset(name).init for name in PRESETS}
    usual = inits["default"]
    different = [name for name, init in inits.items() if init != usual]
    assert {inits[name] for name in different} == {"search"}
    assert f"the preset's: {usual}; search in {' and '.join(different)}" in shown


@pytest.mark.parametrize("command", ["quantize", "plan"])
def test_the_help_leads_to_every_method_and_every_init(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400"}).stdout
    [method] = [line for line in shown.splitlines() if " --method " in line]
    [init] = [line for line in shown.splitlines() if " --init " in line]
    assert "`onptq list methods`" in method
    assert "`onptq list methods`" in init
    listed = call("list", "methods").stdout.split()
    assert [name for name in method_names() if name not in listed and name not in method] == []


def test_set_wins_over_a_named_option() -> None:
    options = {"scheme": "W4A16", "method": "static", "seed": None}
    recipe = settings.resolve_recipe("light", None, options, ["scheme=W8A8"])
    assert (recipe.scheme, recipe.method, recipe.calibrate.gamma, recipe.rounds) == ("W8A8", "static", 0, 1)


@pytest.mark.parametrize(("command", "continues"), [("quantize", True), ("recipe", False)])
def test_an_interrupt_exits_130_and_says_how_to_go_on(
    command: str, continues: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for module in (quantize, settings):
        monkeypatch.setattr(module, "resolve_recipe", interrupted)
    result = call(command, *(["model", "--out", tmp_path] if command == "quantize" else []))
    assert result.exit_code == 130
    assert ("the same command continues" in result.stderr) is continues


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(settings, "resolve_recipe", broken)
    assert isinstance(call("recipe").exception, ZeroDivisionError)


def test_zoo_random_writes_a_model_and_says_what_to_run_next(tmp_path: Path) -> None:
    result = call("zoo", "random", "llama", tmp_path / "a model", "--prompts", 3)
    assert result.exit_code == 0
    command = shlex.split(result.stdout.splitlines()[-1])
    assert command[:3] == ["onptq", "quantize", str(tmp_path / "a model")]
    assert len(onptq.load_manifest(command[command.index("--calibration") + 1])) == 3
    assert (tmp_path / "a model" / "config.json").exists()


def test_zoo_random_overwrites_nothing_and_names_the_families(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    result = call("zoo", "random", "llama", tmp_path)
    assert (result.exit_code, (tmp_path / "config.json").read_text()) == (2, "mine")
    result = call("zoo", "random", "lama", tmp_path / "new")
    assert result.exit_code == 2
    assert "qwen2.5-vl" in result.stderr


def test_the_overview_shows_what_the_summary_has_and_leaves_out_the_rest() -> None:
    summary = {
        "scheme": "W4A8",
        "method": "onptq",
        "holdout": {
            "rtn": {"mismatch_percent": 30, "reworded_percent": 81.3, "erosion": 5, "kl": 1},
            "initial": {"mismatch_percent": 22.3, "reworded_percent": 50, "erosion": 4.19, "kl": 0.843},
            "calibrated": {"mismatch_percent": 1.22, "reworded_percent": 12.5, "erosion": 0.179, "kl": None},
            "final": {"mismatch_percent": 22.3, "erosion": 4.19, "kl": 0.843},
        },
        "choice": {
            "kept": "init",
            "why": "it was worse",
            "same_states_kl": {"value": 0.2, "low": -0.1, "high": 0.5},
            "mismatch": {"value": -21.08, "low": -25, "high": -17.5},
            "kl": {"value": 0.1, "low": None, "high": None},
        },
        "rounds": [{"best_step": 3, "steps": 4}, {"best_step": 0, "steps": 4}],
        "seconds": {"Follow 1": 1.25, "Calibrate 1": 30, "Follow 2": 2},
        "checkpoint": {"bytes": 3 * 2**30},
    }
    assert dict(result.overview(summary, Path("out"))) == {
        "scheme": "W4A8",
        "method": "onptq",
        "held-out changed decisions": (
            "22.30% -> 1.22% (init -> calibrated; -21.08% [-25.00%, -17.50%], better; plain rounding: 30.00%)"
        ),
        "held-out reworded answers": "50% -> 12% (init -> calibrated; plain rounding: 81%)",
        "held-out margin erosion": "4.1900 -> 0.1790 (init -> calibrated; plain rounding: 5.0000)",
        "held-out KL to dense": "0.84300 (plain rounding: 1.00000)",
        "on the same states": "KL +0.20000 [-0.10000, +0.50000], may be chance",
        "weights kept": "those of the init: it was worse",
        "best theta": "round 1: step 3 of 4, round 2: the init, none of 4 steps was better",
        "time": "33 s (Follow 3.2, Calibrate 30.0)",
        "weights": "3.0 GiB",
        "checkpoint": "out",
        "run files": "out-run (hold the prompts: do not upload them)",
    }
    always = {"checkpoint": "out", "run files": "out-run (hold the prompts: do not upload them)"}
    assert dict(result.overview({}, "out")) == always
    assert dict(result.overview({"holdout": {"initial": None}, "seconds": 3}, "out")) == always
