"""Seconds by phase: more work takes longer where it is done, and a data sheet gives what was measured on an H200."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny
from plan_models import BIG_GPU, machine, write_sparse

from onptq.checkpoint.served import AMPERE
from onptq.checkpoint.source import find_source
from onptq.engine.budget import Held
from onptq.plan.machine import Gpu
from onptq.plan.parts import find_parts
from onptq.plan.planning import make_plan
from onptq.plan.seconds import datasheet_rates
from onptq.recipe import Recipe
from onptq.schemes import Scheme

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def seven(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("seven"), "qwen2.5-vl-7b", tiny("qwen2.5-vl").folder)


def seconds_of(folder: Path, **changes: Any) -> Mapping[str, float]:
    plan = make_plan(
        folder,
        Recipe.preset("risk", {"scheme": "W4A8", "data.prompts": 128, "follow.max_tokens": 64, **changes}),
        machine=BIG_GPU,
    )
    return {phase.name: phase.seconds for phase in plan.phases}


@pytest.mark.parametrize(
    ("change", "grows"),
    [
        ({"data.prompts": 512}, {"Encode", "Initialize", "Follow", "Compare", "Branch", "Calibrate"}),
        ({"follow.max_tokens": 256}, {"Follow", "Compare", "Branch", "Calibrate"}),
        ({"branch.horizon": 16}, {"Branch"}),
        ({"data.holdout": 512}, {"Encode", "Follow", "Compare", "Calibrate"}),
        ({"rounds": 4}, {"Follow", "Compare", "Branch", "Calibrate"}),
        ({"calibrate.epochs": 16}, {"Calibrate"}),
        ({"init_steps": 400}, {"Initialize"}),
    ],
)
def test_more_work_takes_longer_where_it_is_done(seven: Path, change: dict[str, Any], grows: set[str]) -> None:
    few, many = seconds_of(seven), seconds_of(seven, **change)
    assert all(seconds > 0 for seconds in few.values())
    assert {name for name in few if many[name] > 1.1 * few[name]} == grows


def test_a_data_sheet_gives_integers_their_own_rate_and_learning_three_gemms(seven: Path) -> None:
    shapes = find_parts(find_source(seven), Scheme.parse("W4A8")).shapes
    gpu = Gpu("a GPU", 80, bf16=1000, int8=1600, bandwidth=2000, link=400, generation=AMPERE)
    shares: dict[Held, float] = {"integers": 0.625, "floats": 1.0, "codes": 1.0, "nothing": 1.0}
    for keep, share in shares.items():
        rates = datasheet_rates(gpu, shapes, keep)
        assert rates.dense.token == pytest.approx(2 * shapes.block / 500e12), "half of the peak"
        for pace in (rates.quantized, rates.decoding):
            assert pace.token == pytest.approx(share * rates.dense.token)
        assert rates.learning.token == pytest.approx(3 * rates.dense.token)
        assert rates.decoding.forward < rates.quantized.forward


def test_blocks_that_are_split_are_gathered_once_in_a_forward_and_twice_in_an_update(seven: Path) -> None:
    shapes = find_parts(find_source(seven), Scheme.parse("W4A8")).shapes
    gpu = Gpu("a GPU", 80, bf16=1000, int8=1600, bandwidth=2000, link=400, generation=AMPERE)
    whole, sharded, offloaded = (
        datasheet_rates(gpu, shapes, "nothing", layout, 4) for layout in ("whole", "sharded", "offloaded")
    )
    received = 2 * shapes.block * 0.75 / 200e9  # three parts of four, at half of the data sheet's rate
    for rates, gathered in ((sharded, received), (offloaded, received + 2 * shapes.block / 4 / 25e9)):
        assert rates.dense.forward - whole.dense.forward == pytest.approx(gathered)
        assert rates.quantized.forward - whole.quantized.forward == pytest.approx(gathered)
        assert rates.learning.forward - whole.learning.forward == pytest.approx(2 * gathered)
        assert rates.rounding == whole.rounding, "a base method keeps its block whole"
        assert rates.decoding.forward - whole.decoding.forward > gathered, "and no step is replayed"


def test_branches_cost_as_many_tokens_as_they_have(seven: Path) -> None:
    """Q takes horizon - 1 steps and D reads horizon tokens: 31 tokens a branch at 16 where there are 7 at 4."""
    short, long = (seconds_of(seven, **{"branch.horizon": horizon})["Branch"] for horizon in (4, 16))
    assert 3.5 < long / short < 6


def test_the_control_branches_nothing_and_rtn_has_no_rounds(seven: Path) -> None:
    assert "Branch" not in seconds_of(seven, method="static")
    assert [*seconds_of(seven, method="rtn")] == ["Load", "Encode", "Initialize", "Export", "Verify"]


def test_a_search_before_a_learned_init_shares_its_rollouts(seven: Path) -> None:
    search, learned, both = (
        seconds_of(seven, init=init)["Initialize"] for init in ("search", "signround", "search+signround")
    )
    assert search < learned < both < search + learned


def test_a_response_over_visited_states_takes_longer(seven: Path) -> None:
    few = {"select.budget": 256, "calibrate.gamma": 1.0}
    critical, visited = (
        seconds_of(seven, **few, **{"calibrate.response_over": over})["Calibrate"] for over in ("critical", "visited")
    )
    assert visited > critical


@pytest.mark.parametrize("name", ["paper", "light", "light-24gb"])
def test_a_data_sheet_gives_the_times_that_were_measured_on_an_h200(seven: Path, name: str) -> None:
    measured = json.loads((RESULTS / f"h200-{name}.json").read_text())
    recipe, tokens = Recipe.model_validate(measured["recipe"]), round(measured["run"]["counts"]["prompt_tokens"])
    plan = make_plan(seven, recipe, prompt_tokens=tokens, machine=machine(measured["memory_gib"] or 139))
    rows = {phase: row["seconds"] for phase, row in measured["run"]["phases"].items()}
    long = [phase for phase in plan.phases if rows.get(phase.name, 0) > 4]
    assert {"Initialize", "Calibrate", "Export"} <= {phase.name for phase in long}
    for phase in long:
        assert 0.5 < phase.seconds / rows[phase.name] < 2, phase.name
