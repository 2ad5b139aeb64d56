"""Numbers that are none are named by every base method: module, prompt and step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from method_models import open_small, short_responses

from onptq.bank import Trajectory
from onptq.errors import OnPTQError
from onptq.methods import METHODS, accepts, guards, initialize
from onptq.methods.linears import dense_weight
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.recipe import Recipe

SEEING = [name for name in METHODS if name != "rtn"]  # those that run prompts
Case = tuple[Policy, list[EncodedPrompt], list[Trajectory]]


@pytest.fixture(scope="module")
def case(small: Path) -> Case:
    opened = open_small(small)
    policy = opened.policy("W4A8")
    prompts = opened.encode(policy, 3)
    return policy, prompts, short_responses(prompts)


def fit(case: Case, name: str, prompts: list[EncodedPrompt]) -> None:
    policy, _, responses = case
    given = {"responses": responses} if accepts(name, "responses") else {}
    METHODS[name](policy, prompts, **given, **({"steps": 4} if accepts(name, "steps") else {}))


@pytest.fixture
def infinite(case: Case) -> Iterator[str]:
    """A weight of the second block that is infinite."""
    weight = dense_weight(case[0].structure.blocks[1], "mlp.down_proj")
    before = weight[0, 0].item()
    weight[0, 0] = math.inf
    yield "layers.1"
    weight[0, 0] = before


@pytest.mark.parametrize("name", SEEING)
def test_a_prompt_with_numbers_that_are_none_is_named(case: Case, name: str) -> None:
    prompts = list(case[1])
    spoiled = prompts[1].embeds.clone()
    spoiled[2, 0] = math.nan
    prompts[1] = replace(prompts[1], embeds=spoiled)
    with pytest.raises(OnPTQError, match=rf"(layers\.0 are|gradients .*) not finite at prompt {prompts[1].ordinal}:"):
        fit(case, name, prompts)


@pytest.mark.parametrize("name", SEEING)
def test_a_block_that_overflows_is_named(case: Case, name: str, infinite: str) -> None:
    with pytest.raises(OnPTQError, match=rf"({infinite}|gradients .*|theta)"):
        fit(case, name, case[1])


@pytest.mark.parametrize("name", ["signround", "masquant", "blockwise"])
def test_learning_that_diverges_names_block_and_step(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module(f"onptq.methods.{name}")
    if name == "signround":
        monkeypatch.setattr(module, "signed_step", lambda parameter, *rest: parameter.fill_(math.nan))
    else:
        monkeypatch.setattr(module, "LR_SCALE" if name == "blockwise" else "RATE", math.inf)
    with pytest.raises(OnPTQError, match=r"layers\.0.* step \d"):
        fit(case, name, case[1])


def test_a_theta_that_is_not_finite_is_never_handed_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, prompts, _ = case

    def broken(policy: Policy, prompts: object, advance: object) -> object:
        theta = METHODS["rtn"](policy, prompts, lambda blocks: None)
        theta.smoothing["layers.1.up_down"][3] = math.nan
        return theta

    monkeypatch.setattr("onptq.methods.run", lambda name, policy, prompts, advance: broken(policy, prompts, advance))
    with pytest.raises(OnPTQError, match=r"the init is not finite: smoothing of layers\.1\.up_down"):
        initialize(policy, prompts, Recipe(init="search"), lambda blocks: None)


def test_an_error_without_a_number_is_no_choice() -> None:
    guards.require_finite_error(torch.ones(3), "layers.0")
    for error in (math.nan, math.inf, torch.tensor([1.0, math.nan])):
        with pytest.raises(OnPTQError, match=r"the error of layers\.0 is not finite after step 3"):
            guards.require_finite_error(error, "layers.0", 3)
