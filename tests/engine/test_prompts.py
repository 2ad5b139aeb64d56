"""Encoded prompts beyond a budget wait in files, and nothing that is computed from them changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MULTIMODAL, Tiny
from naive import random_theta
from safetensors.torch import load_file

import onptq
from onptq.engine.prefixes import Prefixes
from onptq.engine.prompts import EncodedPrompts
from onptq.models.encoding import EncodedPrompt
from onptq.recipe import Recipe
from onptq.run import SCRATCH, run_home

TOKENS = 5


def bytes_of(prompt: EncodedPrompt) -> int:
    tensors = (getattr(prompt, field.name) for field in fields(prompt))
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def same(one: EncodedPrompt, other: EncodedPrompt) -> bool:
    for name in (field.name for field in fields(EncodedPrompt)):
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, torch.Tensor):
            if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
                return False
        elif mine != theirs:
            return False
    return True


@pytest.mark.parametrize("family", [*MULTIMODAL, "llama"])
def test_prompts_beyond_the_budget_come_back_from_files_bit_for_bit(
    tiny: Callable[[str], Tiny], family: str, tmp_path: Path
) -> None:
    prompts = tiny(family).encode(tiny(family).policy(), 5)
    held = bytes_of(prompts[0]) + bytes_of(prompts[1])
    spilled = EncodedPrompts.of(iter(prompts), budget=held, folder=tmp_path / "prompts")
    assert len(spilled) == 5
    assert sorted(path.name for path in (tmp_path / "prompts").iterdir()) == [
        f"{prompt.ordinal}.safetensors" for prompt in prompts[2:]
    ]
    assert all(same(one, other) for one, other in zip(spilled, prompts, strict=True))
    assert spilled[0] is prompts[0]
    assert spilled.ordinals == [prompt.ordinal for prompt in prompts]
    assert spilled.lengths == [prompt.length for prompt in prompts]
    assert spilled.ids == [prompt.ids.tolist() for prompt in prompts]
    kinds = [[int((prompt.modality == kind).sum()) for kind in range(3)] for prompt in prompts]
    assert spilled.kinds.tolist() == kinds


def test_a_part_shares_its_prompts_with_the_whole(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    prompts = tiny("llama").encode(tiny("llama").policy(), 5)
    spilled = EncodedPrompts.of(prompts, budget=0, folder=tmp_path)
    assert EncodedPrompts.of(spilled[1:4], budget=0, folder=tmp_path / "other").ordinals == [1, 2, 3]
    assert not (tmp_path / "other").exists()
    assert same(spilled[1:4][-1], prompts[3])


def test_a_spread_takes_the_first_and_the_last_and_none_twice(tiny: Callable[[str], Tiny]) -> None:
    prompts = EncodedPrompts.of(tiny("llama").encode(tiny("llama").policy(), 9))
    assert prompts.spread(9).ordinals == prompts.spread(12).ordinals == list(range(9))
    assert prompts.spread(3).ordinals == [0, 4, 8]
    assert prompts.spread(8).ordinals == [0, 1, 2, 3, 5, 6, 7, 8]


@pytest.mark.slow
def test_batches_of_spilled_prompts_lead_to_the_same_bits(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    policy = tiny("qwen3-vl").policy("W3A8")
    prompts = tiny("qwen3-vl").encode(policy, 6)
    recipe, theta = Recipe(), random_theta(policy)
    cfg = recipe.calibrate.model_copy(update={"keep": "last", "codes": "free", "epochs": 1, "batch": 2})
    results = []
    for given in (prompts, EncodedPrompts.of(prompts, budget=0, folder=tmp_path)):
        policy.freeze(theta)
        prefixes = Prefixes(policy, given, max_tokens=TOKENS, batch_tokens=300)
        assert len(prefixes.batches) > 2
        trajectories = onptq.follow(prefixes)
        states = onptq.branch(prefixes, trajectories, onptq.compare(prefixes, trajectories), horizon=2)
        states = onptq.select(onptq.score(states, recipe.risk), recipe.select)
        updated = onptq.calibrate(policy, given, trajectories, states, theta, cfg).theta
        results.append((trajectories, states, updated.tensors()))
    (trajectories, states, mine), (others, their_states, theirs) = results
    assert trajectories == others
    assert all((column == vars(their_states)[name]).all() for name, column in vars(states).items())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def quantize(small: Path, out: Path, **changes: Any) -> dict[str, torch.Tensor]:
    tiny_run: dict[str, Any] = {
        "init": "rtn",
        "data.prompts": 4,
        "data.holdout": 2,
        "follow.max_tokens": 6,
        "calibrate.epochs": 1,
    }
    recipe = Recipe.preset("risk", tiny_run | {"compute.device": "cpu", "calibrate.batch": 2} | changes)
    onptq.quantize(small, out, calibration=small / "prompts.jsonl", recipe=recipe)
    return load_file(out / "model.safetensors")


@pytest.mark.slow
def test_a_run_that_may_cache_nothing_ends_with_the_same_weights_and_leaves_no_prompt(
    small: Path, tmp_path: Path
) -> None:
    cached = quantize(small, tmp_path / "cached")
    streamed = quantize(small, tmp_path / "streamed", **{"compute.cache_gib": 0})
    assert cached.keys() == streamed.keys()
    assert all(torch.equal(tensor, streamed[name]) for name, tensor in cached.items())
    assert not (run_home(tmp_path / "streamed") / SCRATCH).exists()
