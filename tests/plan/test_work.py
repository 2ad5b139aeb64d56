"""How much a recipe asks of a model, beside what its settings say in so many words."""

from __future__ import annotations

from typing import Any

import pytest

from onptq.plan.work import Work
from onptq.recipe import Recipe
from onptq.registry import METHODS


def work(method: str = "onptq", /, **changes: Any) -> Work:
    """100 calibration and 10 held-out prompts of 200 tokens, and responses of 50."""
    recipe = Recipe.preset("risk", {"method": method, "follow.max_tokens": 50, **changes})
    return Work(100, 10, 200, 120, recipe)


@pytest.mark.parametrize(("rounds", "refresh", "banks"), [(3, True, 3), (3, False, 1), (1, False, 1), (0, True, 0)])
def test_a_bank_is_made_in_every_round_or_in_the_first_alone(rounds: int, refresh: bool, banks: int) -> None:
    assert work(rounds=rounds, refresh=refresh).banks == banks


def test_held_out_prompts_are_followed_before_every_round_at_the_end_and_under_plain_rounding() -> None:
    assert [work(rounds=rounds).held_out_passes for rounds in (1, 2, 3)] == [3, 4, 5]
    assert work("rtn").held_out_passes == 1


@pytest.mark.parametrize(("keep", "judged"), [("best", 10 * (4 + 1)), ("last", 0)])
def test_a_round_judges_its_start_and_every_evaluation_unless_it_keeps_the_last(keep: str, judged: int) -> None:
    assert work(**{"calibrate.evaluations": 4, "calibrate.keep": keep}).judged == judged


def test_branches_fork_six_tenths_of_the_states_all_of_them_or_none() -> None:
    critical = {"calibrate.pair": 0.1, "calibrate.consequence": 0.0}
    assert work(**critical).candidates == 100 * 50 * 6 // 10
    assert work(**critical | {"calibrate.consequence": 1.0}).candidates == 100 * 50
    assert work("static").candidates == 0


@pytest.mark.parametrize(
    ("changes", "decisions"),
    [
        ({"select.budget": 256}, 256),
        ({"select.budget": 10**6}, 3000),
        ({"select.per_prompt": 4}, 400),
        ({"select.rule": "all", "select.budget": 10**6}, 5000),
        ({"select.budget": 256, "calibrate.response_over": "visited"}, 5000),
        ({"select.budget": 256, "calibrate.response_over": "visited", "calibrate.gamma": 0.0}, 0),
    ],
)
def test_the_objective_reads_logits_of_selected_or_visited_states(changes: dict[str, Any], decisions: int) -> None:
    plain = {"calibrate.response_over": "critical", "calibrate.pair": 0.1, "calibrate.consequence": 0.0}
    assert work(**plain | changes).decisions == decisions


def test_a_batch_has_as_many_prompts_as_its_tokens_allow() -> None:
    assert [work(**{"compute.batch_tokens": tokens}).rows for tokens in (100, 1000, 10**6)] == [1, 4, 100]
    update = {"calibrate.batch": 8, "calibrate.micro_batch": 4}
    assert [work(**update | {"calibrate.micro_batch": size}).micro_batch for size in (4, 16)] == [4, 8]


def test_a_learned_init_judges_each_block_three_times_and_its_start() -> None:
    assert [work(init="signround", init_steps=steps).start_evaluations for steps in (1, 2, 200)] == [2, 3, 4]
    assert [work(init=init).start_rounds for init in ("search", "signround", "search+signround")] == [False, True, True]


def test_the_steps_of_every_init_are_those_it_takes() -> None:
    steps = {name: work(init=name).start_steps for name in METHODS if work(init=name).start_rounds}
    assert steps == {"signround": 200, "search+signround": 200, "blockwise": 1280}
    assert work(init="blockwise", init_steps=7).start_steps == 7
