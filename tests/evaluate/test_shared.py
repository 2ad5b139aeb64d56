"""What candidates of a comparison have in common is computed once, and is what each would have computed alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onptq.data.manifest import load_manifest
from onptq.evaluate.candidates import MethodCandidate
from onptq.evaluate.comparison import compare_models
from onptq.evaluate.shared import common_rounds, visits_alike
from onptq.evaluate.store import path_of
from onptq.recipe import Recipe
from onptq.run import HOME

RECIPE = Recipe.preset(
    "paper",
    {"data.prompts": 3, "data.holdout": 0, "follow.max_tokens": 8, "calibrate.epochs": 1, "calibrate.keep": "last"},
)


def fields(**changes: Any) -> dict[str, Any]:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return RECIPE.with_overrides(dotted).model_dump(exclude={"compute", "report"})


@pytest.mark.parametrize(
    ("first", "second", "rounds"),
    [
        ({}, {}, 2),
        ({}, {"rounds": 1}, 1),
        ({"rounds": 5}, {}, 2),
        ({}, {"refresh": False}, 1),
        ({"refresh": False}, {"refresh": False, "rounds": 5}, 2),
        ({}, {"calibrate__gamma": 0.5}, 0),
        ({}, {"rounds": 1, "seed": 1}, 0),
    ],
)
def test_rounds_are_common_as_far_as_nothing_before_them_differs(
    first: dict[str, Any], second: dict[str, Any], rounds: int
) -> None:
    assert common_rounds(fields(**first), fields(**second)) == rounds


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"risk__branch_weight": 0.0, "select__rule": "mismatch", "calibrate__pair": 0.0, "rounds": 5}, True),
        ({"calibrate__gamma": 0.0}, False),
        ({"risk__divergence": "kl"}, False),
        ({"risk__near_miss_tol": 0.5}, False),
        ({"follow__policy": "dense"}, False),
        ({"init": "awq"}, False),
        ({"calibrate__consequence": 1.0}, False),
    ],
)
def test_first_states_are_alike_as_far_as_only_the_update_differs(changes: dict[str, Any], alike: bool) -> None:
    assert visits_alike(fields(), fields(**changes)) is alike


@pytest.mark.slow
def test_what_is_copied_is_what_would_be_computed(small: Path, tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "full": {},
        "one round": {"rounds": 1},
        "not refreshed": {"refresh": False},
        "three rounds": {"rounds": 3},
        "boundary": {"risk.branch_weight": 0.0, "risk.divergence_weight": 0.0},
        "all states": {"select.rule": "all"},
        "further": {"branch.horizon": 2},
    }
    candidates = [MethodCandidate(f"{name}:W4A8", RECIPE.with_overrides(one)) for name, one in changes.items()]
    prompts = load_manifest(small / "prompts.jsonl")
    given: dict[str, Any] = {
        "prompts": prompts[3:], "calibration": prompts[:3], "recipe": RECIPE, "replicates": 50, "damage": False
    }  # fmt: skip
    together = tmp_path / "together"
    report = compare_models(small, candidates, together, alone="few", **given)
    log = (together / HOME / "log.jsonl").read_text()
    made = [line for line in log.splitlines() if '"state": "end"' in line and "copied" not in line]
    counts = {name: sum(f'"{name}"' in line for line in made) for name in ("Compare 1", "Branch 1", "Calibrate 1")}
    assert counts == {"Compare 1": 2, "Branch 1": 2, "Calibrate 1": 4}
    for one in candidates:
        alone = tmp_path / one.name
        compare_models(small, [one], alone, **given)
        for file in ("theta.safetensors", "run/rounds/0/bank.parquet"):
            parts = path_of(one.name, *file.split("/"))
            assert (together.joinpath(HOME, *parts).read_bytes()) == alone.joinpath(HOME, *parts).read_bytes(), one.name
    assert (together / "few.json").exists()
    assert not (together / "report.json").exists()
    [first, *rest] = candidates
    again = compare_models(small, rest[:1], together, alone="fewer", **given)
    assert list(again.models) == ["dense", rest[0].name]
    assert again.models[rest[0].name].figures == report.models[rest[0].name].figures
    phases = [report.models[one.name].cost["seconds"] for one in (first, rest[1])]
    assert all(seconds > 0 for seconds in phases)
