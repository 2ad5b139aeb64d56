"""recipes/paper: every model and scheme of the paper, with its settings; what each file says about itself."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml
from plan_models import write_sparse

from onptq.cli import app
from onptq.errors import OnPTQError
from onptq.plan.machine import machine_with
from onptq.plan.planning import make_plan
from onptq.recipe import Recipe

FOLDER = Path(__file__).parents[1] / "recipes/paper"
FILES = sorted(FOLDER.glob("*.yaml"))
VISION = ("W4A16", "W8A8", "W4A8", "W4A6")
OMNI = ("W4A8", "W4A6")
MODELS = {
    "qwen2.5-vl-7b": ("Qwen/Qwen2.5-VL-7B-Instruct", VISION, "coco-128.jsonl"),
    "qwen3-vl-8b": ("Qwen/Qwen3-VL-8B-Instruct", VISION, "coco-128.jsonl"),
    "qwen2.5-omni-3b": ("Qwen/Qwen2.5-Omni-3B", OMNI, "omnibench-128.jsonl"),
    "qwen2.5-omni-7b": ("Qwen/Qwen2.5-Omni-7B", OMNI, "omnibench-128.jsonl"),
}
PLANNED = re.compile(r"# onptq plan --prompt-tokens (\d+): ([\d.]+) GPU minutes and (\d+) GiB on h100-80g, ")


def header(file: Path) -> str:
    return "".join(line for line in file.read_text(encoding="utf-8").splitlines(True) if line.startswith("#"))


def test_there_is_a_recipe_for_every_model_and_scheme_of_the_paper() -> None:
    assert {file.stem for file in FILES} == {
        f"{name}-{one}" for name, (_, schemes, _) in MODELS.items() for one in schemes
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_has_the_papers_settings(file: Path) -> None:
    """The settings of the appendix: 128 prompts, 64 tokens, two rounds with refresh, H, K_c, lambda_b, eta, gamma."""
    recipe = Recipe.from_yaml(file)
    assert recipe.scheme == file.stem.rpartition("-")[2]
    assert (recipe.method, recipe.rounds, recipe.refresh) == ("onptq", 2, True)
    assert (recipe.data.prompts, recipe.data.holdout_share) == (128, 0.0)
    assert (recipe.follow.max_tokens, recipe.follow.sampling, recipe.follow.policy) == (64, "greedy", "quantized")
    assert (recipe.branch.horizon, recipe.risk.branch_weight, recipe.risk.divergence_weight) == (4, 1.0, 1.0)
    assert (recipe.risk.divergence, recipe.select.rule, recipe.select.weights) == ("js", "risk", "risk")
    assert (recipe.select.budget, recipe.calibrate.gamma) == (256, 0.2)
    assert (recipe.calibrate.response_over, recipe.calibrate.normalize) == ("critical", "none")
    assert recipe == Recipe.preset("paper", {"scheme": recipe.scheme})
    assert set(yaml.safe_load(file.read_text(encoding="utf-8"))) == {"preset", "scheme"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_opens_with_the_command_that_runs_it(file: Path) -> None:
    hub_id, _, manifest = MODELS[file.stem.rpartition("-")[0]]
    text = header(file).replace("\\\n#", "")
    onptq, command, model, *options = shlex.split(text.splitlines()[0].removeprefix("# "))
    assert (onptq, command, model) == ("onptq", "quantize", hub_id)
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given == {
        "--recipe": file.relative_to(FOLDER.parents[1]).as_posix(),
        "--calibration": manifest,
        "--out": file.stem,
    }
    known = typer.main.get_command(app).get_command(None, command).params  # type: ignore[attr-defined, arg-type]
    assert set(given) <= {name for parameter in known for name in parameter.opts}
    assert PLANNED.search(text)


@pytest.mark.parametrize("scheme", VISION)
def test_a_recipe_says_what_the_plan_says(scheme: str, small: Path, tmp_path: Path) -> None:
    file = FOLDER / f"qwen2.5-vl-7b-{scheme}.yaml"
    said = PLANNED.search(header(file))
    assert said is not None
    folder = write_sparse(tmp_path / "model", "qwen2.5-vl-7b", small)
    recipe = Recipe.from_yaml(file)
    plan = make_plan(folder, recipe, prompt_tokens=int(said[1]), machine=machine_with("h100-80g", recipe.compute))
    assert plan.refusals == ()
    assert plan.seconds == pytest.approx(60 * float(said[2]), rel=0.1)
    assert max(phase.gpu_bytes for phase in plan.phases) / 2**30 == pytest.approx(float(said[3]), rel=0.05)


def test_a_file_may_name_a_preset_and_change_its_fields(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("preset: paper\nbranch: {horizon: 8}\nmethod: static\n")
    assert Recipe.from_yaml(file) == Recipe.preset("paper", {"branch.horizon": 8, "method": "static"})
    assert Recipe.from_yaml(file, ["branch.horizon=2"]).branch.horizon == 2
    file.write_text("preset: papre\n")
    with pytest.raises(OnPTQError, match=r"unknown preset 'papre' \(did you mean paper\?\)"):
        Recipe.from_yaml(file)
    file.write_text("preset: [paper]\n")
    with pytest.raises(OnPTQError, match="unknown preset"):
        Recipe.from_yaml(file)
