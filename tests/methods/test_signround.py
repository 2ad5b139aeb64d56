"""SignRound against its formula written out, and what it promises about errors and codes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import oracles
import pytest
import torch
from conftest import MULTIMODAL, Tiny
from method_bed import PROMPTS, block_outputs, check_manners, exact_policy, open_small, sequences_of, short_responses
from torch.nn import functional as F

from onptq.methods.gptq import gptq
from onptq.methods.layerwise import Stream, replaced
from onptq.methods.signround import looks, signround
from onptq.models.structure import LINEARS
from onptq.quantizer.numerics import code_range
from onptq.quantizer.theta import OFFSET_RANGE, RATIO_RANGE, Free, Theta

RATE = 1.0  # of the only step of one


@pytest.fixture(scope="module")
def bed(small: Path):
    opened = open_small(small)
    policy = exact_policy(opened, "W3A16")
    prompts = opened.encode(policy, PROMPTS)
    return policy, prompts, short_responses(prompts)


def naive_gradients(policy, sequences) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of the first block's squared output error: per weight through the step, and per row through its codes, by hand."""
    block = policy.structure.blocks[0]
    stream = Stream(policy, sorted(sequences, key=lambda one: one.length))
    with torch.no_grad(), policy.speaking("D"):
        target = stream.run(block)
    low, high = code_range(3)
    pieces = {}
    for name in LINEARS:
        weight, bias = block.child(name).weight.detach(), block.child(name).bias
        step = weight.abs().amax(1, keepdim=True) / oracles.half_range(3)
        scaled = weight / step
        codes = scaled.clamp(low, high).round()
        pieces[name] = (codes * step).requires_grad_(), bias, step, scaled, codes
    answers = {name: lambda x, wq=wq, bias=bias: F.linear(x, wq, bias) for name, (wq, bias, *_) in pieces.items()}
    with replaced(block, answers), torch.enable_grad():
        error = (stream.run(block) - target)[stream.real].square().sum()
    gradients = torch.autograd.grad(error, [piece[0] for piece in pieces.values()])
    found = {}
    for name, gradient in zip(LINEARS, gradients, strict=True):
        _, _, step, scaled, codes = pieces[name]
        inside = (scaled >= low) & (scaled <= high)
        offset = torch.where(inside, gradient, 0) * step
        ratio = (gradient * torch.where(inside, codes - scaled, codes)).sum(1, keepdim=True) * step
        found[block.path(name)] = offset, ratio
    return found


def test_a_step_follows_the_sign_of_the_gradient(bed, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, prompts, responses = bed
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


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(0, []), (1, [1]), (7, [5, 6, 7]), (100, [80, 90, 100]), (205, [165, 185, 205])],
)
def test_blocks_look_at_their_error_at_the_end_and_shortly_before(steps: int, expected: list[int]) -> None:
    assert sorted(looks(steps)) == expected


def keep_the_last(self) -> None:
    self.best = Theta(linears={path: self.theta.linears[path] for path in self.paths}).clone()


def test_rates_fall_linearly_to_nothing(bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two steps the first has rate 1/2 and the second 1/4: offsets end at 1/2 or, where the signs differ, at 1/4."""
    policy, prompts, responses = bed
    module = importlib.import_module("onptq.methods.signround")
    monkeypatch.setattr(module._Learner, "_consider", keep_the_last)
    theta = signround(policy, prompts, responses=responses, steps=2)
    travelled = torch.cat([offset.abs().flatten() for offset in theta.offset.values()])
    assert set(travelled.unique().tolist()) <= {0.0, 0.25, 0.5}, "none where the code saturates"
    assert min(float((travelled == value).double().mean()) for value in (0.25, 0.5)) > 0.02


def test_a_block_keeps_the_best_it_had_not_the_last(bed) -> None:
    """One step of rate 1 puts every weight on the tie between two codes, which is worse than where it was."""
    policy, prompts, responses = bed
    start = Theta.rtn(policy.structure.blocks, policy.scheme)
    theta = signround(policy, prompts, responses=responses, steps=1)
    sequences = sequences_of(policy, prompts)
    dense, errors = block_outputs(policy, "D", sequences)[0], []
    for one in (theta, start):
        policy.freeze(one)
        outputs = block_outputs(policy, "Q", sequences)[0]
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(outputs, dense, strict=True)))
    assert errors[0] <= errors[1]
    rejected = [path for path, linear in theta.linears.items() if isinstance(linear, Free)]
    assert rejected, "no block was worse after its step: the test shows nothing"
    assert all(torch.equal(theta.ratio[path], start.ratio[path]) for path in rejected)


def test_rounding_is_learned_and_no_code_is_further_than_the_next_one(bed) -> None:
    policy, prompts, responses = bed
    plain = Theta.rtn(policy.structure.blocks, policy.scheme)
    theta = signround(policy, prompts, responses=responses, steps=60)
    sequences = sequences_of(policy, prompts)
    dense = block_outputs(policy, "D", sequences)[-1]
    errors = []
    for one in (theta, plain):
        policy.freeze(one)
        found = block_outputs(policy, "Q", sequences)[-1]
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(found, dense, strict=True)))
    assert errors[0] < 0.6 * errors[1]
    assert all(float(offset.abs().max()) <= OFFSET_RANGE[1] for offset in theta.offset.values())
    assert any(bool((offset.abs() > 0.1).any()) for offset in theta.offset.values())


@pytest.mark.parametrize("family", MULTIMODAL)
def test_it_tells_of_every_block_and_leaves_the_policy_as_it_was(tiny: Callable[[str], Tiny], family: str) -> None:
    def method(policy, prompts, advance):
        return signround(policy, prompts, advance, responses=short_responses(prompts), steps=2)

    check_manners(tiny(family), "W4A8", method)


def test_without_steps_it_is_its_start(bed) -> None:
    policy, prompts, responses = bed
    theta = signround(policy, prompts, responses=responses, steps=0)
    plain = Theta.rtn(policy.structure.blocks, policy.scheme)
    policy.freeze(theta)
    codes = {path: piece.codes for path, piece in policy.folded() if path in plain.ratio}
    policy.freeze(plain)
    assert all(torch.equal(piece.codes, codes[path]) for path, piece in policy.folded() if path in plain.ratio)


@pytest.mark.parametrize("scheme", ["W4A8", "W3A16-g32-asym"])
@pytest.mark.parametrize("method", [signround, gptq], ids=["signround", "gptq"])
def test_codes_that_settle_block_by_block_are_those_of_the_whole(small: Path, method, scheme: str) -> None:
    opened = open_small(small)
    policy = opened.policy(scheme)
    prompts = opened.encode(policy, PROMPTS)
    options = {"responses": short_responses(prompts), **({"steps": 6} if method is signround else {})}
    expected, found = (
        policy.settle(method(policy, prompts, **options)),
        method(policy, prompts, settled=True, **options),
    )
    assert not found.offset
    assert expected.tensors().keys() == found.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert torch.equal(tensor, found.tensors()[name]), name
