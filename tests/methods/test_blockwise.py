"""Blockwise learning against the same recipe written out in float64: plain autograd, plain AdamW, a checkpoint nobody wrapped."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from conftest import Tiny
from method_models import (
    PROMPTS,
    block_outputs,
    check_contract,
    exact_policy,
    inputs_of,
    open_small,
    sequences_of,
    short_responses,
)
from naive import in_double, without_ties
from torch import Tensor, nn
from torch.func import functional_call

from onptq.methods.blockwise import blockwise
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.structure import LINEARS, PAIRS, Block, find_structure
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, pair_key
from onptq.schemes import Scheme

# The authors' recipe: 10 epochs of 128 prompts, and 6 steps here.
AUTHORS_STEPS, STEPS = 1280, 6
LR_CLIP, LR_SCALE = 1e-2, 5e-3
CLIP_LOGIT, SCALE_FLOOR = 4.0, 1e-2
SMOOTHED = ("norm_qkv", "norm_gate_up", "v_o")


def test_a_block_takes_the_authors_steps_by_default() -> None:
    assert inspect.signature(blockwise).parameters["steps"].default == AUTHORS_STEPS


Cases = Callable[[str], tuple[Tiny, Policy, list[EncodedPrompt], Theta]]


@pytest.fixture(scope="module")
def cases(small: Path) -> Iterator[Cases]:
    """A float64 policy of the given scheme, its sequences and its theta after a few steps."""
    made: dict[str, tuple[Tiny, Policy, list[EncodedPrompt], Theta]] = {}

    def get(scheme: str) -> tuple[Tiny, Policy, list[EncodedPrompt], Theta]:
        if scheme not in made:
            checkpoint = open_small(small)
            policy = exact_policy(checkpoint, scheme)
            prompts = checkpoint.encode(policy, PROMPTS)
            with in_double():
                theta = blockwise(policy, prompts, responses=short_responses(prompts), steps=STEPS)
            made[scheme] = checkpoint, policy, sequences_of(policy, prompts), theta
        return made[scheme]

    with without_ties():
        yield get


def straight_through(v: Tensor, bits: int) -> Tensor:
    v = v.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return v + (v.round() - v).detach()


class PlainBlock:
    """One block of the plain checkpoint under scales per pair and clip logits per linear, float64."""

    def __init__(self, checkpoint: Tiny, scheme: Scheme, index: int, sequences: list[EncodedPrompt]) -> None:
        structure = find_structure(checkpoint.model(torch.float64))
        self.block, self.scheme = structure.blocks[index], scheme
        self.block.module.requires_grad_(False)
        self.rotary = [
            structure.decoder.get_submodule("rotary_emb")(s.embeds[None], PromptBatch.of([s]).positions)
            for s in sequences
        ]
        if scheme.quantizes_activations:
            for name in LINEARS:
                self.block.child(name).register_forward_pre_hook(self.quantize_input)

    def quantize_input(self, module: object, args: tuple[Tensor]) -> tuple[Tensor]:
        bits, (x,) = self.scheme.activation_bits, args
        scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)  # as `without_ties` has it
        return (straight_through(x / scale, bits) * scale,)

    def __call__(self, index: int, hidden: Tensor, scales: dict[str, Tensor], clips: dict[str, Tensor]) -> Tensor:
        block, tensors = self.block, {}
        for name in LINEARS:
            linear = block.child(name)
            assert isinstance(linear, nn.Linear)
            weight: Tensor = linear.weight
            bias: Tensor | None = linear.bias
            for pair, s in scales.items():
                producer, consumers = PAIRS[pair]
                if name in consumers:
                    if pair == "v_o":
                        s = s.view(block.kv_heads, 1, -1).repeat(1, block.heads // block.kv_heads, 1).flatten()
                    weight = weight * s
                elif name == producer:
                    weight, bias = weight / s[:, None], None if bias is None else bias / s
            scale = (
                clips[name].sigmoid() * weight.abs().amax(1, keepdim=True) / oracles.half_range(self.scheme.weight_bits)
            )
            inner = ".".join(LINEARS[name])
            tensors[f"{inner}.weight"] = straight_through(weight / scale, self.scheme.weight_bits) * scale
            if bias is not None:
                tensors[f"{inner}.bias"] = bias
        for pair in ("norm_qkv", "norm_gate_up"):
            tensors[f"{PAIRS[pair][0]}.weight"] = block.child(PAIRS[pair][0]).get_parameter("weight") / scales[pair]
        causal = torch.ones(hidden.shape[0], hidden.shape[0], dtype=torch.bool).tril()[None, None]
        extra = {"attention_mask": causal, "position_embeddings": self.rotary[index]}
        return functional_call(block.module, tensors, (hidden[None],), extra)[0]


def plain_init(policy: Policy, sequences: list[EncodedPrompt], block: Block) -> dict[str, Tensor]:
    """sqrt(max|x| / max|W|) with a geometric mean of one."""
    scales = {}
    for pair in SMOOTHED:
        consumers = PAIRS[pair][1]
        x = np.abs(inputs_of(policy, "D", sequences, block, consumers[0])).max(0)
        w = np.max(
            [block.child(name).get_parameter("weight").abs().amax(0).double().numpy() for name in consumers], axis=0
        )
        if pair == "v_o":
            x, w = (part.reshape(block.kv_heads, -1, block.head_dim).max(1).ravel() for part in (x, w))
        s = np.sqrt(x / w)
        scales[pair] = torch.from_numpy(s / np.exp(np.log(s).mean()))
    return scales


def plain_learning(
    forward: PlainBlock, inputs: list[Tensor], targets: list[Tensor], init: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The best scales and clip logits of the two inits and of all steps."""

    def loss(index: int, scales: dict[str, Tensor], clips: dict[str, Tensor]) -> Tensor:
        return (forward(index, inputs[index], scales, clips) - targets[index]).square().mean()

    def total(scales: dict[str, Tensor], clips: dict[str, Tensor]) -> float:
        return sum(float(loss(index, scales, clips)) for index in range(len(inputs)))

    rows = {name: len(forward.block.child(name).get_parameter("weight")) for name in LINEARS}
    full = {name: torch.full((count, 1), math.inf, dtype=torch.float64) for name, count in rows.items()}
    clips = {name: torch.full((count, 1), CLIP_LOGIT, dtype=torch.float64) for name, count in rows.items()}
    unsmoothed = {pair: torch.ones_like(s) for pair, s in init.items()}
    candidates = [(total(scales, full), scales, full) for scales in (unsmoothed, init)]
    unit, scales, _ = min(candidates, key=lambda candidate: candidate[0])
    parameters = {**{pair: s.clone() for pair, s in scales.items()}, **clips}
    first, second = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
    for step in range(1, STEPS + 1):
        for p in parameters.values():
            p.requires_grad_()
        split = {pair: parameters[pair] for pair in scales}, {name: parameters[name] for name in LINEARS}
        value = loss((step - 1) % len(inputs), *split) / (unit / len(inputs))
        gradients = torch.autograd.grad(value, [*parameters.values()])
        for (name, p), g in zip([*parameters.items()], gradients, strict=True):
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g**2
            rate = LR_SCALE if name in scales else LR_CLIP
            move = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            parameters[name] = p.detach() - rate * move
            if name in scales:
                parameters[name] = parameters[name].clamp(min=SCALE_FLOOR)
        now = {pair: parameters[pair] for pair in scales}, {name: parameters[name] for name in LINEARS}
        candidates.append((total(*now), *now))
    _, scales, clips = min(candidates, key=lambda candidate: candidate[0])
    return scales, clips


