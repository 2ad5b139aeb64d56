"""Sampled responses: drawn as transformers draws them, and the same in any batch and any process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tiny
from naive import random_theta
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import onptq
from onptq.bank import load_bank, load_trajectories
from onptq.engine.prefixes import Prefixes
from onptq.engine.prompts import EncodedPrompts
from onptq.engine.sampling import Sampling
from onptq.errors import OnPTQError
from onptq.models.decoder import KVCache, Tokens
from onptq.quantizer.policy import Policy
from onptq.recipe import Recipe
from onptq.run import run_home

TOKENS = 6


def transformers_shares(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    ids = torch.zeros(len(logits), 0, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (0.7, 20, 0.8), (1.0, 1, 0.1)]
)
def test_tokens_are_drawn_as_often_as_transformers_draws_them(temperature: float, top_k: int, top_p: float) -> None:
    logits = 2 * torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = transformers_shares(logits, temperature, top_k, top_p)
    numbers = (torch.arange(4000) + 0.5) / 4000
    sampling = Sampling(temperature, top_k, top_p)
    for row, shares in zip(logits, expected, strict=True):
        drawn = sampling.draw(row.expand(len(numbers), -1), numbers)
        found = torch.bincount(drawn, minlength=40) / len(numbers)
        assert (found - shares).abs().max() < 1.1 / len(numbers)


def test_the_ends_of_the_numbers_and_a_temperature_of_zero_give_tokens_too() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert Sampling().draw(logits, torch.tensor([0.0])).tolist() == [1]
    assert Sampling().draw(logits, torch.tensor([1.0])).tolist() == [0]
    assert Sampling(temperature=0.0).draw(logits, torch.tensor([0.99])).tolist() == [1]


@pytest.mark.parametrize("value", [-1, "0.7", True])
def test_settings_that_are_no_numbers_are_named(value: object) -> None:
    with pytest.raises(OnPTQError, match=r"generation_config.json: top_p is .*; expected a number of at least 0"):
        Sampling.of({"top_p": value}, 0)


def test_settings_that_are_missing_or_null_cut_nothing_off() -> None:
    assert Sampling.of({"temperature": None, "do_sample": True}, 3) == Sampling(1.0, 0, 1.0, 3)
    assert Sampling.of({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, 0) == Sampling(0.7, 20, 0.8, 0)
    assert Sampling.of({"repetition_penalty": 1.1}, 0).repetition_penalty == 1.1


def test_a_repetition_penalty_of_zero_is_refused() -> None:
    with pytest.raises(OnPTQError, match="repetition_penalty is 0; expected a number above 0"):
        Sampling.of({"repetition_penalty": 0}, 0)


@pytest.fixture
def policy(tiny: Callable[[str], Tiny]) -> Policy:
    policy = tiny("qwen3-vl").policy(
        "W3A16"
    )  # rounded activations would turn a neighbour's last bits into other tokens
    policy.freeze(random_theta(policy))
    return policy


def test_what_is_drawn_depends_on_the_prompt_and_the_seed_alone(tiny: Callable[[str], Tiny], policy: Policy) -> None:
    prompts = tiny("qwen3-vl").encode(policy, 5)

    def drawn(seed: int, given: Any = prompts, **options: Any) -> dict[int, tuple[int, ...]]:
        rollouts = onptq.follow(Prefixes(policy, given, max_tokens=TOKENS, **options), sampling=Sampling(seed=seed))
        return {one.prompt: one.tokens for one in rollouts}

    together = drawn(0)
    assert drawn(0, batch_tokens=1) == together
    assert drawn(0, prompts[3:]) == {prompt: tokens for prompt, tokens in together.items() if prompt >= 3}
    assert drawn(1) != together
    greedy = onptq.follow(Prefixes(policy, prompts, max_tokens=TOKENS))
    assert {one.prompt: one.tokens for one in greedy} != together
    coldest = onptq.follow(Prefixes(policy, prompts, max_tokens=TOKENS), sampling=Sampling(temperature=0.0))
    assert coldest == greedy


def test_tokens_of_prompt_and_response_are_penalized_as_transformers_does_it(
    tiny: Callable[[str], Tiny], policy: Policy
) -> None:
    prefixes = Prefixes(policy, tiny("qwen3-vl").encode(policy, 3), max_tokens=TOKENS)
    penalized = onptq.follow(prefixes, sampling=Sampling(top_k=1, repetition_penalty=1.5))
    assert penalized != onptq.follow(prefixes)
    penalize, tokens = RepetitionPenaltyLogitsProcessor(1.5), {one.prompt: one.tokens for one in penalized}
    for index, batch in enumerate(prefixes.batches):
        for row, prompt in enumerate(batch.prompts):
            said = torch.tensor(tokens[prompt.ordinal])
            responses = said.new_zeros(len(batch.prompts), len(said))
            responses[row] = said
            logits = policy.logits(prefixes.teacher_force(index, "Q", responses)[1][row])
            for t, token in enumerate(said):
                before = torch.cat((prompt.ids, said[:t]))[None]
                assert penalize(before, logits[t : t + 1]).argmax() == token


def test_copies_of_a_prompt_are_prefilled_once_and_answered_each_for_itself(
    tiny: Callable[[str], Tiny], policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts = tiny("qwen3-vl").encode(policy, 3)
    prefilled: list[int] = []
    run = Policy.run

    def counting(self: Policy, tokens: Tokens, cache: KVCache | None = None, **options: Any) -> torch.Tensor:
        if tokens.embeds.shape[1] > 1:
            prefilled.append(len(tokens.embeds))
        return run(self, tokens, cache, **options)

    monkeypatch.setattr(Policy, "run", counting)
    for given in (EncodedPrompts.of(prompts), EncodedPrompts.of(prompts, budget=0, folder=tmp_path)):
        prefilled.clear()
        copies = Prefixes(policy, given.repeated(4, stride=10), max_tokens=TOKENS)
        found = onptq.follow(copies, sampling=Sampling())
        assert sum(prefilled) == 3
        assert [one.prompt for one in found] == [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]
        assert len({one.tokens for one in found if one.prompt % 10 == 1}) > 1
        alone = list(EncodedPrompts.of(prompts).repeated(4, stride=10))
        separate = [onptq.follow(Prefixes(policy, [one], max_tokens=TOKENS), sampling=Sampling())[0] for one in alone]
        assert sorted(separate, key=lambda one: one.prompt) == found


def sampled_run(small: Path, out: Path, **changes: Any) -> onptq.pipeline.Result:
    tiny_run: dict[str, Any] = {
        "init": "rtn", "data.prompts": 4, "data.holdout": 2, "follow.max_tokens": 6, "follow.sampling": "model",
        "follow.responses": 3, "calibrate.epochs": 1, "calibrate.batch": 4, "compute.device": "cpu", "rounds": 2,
        "calibrate.codes": "free",
    }  # fmt: skip
    recipe = Recipe.preset("risk", tiny_run | changes)
    return onptq.quantize(small, out, calibration=small / "prompts.jsonl", recipe=recipe)


@pytest.mark.slow
def test_a_run_with_several_responses_has_a_bank_of_all_of_them_and_repeats_itself(small: Path, tmp_path: Path) -> None:
    first, again = (sampled_run(small, tmp_path / name) for name in ("first", "again"))
    responses = [load_trajectories(run_home(first.path), round_index=k) for k in range(2)]
    ordinals = {one.prompt for one in responses[0]}
    originals = sorted(ordinals)[:4]
    stride = 1 + max(prompt.ordinal for prompt in first.prompts.every)
    assert ordinals == {ordinal + copy * stride for ordinal in originals for copy in range(3)}
    assert set(np.unique(load_bank(run_home(first.path)).prompt)) == ordinals
    assert [one.tokens for one in responses[0]] != [one.tokens for one in responses[1]]
    assert first.summary["rounds"] == again.summary["rounds"]
    assert first.summary["rounds"][0]["steps"] == 3  # 12 responses in batches of 4
    assert (
        first.summary["checkpoint"]["sha256"]["model.safetensors"]
        == again.summary["checkpoint"]["sha256"]["model.safetensors"]
    )


@pytest.mark.slow
def test_a_model_s_own_settings_decide_what_is_sampled(small: Path, tmp_path: Path) -> None:
    model = shutil.copytree(small, tmp_path / "cold")
    settings = (
        json.loads((small / "generation_config.json").read_text())
        if (small / "generation_config.json").is_file()
        else {}
    )
    (model / "generation_config.json").write_text(json.dumps(settings | {"temperature": 1.0, "top_k": 1}))
    sampled = sampled_run(model, tmp_path / "sampled", rounds=1)
    greedy = sampled_run(model, tmp_path / "greedy", rounds=1, **{"follow.sampling": "greedy", "follow.responses": 1})
    tokens = {one.prompt: one.tokens for one in load_trajectories(run_home(greedy.path))}
    stride = 1 + max(prompt.ordinal for prompt in sampled.prompts.every)
    assert all(tokens[one.prompt % stride] == one.tokens for one in load_trajectories(run_home(sampled.path)))


def test_several_greedy_responses_are_refused() -> None:
    with pytest.raises(OnPTQError, match=r"greedy responses to one prompt are all the same.*follow\.sampling=model"):
        Recipe.preset("risk", {"follow.responses": 2})
