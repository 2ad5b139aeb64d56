"""SignRound against its formula written out, and what it promises about errors and codes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from conftest import Tiny
from method_models import (
    PROMPTS,
    block_outputs,
    check_contract,
    exact_policy,
    open_small,
    sequences_of,
    short_responses,
)
from torch.nn import functional as F

from onptq.bank import Trajectory
from onptq.kernels.grid import code_range
from onptq.methods.gptq import gptq
from onptq.methods.layerwise import Stream
from onptq.methods.linears import replaced
from onptq.methods.signround import evaluated_steps, signround
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import LINEARS
from onptq.quantizer.folded import FoldedLinear
from onptq.quantizer.modules import QuantLinear
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import OFFSET_RANGE, RATIO_RANGE, Free, Theta

RATE = 1.0  # of the only step of one

Case = tuple[Policy, list[EncodedPrompt], list[Trajectory]]


@pytest.fixture(scope="module")
def case(small: Path) -> Case:
    opened = open_small(small)
    policy = exact_policy(opened, "W3A16")
    prompts = opened.encode(policy, PROMPTS)
    return policy, prompts, short_responses(prompts)


def naive_gradients(policy: Policy, sequences: list[EncodedPrompt]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of the first block's squared output error: per weight through the scale, and per row through its codes, by hand."""
    block = policy.structure.blocks[0]
    stream = Stream(policy, sorted(sequences, key=lambda one: one.length))
    with torch.no_grad(), policy.speaking("D"):
        target = stream.run(block)
    low, high = code_range(3)
    pieces = {}
    for name in LINEARS:
        linear = block.child(name)
        assert isinstance(linear, QuantLinear)
        weight, bias = linear.weight.detach(), linear.bias
        scale = weight.abs().amax(1, keepdim=True) / oracles.half_range(3)
        scaled = weight / scale
        codes = scaled.clamp(low, high).round()
        pieces[name] = (codes * scale).requires_grad_(), bias, scale, scaled, codes
    answers = {name: lambda x, wq=wq, bias=bias: F.linear(x, wq, bias) for name, (wq, bias, *_) in pieces.items()}
    with replaced(block, answers), torch.enable_grad():
        error = (stream.run(block) - target)[stream.real].square().sum()
    gradients = torch.autograd.grad(error, [piece[0] for piece in pieces.values()])
    actual = {}
    for name, gradient in zip(LINEARS, gradients, strict=True):
        _, _, scale, scaled, codes = pieces[name]
        inside = (scaled >= low) & (scaled <= high)
        offset = torch.where(inside, gradient, 0) * scale
        ratio = (gradient * torch.where(inside, codes - scaled, codes)).sum(1, keepdim=True) * scale
        actual[block.path(name)] = offset, ratio
    return actual


def test_a_step_follows_the_sign_of_the_gradient(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, prompts, responses = case
    module = importlib.import_module("onptq.methods.signround")  # in its package the name is the function's
    monkeypatch.setattr(module._Learner, "_consider", keep_the_last)
    theta = signround(policy, prompts, responses=responses, steps=1)
    for path, (offset, ratio) in naive_gradients(policy, sequences_of(policy, prompts)).items():
        clear = offset.abs() > 1e-9 * offset.abs().max()
        expected = (-RATE * offset.sign()).clamp(*OFFSET_RANGE)
        assert (theta.offset[path].double()[clear] == expected[clear]).double().mean() > 0.999, path
        clear = ratio.abs() > 1e-6 * ratio.abs().max()
        assert torch.equal(
            theta.ratio[path][clear].double(), (-RATE * ratio.sign()).clamp(*RATIO_RANGE)[clear].float().double()
        ), path


def test_the_defaults_are_autorounds() -> None:
    module = importlib.import_module("onptq.methods.signround")
    assert (module.STEPS, module.BATCH) == (200, 8)
    assert inspect.signature(signround).parameters["steps"].default == 200


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(0, []), (1, [1]), (7, [5, 6, 7]), (100, [80, 90, 100]), (205, [165, 185, 205])],
)
def test_the_error_is_evaluated_at_the_end_and_shortly_before(steps: int, expected: list[int]) -> None:
    assert sorted(evaluated_steps(steps)) == expected


def keep_the_last(self: Any, step: int) -> None:
    self.best = Theta(linears={path: self.theta.linears[path] for path in self.paths}).clone()


def steps_of(case: Case, monkeypatch: pytest.MonkeyPatch, steps: int, prompts_a_step: int = 8) -> list[list[int | str]]:
    """For each block, the batch of every step, and "judged" where the error over all prompts is evaluated."""
    policy, prompts, responses = case
    module = importlib.import_module("onptq.methods.signround")
    taken: list[list[int | str]] = []
    begin, descend, consider = module._Learner.learn, module._Learner._descend, module._Learner._consider

    def learn(self: Any, steps: int) -> None:
        taken.append([])
        begin(self, steps)

    def step(self: Any, learned: Any, index: int, rate: float) -> None:
        taken[-1].append(index)
        descend(self, learned, index, rate)

    def judge(self: Any, step: int) -> None:
        taken[-1].append("judged")
        consider(self, step)

    for name, replacement in (("learn", learn), ("_descend", step), ("_consider", judge)):
        monkeypatch.setattr(module._Learner, name, replacement)
    monkeypatch.setattr(module, "BATCH", prompts_a_step)
    signround(policy, prompts, responses=responses, steps=steps)
    assert len(taken) == policy.blocks
    return taken


