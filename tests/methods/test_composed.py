"""Two methods in a row: the first places the grid, the second chooses the codes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Tiny
from method_models import PROMPTS, check_contract, exact_policy, open_small, short_responses

from onptq.bank import Trajectory
from onptq.methods import METHODS, initialize
from onptq.methods.gptq import gptq
from onptq.methods.search import search
from onptq.methods.signround import signround
from onptq.methods.smoothquant import SMOOTHED, smoothquant
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.recipe import Recipe

Case = tuple[Policy, list[EncodedPrompt], list[Trajectory]]


@pytest.fixture(scope="module")
def case(small: Path) -> Case:
    opened = open_small(small)
    policy = exact_policy(opened, "W3A8")
    prompts = opened.encode(policy, PROMPTS)
    return policy, prompts, short_responses(prompts)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounding", "options"), [("gptq", gptq, {}), ("signround", signround, {"steps": 40})])
def test_it_is_the_rounding_method_on_the_searched_grid(
    case: Case, name: str, rounding: Callable, options: dict[str, int]
) -> None:
    policy, prompts, responses = case
    actual = METHODS[f"search+{name}"](policy, prompts, responses=responses, **options)
    grid = search(policy, prompts, responses=responses)
    assert all(torch.equal(u, actual.smoothing[key]) for key, u in grid.smoothing.items())
    expected = rounding(policy, prompts, responses=responses, init=grid, **options).tensors()
    assert actual.tensors().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in actual.tensors().items())
    assert any(offset.abs().max() > 0 for offset in actual.offset.values())


def test_gptq_behind_smoothquant_rounds_what_smoothquant_left(case: Case) -> None:
    policy, prompts, responses = case
    actual = METHODS["smoothquant+gptq"](policy, prompts, responses=responses)
    smoothed = smoothquant(policy, prompts)
    assert all(torch.equal(u, actual.smoothing[key]) for key, u in smoothed.smoothing.items())
    assert {key.split(".")[-1] for key, u in actual.smoothing.items() if u.any()} == set(SMOOTHED)
    assert not any(ratio.any() for ratio in actual.ratio.values())
    expected = gptq(policy, prompts, responses=responses, init=smoothed).tensors()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in actual.tensors().items())
    plain = gptq(policy, prompts, responses=responses).offset
    assert any(not torch.equal(offset, plain[path]) for path, offset in actual.offset.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["search+gptq", "smoothquant+gptq"])
def test_it_reports_every_block_and_leaves_the_policy_as_it_was(tiny: Callable[[str], Tiny], name: str) -> None:
    def method(policy, prompts, advance):
        return METHODS[name](policy, prompts, advance, responses=short_responses(prompts))

    check_contract(tiny("qwen3-vl"), "W4A8", method)


@pytest.mark.slow
def test_a_recipe_says_how_many_steps_a_learning_init_takes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, prompts, _ = case
    taken = []
    module = importlib.import_module("onptq.methods.signround")  # in its package the name is the function's
    monkeypatch.setattr(module._Learner, "learn", lambda self, steps: taken.append(steps))
    for changes in ({}, {"init_steps": 3}, {"init": "search", "init_steps": 3}):
        initialize(policy, prompts, Recipe().with_overrides(changes), lambda blocks: None)
    assert taken == [module.STEPS] * policy.blocks + [3] * policy.blocks
