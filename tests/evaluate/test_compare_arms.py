"""Candidates of `onptq compare` with settings of their own, and with several seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onptq.cli import app
from onptq.data.manifest import load_manifest
from onptq.errors import OnPTQError
from onptq.evaluate.candidates import (
    CheckpointCandidate,
    MethodCandidate,
    parse_candidates,
    shown,
    with_seeds,
)
from onptq.evaluate.comparison import compare_models
from onptq.evaluate.store import SEEDS, path_of
from onptq.evaluate.summary import Report
from onptq.recipe import PRESETS, Recipe
from onptq.run import HOME
from onptq.schemes import Scheme

RECIPE = Recipe.preset(
    "light",
    {
        "rounds": 1,
        "init": "rtn",
        "data.prompts": 3,
        "data.holdout": 1,
        "follow.max_tokens": 6,
        "calibrate.epochs": 1,
        "calibrate.batch": 1,
        "calibrate.keep": "last",
        "calibrate.lr_smoothing": 0.02,  # steps so large that every seed gives another model
        "compute.batch_tokens": 200,
    },
)


def candidate(text: str, recipe: Recipe = RECIPE, *changes: str) -> MethodCandidate:
    [one] = parse_candidates([text], recipe, changes)
    assert isinstance(one, MethodCandidate)
    return one


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "fields"),
    [
        ("onptq:W4A8@init=awq", "onptq:W4A8@init=awq", {"init": "awq"}),
        ("onptq@init=awq:w4a8", "onptq:W4A8@init=awq", {"init": "awq"}),
        ("onptq@init=awq:W4A8#2", "onptq:W4A8@init=awq#2", {"init": "awq", "seed": 2}),
        ("uniform:W4A8@calibrate.pair=0.02#1", "uniform:W4A8@calibrate.pair=0.02#1", {"calibrate.pair": 0.02, "seed": 1}),
        ("mine=onptq@init=awq:W4A8", "mine", {"init": "awq"}),
        ("mine=onptq:W4A8@init=awq,rounds=2", "mine", {"init": "awq", "rounds": 2}),
        (
            "onptq:W4A8@ init=awq , calibrate.terms={}",
            "onptq:W4A8@init=awq,calibrate.terms={}",
            {"init": "awq"},
        ),
    ],
)  # fmt: skip
def test_a_candidate_changes_fields_of_the_comparison_s_recipe(text: str, name: str, fields: dict[str, Any]) -> None:
    found = candidate(text)
    assert found.name == name
    method = "uniform" if "uniform" in text else "onptq"
    assert found.recipe == RECIPE.with_overrides({"method": method, "scheme": "W4A8"} | fields)


@pytest.mark.parametrize(
    "text", ["onptq:W4A8@paper,init=mbq", "onptq:W4A8@init=mbq,paper", "onptq@init=mbq,paper:W4A8"]
)
def test_a_preset_and_fields_may_stand_in_any_order(text: str) -> None:
    found = candidate(text, RECIPE.with_overrides({"seed": 7}), "rounds=3", "init=gptq")
    assert found.name == "onptq:W4A8@paper,init=mbq"
    expected = {"scheme": "W4A8", "rounds": 3, "init": "mbq", "seed": 7, "compute.batch_tokens": 200}
    assert found.recipe == Recipe.preset("paper", expected)


def test_a_recipe_file_and_fields(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("init: gptq\nrounds: 2\n")
    found = candidate(f"static:W4A6@{file},init=awq")
    assert found.name == f"static:W4A6@{file},init=awq"
    assert (found.recipe.init, found.recipe.rounds, found.recipe.calibrate.gamma) == ("awq", 2, 0)


def test_an_equals_sign_behind_the_at_sign_names_nothing_and_one_in_a_folder_s_name_is_the_folder_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("awq", "a=b", "mine"):
        (tmp_path / name).mkdir()
    found = parse_candidates(["onptq:W4A8@init=awq", "a=b", "c=a=b", "d=mine"], RECIPE)
    assert isinstance(found[0], MethodCandidate)
    folders = {"a=b": "a=b", "c": "a=b", "d": "mine"}
    assert found[1:] == [CheckpointCandidate(name, folder) for name, folder in folders.items()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("static:W4A8@calibrate.gamma=1", "method=static means calibrate.gamma=0.0, but calibrate.gamma=1 was given"),
        ("awq:W4A8@init=gptq", "method=awq means init=awq, but init=gptq was given"),
        ("onptq:W4A8@inti=awq", "unknown field 'inti' (did you mean init?)"),
        ("onptq:W4A8@init=aqw", "init = 'aqw': unknown base method 'aqw' (did you mean awq?); expected one of rtn, "),
        ("onptq:W4A8@calibrate.pare=1", "unknown field 'calibrate.pare' (did you mean calibrate.pair?)"),
        ("onptq:W4A8@papper,init=awq", f"'papper' (did you mean paper?); expected one of {', '.join(PRESETS)}, a recipe"),
        ("onptq:W4A8@init", "unknown preset 'init'; expected one of"),
        ("onptq:W4A8@", "a setting behind @ is empty; expected a preset, a recipe file or FIELD=VALUE"),
        ("onptq:W4A8@init=awq,", "a setting behind @ is empty"),
        ("onptq:W4A8@init=", "cannot read the override 'init='"),
        ("onptq:W4A8@paper,light", "paper and light are whole recipes; expected one"),
        ("onptq@paper:W4A8@init=awq", "two lists of settings behind @"),
        ("onptq:W4A8@seed=1", "seed is not set behind @; write METHOD:SCHEME#SEED"),
        ("onptq:W4A8@scheme=W3A8", "scheme is not set behind @; it is the SCHEME"),
        ("onptq:W4A8@compute.device=cpu", "compute.device is not set behind @; all candidates share it"),
        ("onptq@init=awq", "is no folder here; expected a checkpoint folder, NAME=FOLDER, or METHOD:SCHEME"),
        ("onpt:W4A8@init=awq", "unknown method (did you mean onptq?)"),
        ("onptq:W4A8@none.yaml", "cannot read the recipe none.yaml"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_with_what_is_valid(text: str, expected: str) -> None:
    with pytest.raises(OnPTQError) as caught:
        parse_candidates([text], RECIPE)
    assert expected in str(caught.value)
    assert repr(text) in str(caught.value)


def test_tables_call_a_method_by_its_label_where_it_is_named_as_a_method() -> None:
    assert shown("masquant:W4A8") == "masquant (merged):W4A8"
    assert shown("onptq:W4A8@paper,init=masquant#1") == "onptq:W4A8@paper,init=masquant (merged)#1"
    assert shown("onptq:W4A8@init=masquant (3 seeds)") == "onptq:W4A8@init=masquant (merged) (3 seeds)"
    for name in ("my-masquant:W4A8", "dense", "search+signround:W4A8", "onptq:W4A8@masquant.yaml", "a/masquant"):
        assert shown(name) == name


# --- seeds ----------------------------------------------------------------------------------------------------------


def test_seeds_are_a_candidate_s_own_and_those_that_follow() -> None:
    for text, names in {
        "onptq:W4A8": ["onptq:W4A8", "onptq:W4A8#1", "onptq:W4A8#2"],
        "uniform:W4A8@calibrate.pair=0.02#4": [f"uniform:W4A8@calibrate.pair=0.02#{seed}" for seed in (4, 5, 6)],
        "mine=static:W4A8": ["mine", "mine#1", "mine#2"],
        "rtn:W4A8": ["rtn:W4A8"],
        "onptq:W4A8@rounds=0": ["onptq:W4A8@rounds=0"],
    }.items():
        [one] = parse_candidates([text], RECIPE)
        found = with_seeds(one, 3)
        assert [each.name for each in found] == names
        assert found[0] is one
        assert with_seeds(one, 1) == [one]
        if len(names) > 1 and not text.startswith("mine"):
            assert found[1:] == parse_candidates(names[1:], RECIPE), "as if they had been named"
    checkpoint = CheckpointCandidate("a", "b")
    assert with_seeds(checkpoint, 3) == [checkpoint]


def compared(small: Path, out: Path, candidates: list[str], **given: Any) -> Report:
    prompts = load_manifest(small / "prompts.jsonl")
    data: dict[str, Any] = {"prompts": prompts[3:], "calibration": prompts[:3], "holdout": prompts[3:4]}
    return compare_models(small, candidates, out, recipe=RECIPE, replicates=50, **data, **given)


@pytest.mark.slow
def test_seeds_are_built_once_shown_as_one_row_and_stay_one_row_when_candidates_are_added(
    small: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = compared(small, out, ["onptq:W4A8"])
    report = compared(small, out, ["rtn:W4A8", "onptq:W4A8", "uniform:W4A8@calibrate.pair_matched=true"], seeds=2)
    names = ["onptq:W4A8 (2 seeds)", "rtn:W4A8", "uniform:W4A8@calibrate.pair_matched=true (2 seeds)"]
    assert sorted(report.models) == sorted(["dense", *names])
    ours = report.models[names[0]]
    assert list(ours.seeds) == ["onptq:W4A8", "onptq:W4A8#1"]
    assert ours.seeds["onptq:W4A8"].figures == first.models["onptq:W4A8"].figures
    values = [one.figures["kl"].value for one in ours.seeds.values()]
    assert values[0] != values[1], "another order of the prompts"
    assert ours.figures["kl"].value == pytest.approx(sum(value or 0 for value in values) / 2)
    cost = out.joinpath(HOME, *path_of("onptq:W4A8", "cost.json"))
    built = cost.stat().st_mtime_ns
    again = compared(small, out, ["smoothquant:W4A8"])
    assert sorted(again.models) == sorted(["dense", *names, "smoothquant:W4A8"])
    assert again.models[names[0]].figures == ours.figures
    assert cost.stat().st_mtime_ns == built
    assert json.loads((out / "report.json").read_text())["models"][names[0]]["spread"] == ours.spread
    out.joinpath(HOME, *path_of("onptq:W4A8#1", "cost.json")).unlink()  # a seed that is not finished
    alone = compared(small, out, ["rtn:W4A8"])
    assert "onptq:W4A8" in alone.models
    assert out.joinpath(HOME, *path_of("onptq:W4A8", SEEDS)).is_file()


@pytest.mark.slow
def test_an_init_of_its_own_is_the_base_method_s_theta(small: Path, tmp_path: Path) -> None:
    compared(small, tmp_path, ["smoothquant:W4A8", "onptq@init=smoothquant:W4A8"])
    home = tmp_path / HOME
    [init] = (home / "inits").glob("*/theta.safetensors")
    assert init.read_bytes() == home.joinpath(*path_of("smoothquant:W4A8", "theta.safetensors")).read_bytes()
    record = json.loads(home.joinpath(*path_of("onptq:W4A8@init=smoothquant", "identity.json")).read_text())
    assert record["recipe"]["init"] == "smoothquant"
    assert Scheme.parse(record["scheme"]) == Scheme(4, 8)


def test_two_candidates_of_one_name_are_refused_with_their_seeds(small: Path, tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match="'onptq:W4A8#1' is the name of more than one model"):
        compared(small, tmp_path / "out", ["onptq:W4A8", "onptq:W4A8#1"], seeds=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_builds_seeds_and_says_which_it_did_not_run_again(small: Path, tmp_path: Path) -> None:
    prompts, out = small / "prompts.jsonl", tmp_path / "out"
    changes = [f"--set={field}={value}" for field, value in {
        "rounds": 1, "init": "rtn", "data.prompts": 3, "data.holdout": 1, "follow.max_tokens": 4, "calibrate.epochs": 1,
    }.items()]  # fmt: skip
    common = [
        "--tasks",
        "none",
        "--manifest",
        prompts,
        "--calibration",
        prompts,
        "--prompts",
        4,
        "--out",
        out,
        *changes,
    ]

    def call(*words: object) -> str:
        done = CliRunner().invoke(app, [str(word) for word in ("compare", small, *words, *common)])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "onptq:W4A8 (2 seeds)" in call("rtn:W4A8", "onptq:W4A8", "--seeds", 2)
    again = call("onptq:W4A8", "--seeds", 2)
    assert f"Not run again, as measured before in {out}: onptq:W4A8, onptq:W4A8#1" in again
    assert f"Also shown, as measured before in {out}: rtn:W4A8" in again
