"""Bytes by phase: which terms a recipe has, and what a 7B model takes beside what was measured on an H200."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny
from plan_models import BIG_GPU, GIB, machine, write_sparse

from onptq.plan.phases import GPU_CONTEXT_BYTES, Phase
from onptq.plan.planning import make_plan
from onptq.recipe import Recipe

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LINEARS = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)  # of Qwen2.5-VL-7B's decoder
BY_WEIGHT = ("rounding offsets", "theta's codes")


@pytest.fixture(scope="module")
def seven(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("seven"), "qwen2.5-vl-7b", tiny("qwen2.5-vl").folder)


def phases_of(folder: Path, recipe: Recipe, **options: Any) -> Mapping[str, Phase]:
    plan = make_plan(folder, recipe, machine=BIG_GPU, **options)
    return {phase.name: phase for phase in plan.phases}


def complete(scheme: str = "W4A8", /, **changes: Any) -> Recipe:
    """Every phase, over 128 prompts with answers of 64 tokens."""
    sizes = {"data.prompts": 128, "data.holdout": 32, "follow.max_tokens": 64}
    return Recipe.preset("risk", {"scheme": scheme, **sizes, **changes})


def test_every_phase_holds_at_least_the_weights(seven: Path) -> None:
    phases = phases_of(seven, complete())
    assert [*phases] == ["Load", "Encode", "Initialize", "Follow", "Compare", "Branch", "Calibrate", "Export", "Verify"]
    weights = 2 * (LINEARS + 2 * 152064 * 3584)  # and a vision tower, biases and norms
    for phase in phases.values():
        assert weights < phase.gpu["weights"] < 1.15 * weights
        assert phase.gpu_bytes == sum(phase.gpu.values()) < 60 * GIB
    assert phases["Load"].host_bytes > weights > phases["Calibrate"].host_bytes


def test_a_cache_limit_bounds_what_is_cached(seven: Path) -> None:
    calibrate = phases_of(seven, complete(**{"compute.cache_gib": 1.0}))["Calibrate"]
    assert calibrate.gpu["dense targets"] == GIB // 2
    assert calibrate.gpu["prefix caches"] <= GIB


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("init", ["search", "search+signround", "gptq"])
def test_what_theta_has_for_every_weight_is_counted(seven: Path, init: str, rounds: int) -> None:
    """Offsets take 4 bytes in every theta that an update holds, settled codes 1 or, with zero points, 2."""
    from_init = init != "search"

    def counted(codes: str, scheme: str = "W4A8") -> dict[str, float]:
        phases = phases_of(seven, complete(scheme, init=init, rounds=rounds, **{"calibrate.codes": codes}))
        held = {name: {term for term in BY_WEIGHT if term in phase.gpu} for name, phase in phases.items()}
        anything, first = held["Calibrate"], {"settled": {"theta's codes"}}.get(codes, {"rounding offsets"})
        assert held["Follow"] == held["Compare"] == held["Export"] == anything
        before = (
            codes != "learned" or from_init or rounds > 1
        )  # the first update makes offsets, and Branch comes before it
        assert held["Branch"] == (anything if before else set())
        assert anything <= first
        return {name: phases["Calibrate"].gpu[name] / LINEARS for name in anything}

    assert counted("learned") == {"rounding offsets": 4 * 6}
    assert counted("settled") == {"theta's codes": 1}
    assert counted("settled", "W4A16-asym") == {"theta's codes": 2}
    assert counted("free") == ({"rounding offsets": 4 * 3} if from_init else {})


def test_an_init_that_learns_holds_a_block_more_than_a_search(seven: Path) -> None:
    def initialize(init: str, codes: str = "settled") -> int:
        return phases_of(seven, complete(init=init, **{"calibrate.codes": codes}))["Initialize"].gpu_bytes

    search, learned = initialize("search"), initialize("signround")
    assert search + 4 * GIB < learned < search + 8 * GIB, "all codes and one block's offsets, instead of prefixes"
    assert initialize("search+signround") == learned
    assert initialize("signround", "free") > learned + 16 * GIB, "all offsets"


def test_a_response_over_visited_states_holds_their_logits(seven: Path) -> None:
    def logits(**changes: Any) -> int:
        return phases_of(seven, complete(**changes))["Calibrate"].gpu["logits"]

    few = {"select.budget": 256, "calibrate.gamma": 1.0}
    critical, visited = (logits(**few, **{"calibrate.response_over": over}) for over in ("critical", "visited"))
    assert visited > 2 * critical > 0


def test_where_nothing_of_q_fits_its_weights_are_made_in_every_forward(seven: Path) -> None:
    recipe = complete(init="search", **{"calibrate.codes": "free", "compute.cache_gib": 0.5})
    plan = make_plan(seven, recipe, machine=machine(24))
    follow = next(phase for phase in plan.phases if phase.name == "Follow")
    assert follow.gpu["Q's codes"] == 0
    assert follow.gpu["Q's weights"] == 2 * 2 * 3584 * 18944


# An init keeps no prefixes of the dense model any more.
SMALLER_SINCE = ("Initialize",)


@pytest.mark.parametrize("name", ["paper", "light-24gb"])
def test_a_7b_model_takes_the_memory_that_was_measured_on_an_h200(seven: Path, name: str) -> None:
    measured = json.loads((RESULTS / f"h200-{name}.json").read_text())
    recipe, tokens = Recipe.model_validate(measured["recipe"]), round(measured["run"]["counts"]["prompt_tokens"])
    plan = make_plan(seven, recipe, prompt_tokens=tokens, machine=machine(measured["memory_gib"] or 139))
    compared = [phase for phase in plan.phases if phase.name in measured["run"]["phases"]]
    assert len(compared) == 8
    for phase in compared:
        tensors = phase.gpu_bytes - GPU_CONTEXT_BYTES
        least = 0.8 if phase.name in SMALLER_SINCE else 0.9
        assert least < tensors / measured["run"]["phases"][phase.name]["peak_bytes"] < 1.15, phase.name
