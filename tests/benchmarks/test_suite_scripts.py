"""The scripts beside the suite: variants of the objective, profiles and figures of embedded models, text prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.suite import instructions, objective_forms, zoo_figures, zoo_profile
from onptq.data.manifest import load_manifest
from onptq.zoo.random import write_random

TINY = (
    "data.prompts=3",
    "data.holdout=1",
    "follow.max_tokens=4",
    "rounds=1",
    "calibrate.epochs=1",
    "calibrate.keep=last",
)


@pytest.mark.slow
def test_variants_of_the_objective_share_their_init_and_are_compared_with_the_static_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_random("qwen2", tmp_path / "model", prompts=1, layers=1, hidden=64, heads=2, kv_heads=1, ffn=128)
    variants, names = ["static, energy", "onptq, literal"], ["rtn:W4A8", "static, energy", "onptq, literal"]
    changes = [part for change in TINY for part in ("--set", change)]
    arguments = ["--model", str(model), "--init", "rtn", "--test-topics", "1", *changes]
    objective_forms.main([str(tmp_path / "out"), *arguments, "--variants", "init", *variants])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["models"]) == ["dense", *names]
    assert report["prompts"] == len(instructions.FORMS)
    figures = [report["models"][name]["figures"]["kl"]["value"] for name in names]
    assert len(set(figures)) == 3  # each variant is another model
    assert len(list((tmp_path / "out").glob("onptq/inits/*/theta.safetensors"))) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "static, energy against rtn:W4A8: " in printed
    assert "onptq, literal against static, energy: " in printed
    assert "onptq, literal against rtn:W4A8: " not in printed


def test_every_variant_differs_from_the_papers_recipe_in_the_named_fields() -> None:
    recipes = {name: objective_forms.variant(name, "W4A8", "search", []).recipe for name in objective_forms.VARIANTS}
    for name, recipe in recipes.items():
        assert recipe.init == "search"
        assert recipe.calibrate.normalize == ("energy" if "energy" in name else "none")
        assert (recipe.calibrate.gamma == 0) == name.startswith("static")
        assert (recipe.select.rule == "all") == name.startswith("uniform")
    assert len({recipe.model_dump_json() for recipe in recipes.values()}) == len(recipes)
    init = objective_forms.variant("init", "W4A8", "search", []).recipe
    assert (init.rounds, init.init) == (0, "search")


def test_manifests_of_instructions_share_no_topic(tmp_path: Path) -> None:
    instructions.main([str(tmp_path)])
    by_name = {name: load_manifest(tmp_path / f"{name}.jsonl") for name in ("calibration", "test")}
    topics = {name: {prompt.id.rpartition("-")[0] for prompt in prompts} for name, prompts in by_name.items()}
    assert topics["calibration"] | topics["test"] == {str(topic) for topic in range(len(instructions.TOPICS))}
    assert not topics["calibration"] & topics["test"]
    assert [len(prompts) for prompts in by_name.values()] == [20 * len(instructions.FORMS)] * 2


@pytest.mark.slow
def test_a_profile_has_the_damage_of_every_scheme_and_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    arguments = ["zoo:qwen2.5-vl", "--schemes", "W8A8", "W3A8", "--methods", "rtn", "--prompts", "4", "--items", "2"]
    zoo_profile.main([*arguments, "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["dense"]["close_calls_percent"] >= 33
    assert 25 <= report["dense"]["tokens"] <= 64
    assert list(report["quantized"]) == ["W8A8 rtn", "W3A8 rtn"]
    fine, coarse = (one["on_policy"] for one in report["quantized"].values())
    assert fine["mismatch_percent"] < coarse["mismatch_percent"]
    assert coarse["fork_consequence"] > 0.1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| W")]
    assert [row.split(" | ")[0] for row in rows] == ["| W8A8 rtn", "| W3A8 rtn"]


@pytest.mark.slow
def test_figures_of_an_embedded_model_are_its_items_and_training_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo_figures.main(["zoo:qwen2.5-vl", str(tmp_path)])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == zoo_figures.SAMPLES * 4
    for row in rows:
        image = row.partition("](")[2].partition(")")[0]
        assert (tmp_path / Path(image).name).is_file(), row
    assert (tmp_path / "qwen2.5-vl-training.svg").read_text().count('<g id="line2d') > 5  # axes and curves
