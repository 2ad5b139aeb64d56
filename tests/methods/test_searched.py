"""A rounding method on the searched grid."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Tiny
from method_bed import PROMPTS, check_manners, exact_policy, open_small, short_responses

from onptq.methods import METHODS, initialize
from onptq.methods.gptq import gptq
from onptq.methods.search import search
from onptq.methods.signround import signround
from onptq.recipe import Recipe


@pytest.fixture(scope="module")
def bed(small: Path):
    opened = open_small(small)
    policy = exact_policy(opened, "W3A8")
    prompts = opened.encode(policy, PROMPTS)
    return policy, prompts, short_responses(prompts)


@pytest.mark.parametrize(("name", "rounding", "options"), [("gptq", gptq, {}), ("signround", signround, {"steps": 40})])
def test_it_is_the_method_started_from_the_search(bed, name: str, rounding: Callable, options: dict[str, int]) -> None:
    policy, prompts, responses = bed
    found = METHODS[f"search+{name}"](policy, prompts, responses=responses, **options)
    grid = search(policy, prompts, responses=responses)
    assert all(torch.equal(u, found.smoothing[key]) for key, u in grid.smoothing.items())
    expected = rounding(policy, prompts, responses=responses, start=grid, **options).tensors()
    assert found.tensors().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.tensors().items())
    assert any(offset.abs().max() > 0 for offset in found.offset.values())


def test_it_tells_of_every_block_and_leaves_the_policy_as_it_was(tiny: Callable[[str], Tiny]) -> None:
    def method(policy, prompts, advance):
        return METHODS["search+gptq"](policy, prompts, advance, responses=short_responses(prompts))

    check_manners(tiny("qwen3-vl"), "W4A8", method)


def test_a_recipe_says_how_many_steps_a_learning_start_takes(bed, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, prompts, _ = bed
    taken = []
    module = importlib.import_module("onptq.methods.signround")  # in its package the name is the function's
    monkeypatch.setattr(module._Learner, "learn", lambda self, steps: taken.append(steps))
    for changes in ({}, {"init_steps": 3}, {"init": "search", "init_steps": 3}):
        initialize(policy, prompts, Recipe().with_overrides(changes), lambda blocks: None)
    assert taken == [module.STEPS] * policy.blocks + [3] * policy.blocks