def test_the_start_and_the_last_three_tenths_compete_for_the_best(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for events in steps_of(case, monkeypatch, 10):
        assert [place for place, event in enumerate(events) if event == "judged"] == [0, 9, 11, 13]
        assert len(events) == 14


def test_batches_come_in_a_new_order_each_time_round(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = set()
    for events in steps_of(case, monkeypatch, 5 * PROMPTS, prompts_a_step=1):
        batches = [event for event in events if event != "judged"]
        rounds = [tuple(batches[start : start + PROMPTS]) for start in range(0, len(batches), PROMPTS)]
        assert len(rounds) == 5
        assert all(sorted(map(str, one)) == ["0", "1", "2"] for one in rounds), "each prompt once"
        orders.add(tuple(rounds))
        assert len(set(rounds)) > 1
    assert len(orders) > 1, "and another one in every block"


def test_rates_fall_linearly_to_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two steps the first has rate 1/2 and the second 1/4: offsets end at 1/2 or, where the signs differ, at 1/4."""
    policy, prompts, responses = case
    module = importlib.import_module("onptq.methods.signround")
    monkeypatch.setattr(module._Learner, "_consider", keep_the_last)
    theta = signround(policy, prompts, responses=responses, steps=2)
    travelled = torch.cat([offset.abs().flatten() for offset in theta.offset.values()])
    assert set(travelled.unique().tolist()) <= {0.0, 0.25, 0.5}, "none where the code saturates"
    assert min(float((travelled == value).double().mean()) for value in (0.25, 0.5)) > 0.02


def test_a_block_ends_with_its_best_iterate_not_the_last(case: Case) -> None:
    """One step of rate 1 puts every weight on the tie between two codes, which is worse than where it was."""
    policy, prompts, responses = case
    init = Theta.rtn(policy.structure.blocks, policy.scheme)
    theta = signround(policy, prompts, responses=responses, steps=1)
    sequences = sequences_of(policy, prompts)
    dense, errors = block_outputs(policy, "D", sequences)[0], []
    for one in (theta, init):
        policy.freeze(one)
        outputs = block_outputs(policy, "Q", sequences)[0]
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(outputs, dense, strict=True)))
    assert errors[0] <= errors[1]
    rejected = [path for path, linear in theta.linears.items() if isinstance(linear, Free)]
    assert rejected, "no block was worse after its step: the test shows nothing"
    assert all(torch.equal(theta.ratio[path], init.ratio[path]) for path in rejected)


@pytest.mark.slow
def test_rounding_is_learned_and_no_code_is_further_than_the_next_one(case: Case) -> None:
    policy, prompts, responses = case
    plain = Theta.rtn(policy.structure.blocks, policy.scheme)
    theta = signround(policy, prompts, responses=responses, steps=60)
    sequences = sequences_of(policy, prompts)
    dense = block_outputs(policy, "D", sequences)[-1]
    errors = []
    for one in (theta, plain):
        policy.freeze(one)
        actual = block_outputs(policy, "Q", sequences)[-1]
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(actual, dense, strict=True)))
    assert errors[0] < 0.6 * errors[1]
    assert all(float(offset.abs().max()) <= OFFSET_RANGE[1] for offset in theta.offset.values())
    assert any(bool((offset.abs() > 0.1).any()) for offset in theta.offset.values())


@pytest.mark.parametrize("family", ["qwen3-vl"])
def test_it_reports_every_block_and_leaves_the_policy_as_it_was(tiny: Callable[[str], Tiny], family: str) -> None:
    def method(policy, prompts, advance):
        return signround(policy, prompts, advance, responses=short_responses(prompts), steps=2)

    check_contract(tiny(family), "W4A8", method)


def test_without_steps_it_is_its_init(case: Case) -> None:
    policy, prompts, responses = case
    theta = signround(policy, prompts, responses=responses, steps=0)
    plain = Theta.rtn(policy.structure.blocks, policy.scheme)
    policy.freeze(theta)
    codes = {path: piece.codes for path, piece in policy.folded() if isinstance(piece, FoldedLinear)}
    assert codes.keys() == plain.ratio.keys()
    policy.freeze(plain)
    for path, piece in policy.folded():
        assert not isinstance(piece, FoldedLinear) or torch.equal(piece.codes, codes[path])


@pytest.mark.parametrize("scheme", ["W4A8", "W3A16-g32-asym"])
@pytest.mark.parametrize("method", [signround, gptq], ids=["signround", "gptq"])
def test_codes_that_settle_block_by_block_are_those_of_the_whole(
    small: Path, method: Callable[..., Theta], scheme: str
) -> None:
    opened = open_small(small)
    policy = opened.policy(scheme)
    prompts = opened.encode(policy, PROMPTS)
    options = {"responses": short_responses(prompts), **({"steps": 6} if method is signround else {})}
    expected, actual = (
        policy.settle(method(policy, prompts, **options)),
        method(policy, prompts, settled=True, **options),
    )
    assert not actual.offset
    assert expected.tensors().keys() == actual.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert torch.equal(tensor, actual.tensors()[name]), name