@pytest.mark.parametrize("scheme", ["W3A16", "W4A6"])
def test_a_few_steps_are_those_of_the_recipe_written_out(cases: Cases, scheme: str) -> None:
    checkpoint, policy, sequences, theta = cases(scheme)
    dense = block_outputs(policy, "D", sequences)
    policy.freeze(theta)
    quantized = block_outputs(policy, "Q", sequences)
    off, count = 0, 0
    for block in policy.structure.blocks:
        inputs = [s.embeds for s in sequences] if block.index == 0 else quantized[block.index - 1]
        forward = PlainBlock(checkpoint, policy.scheme, block.index, sequences)
        init = plain_init(policy, sequences, block)
        scales, clips = plain_learning(forward, inputs, dense[block.index], init)
        for pair, s in scales.items():
            distance = (theta.smoothing[pair_key(block, pair)].exp().double() - s).abs()
            off, count = off + int((distance > 0.1 * LR_SCALE).sum()), count + distance.numel()
        for name, clip in clips.items():
            distance = (theta.ratio[block.path(name)].exp().double() - clip.sigmoid()).abs()
            off, count = off + int((distance > 0.1 * LR_CLIP * (1 - 0.982)).sum()), count + distance.numel()
        assert not theta.smoothing[pair_key(block, "up_down")].any()
    assert off / count < 0.01  # gradients near zero have no sign to agree on


