"""Prefixes: what they cache of Q is never that of another Q."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import Tiny
from naive import decoder_forwards, random_theta

import onptq
from onptq.bank import States, Trajectory
from onptq.engine.prefixes import Prefixes
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta

TOKENS = 5


def follow_compare_branch(prefixes: Prefixes) -> tuple[list[Trajectory], States]:
    trajectories = onptq.follow(prefixes)
    return trajectories, onptq.branch(prefixes, trajectories, onptq.compare(prefixes, trajectories), horizon=3)


def fresh(policy: Policy, prompts: list[EncodedPrompt]) -> tuple[list[Trajectory], States]:
    return follow_compare_branch(Prefixes(policy, prompts, max_tokens=TOKENS))


def assert_same(results: tuple[list[Trajectory], States], expected: tuple[list[Trajectory], States]) -> None:
    assert results[0] == expected[0]
    assert same_states(results[1], expected[1])


def same_states(one: States, other: States) -> bool:
    return all(np.array_equal(column, vars(other)[name]) for name, column in vars(one).items())


@pytest.mark.slow
@pytest.mark.parametrize("speak", ["freeze", "attach"])
def test_two_rounds_on_the_same_prefixes_equal_fresh_prefixes(tiny: Callable[[str], Tiny], speak: str) -> None:
    """The README's library example, twice in a row: no call between two thetas but the one that changes Q."""
    policy = tiny("qwen2.5-vl").policy("W3A8")
    prompts = tiny("qwen2.5-vl").encode(policy, 3)
    recipe = onptq.Recipe()
    prefixes = Prefixes(policy, prompts, max_tokens=TOKENS)
    theta, seen = random_theta(policy), []
    for _ in range(2):
        getattr(policy, speak)(theta)
        results = follow_compare_branch(prefixes)
        assert_same(results, fresh(policy, prompts))
        seen.append(results)
        states = onptq.select(onptq.score(results[1], recipe.risk), recipe.select)
        rates = {"lr_smoothing": 0.05, "lr_step": 0.05}
        cfg = recipe.calibrate.model_copy(update={"keep": "last", "codes": "free", **rates})
        theta = onptq.calibrate(policy, prompts, results[0], states, theta, cfg).theta
    assert not same_states(seen[0][1], seen[1][1]), "the second theta has to differ for this to say anything"


def test_an_attached_theta_written_to_in_place_is_another_q(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("llama").policy("W4A16")
    prompts, theta = tiny("llama").encode(policy, 2), random_theta(policy)
    prefixes = Prefixes(policy, prompts, max_tokens=TOKENS)
    policy.attach(theta)
    before = prefixes.prompt(0, "Q").last
    assert prefixes.prompt(0, "Q").last is before
    for ratio in theta.ratio.values():
        ratio.sub_(0.5)
    after = prefixes.prompt(0, "Q").last
    assert not torch.equal(before, after)
    assert torch.equal(after, Prefixes(policy, prompts, max_tokens=TOKENS).prompt(0, "Q").last)


def test_prefixes_of_an_earlier_q_are_evicted_and_those_of_d_stay(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("llama").policy("W4A16")
    prefixes = Prefixes(policy, tiny("llama").encode(policy, 2), max_tokens=TOKENS)
    dense = prefixes.prompt(0, "D")
    for seed in range(3):
        policy.freeze(random_theta(policy, seed))
        prefixes.prompt(0, "Q")
        assert len(prefixes._cached) == 2
    assert prefixes.prompt(0, "D") is dense


def test_every_change_of_q_changes_its_generation(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("llama").policy("W4A8")
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    seen = [policy.generation]
    for change in (policy.freeze, policy.freeze, policy.attach, policy.freeze):
        change(theta)
        seen.append(policy.generation)
    policy.release()
    seen.append(policy.generation)
    assert len(set(seen)) == len(seen)


def test_an_attached_theta_whose_tensors_are_written_to_or_replaced_is_another_q(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("llama").policy("W4A8")
    theta = random_theta(policy)
    policy.attach(theta)
    key, path = next(iter(theta.smoothing)), next(iter(theta.linears))
    seen = [policy.generation]
    assert policy.generation == seen[0], "reading changes nothing"

    def changed() -> bool:
        seen.append(policy.generation)
        return len(set(seen)) == len(seen)

    theta.smoothing[key].add_(0.1)
    assert changed()
    theta.smoothing[key] = theta.smoothing[key].clone()
    assert changed()
    theta.linears[path].ratio = theta.linears[path].ratio.clone()
    assert changed()
    with torch.inference_mode():
        assert policy.generation == seen[-1]
        theta.smoothing[key] = theta.smoothing[key].clone()
        assert changed()
        theta.smoothing[key].add_(0.1)  # of which such a tensor tells nothing
        assert changed()


def test_a_replaced_tensor_of_theta_leaves_no_stale_prefix(tiny: Callable[[str], Tiny]) -> None:
    t = tiny("llama")
    policy = t.policy("W4A8")
    prompts = t.encode(policy, 2)
    prefixes = Prefixes(policy, prompts, max_tokens=4)
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    policy.attach(theta)
    before = prefixes.prompt(0, "Q").last
    other = random_theta(policy)
    theta.smoothing.update(other.smoothing)
    after = prefixes.prompt(0, "Q").last
    fresh = Prefixes(policy, prompts, max_tokens=4).prompt(0, "Q").last
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before)


def test_settling_and_centring_leave_q_as_it_is_and_a_loan_ends_with_the_q_before(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("llama").policy("W4A8")
    theta = random_theta(policy)
    policy.freeze(theta)
    states, generation = [module.state for module in policy.wrapped], policy.generation
    policy.settle(theta)
    policy.centre(theta)
    assert policy.generation == generation
    with policy.lent():
        policy.attach(Theta.rtn(policy.structure.blocks, policy.scheme))
        during = policy.generation
    assert len({generation, during, policy.generation}) == 3, "caches of the loan serve nobody else"
    assert all(module.state is state for module, state in zip(policy.wrapped, states, strict=True))


def test_the_budget_is_for_all_prefixes_together(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("qwen2.5-vl").policy("W4A8")
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
    prompts = tiny("qwen2.5-vl").encode(policy, 3)
    unlimited = Prefixes(policy, prompts, max_tokens=TOKENS, batch_tokens=1)
    sizes = [unlimited.prompt(index, "D").nbytes for index in range(3)]
    prefixes = Prefixes(policy, prompts, max_tokens=TOKENS, batch_tokens=1, budget=sizes[0] + sizes[1])
    forwards = []
    for _ in range(2):
        with decoder_forwards(policy) as seen:
            for index in range(3):
                prefixes.prompt(index, "D")
        forwards.append(seen)
    widths = [batch.width for batch in prefixes.batches]
    assert forwards == [[("D", width) for width in widths], [("D", widths[2])]]
    with decoder_forwards(policy) as seen:
        prefixes.prompt(0, "Q")
        prefixes.prompt(0, "Q")
    assert seen == [("Q", widths[0])] * 2, "both sides share it"