def errors_by_block(policy: Policy, sequences: list[EncodedPrompt], theta: Theta, rival: Theta) -> list[list[float]]:
    """Of every block behind theta's own earlier blocks: mean squared error under theta, and with the rival in its place."""
    dense, rows = block_outputs(policy, "D", sequences), []
    for block in policy.structure.blocks:
        mixed = theta.clone()
        for pair in PAIRS:
            mixed.smoothing[pair_key(block, pair)] = rival.smoothing[pair_key(block, pair)]
        for name in LINEARS:
            mixed.linears[block.path(name)] = rival.linears[block.path(name)]
        row = []
        for each in (theta, mixed):
            policy.freeze(each)
            actual = block_outputs(policy, "Q", sequences)[block.index]
            row.append(sum(float((a - b).square().mean()) for a, b in zip(actual, dense[block.index], strict=True)))
        rows.append(row)
    return rows


@pytest.mark.parametrize("scheme", ["W3A16", "W4A6"])
def test_no_block_errs_more_than_under_either_init(cases: Cases, scheme: str) -> None:
    _, policy, sequences, theta = cases(scheme)
    plain = Theta.rtn(policy.structure.blocks, policy.scheme)
    smoothed = plain.clone()
    for block in policy.structure.blocks:
        for pair, s in plain_init(policy, sequences, block).items():
            smoothed.smoothing[pair_key(block, pair)] = s.log().float()
    for rival in (plain, smoothed):
        for ours, theirs in errors_by_block(policy, sequences, theta, rival):
            assert ours <= theirs * (1 + 1e-3)


def test_steps_that_only_do_harm_leave_the_better_init(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("onptq.methods.blockwise")
    checkpoint = open_small(small)
    policy = checkpoint.policy("W4A8")
    prompts = checkpoint.encode(policy, 2)

    def learned(steps: int) -> Theta:
        return blockwise(policy, prompts, responses=short_responses(prompts), steps=steps)

    still = learned(0)
    assert not any(ratio.any() for ratio in still.ratio.values())
    monkeypatch.setattr(module, "LR_CLIP", 50.0)
    monkeypatch.setattr(module, "LR_SCALE", 50.0)
    wild = learned(4)
    assert all(torch.equal(tensor, still.tensors()[name]) for name, tensor in wild.tensors().items())


@pytest.mark.slow
def test_learning_lowers_the_error_of_every_block(small: Path) -> None:
    checkpoint = open_small(small)
    policy = checkpoint.policy("W3A8")
    prompts = checkpoint.encode(policy, PROMPTS)
    theta = blockwise(policy, prompts, responses=short_responses(prompts), steps=60)
    plain = Theta.rtn(policy.structure.blocks, policy.scheme)
    ratios = [a / b for a, b in errors_by_block(policy, sequences_of(policy, prompts), theta, plain)]
    assert ratios[0] < 0.9
    assert max(ratios) < 0.97, "later blocks inherit errors that they cannot undo"
    moved = torch.cat([ratio.flatten() for ratio in theta.ratio.values()]).exp()
    assert 0.5 < moved.min() < moved.max() < 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16-g32-asym", "W16A6"])
def test_groups_zero_points_and_unquantized_weights_are_learned_too(small: Path, scheme: str) -> None:
    checkpoint = open_small(small)
    policy = checkpoint.policy(scheme)
    prompts = checkpoint.encode(policy, 2)
    theta = blockwise(policy, prompts, responses=short_responses(prompts), steps=20)
    plain = Theta.rtn(policy.structure.blocks, policy.scheme)
    for ours, theirs in errors_by_block(policy, sequences_of(policy, prompts), theta, plain):
        assert ours < theirs


@pytest.mark.parametrize("family", ["qwen2.5-omni"])
def test_other_families_are_learned_and_left_as_it_was(tiny: Callable[[str], Tiny], family: str) -> None:
    def method(policy: Policy, prompts: list[EncodedPrompt], advance: Callable[[int], None]) -> Theta:
        return blockwise(policy, prompts, advance, responses=short_responses(prompts), steps=3)

    _, theta = check_contract(tiny(family), "W4A8", method)
    assert not theta.offset
    assert any(ratio.any() for ratio in theta.ratio.values())
