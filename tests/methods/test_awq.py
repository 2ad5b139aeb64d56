"""AWQ against its authors' formulas, computed on a plain checkpoint with a plain quantizer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import naive
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
    same_theta,
    sequences_of,
    short_responses,
)
from torch import Tensor

from onptq.methods.awq import CLIPPED, CLIPS, EXPONENTS, awq
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.structure import LINEARS, PAIRS, Block, find_structure
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, log_scales_in, log_scales_out, pair_key
from onptq.schemes import Scheme

Cases = Callable[[str], tuple[Tiny, Policy, list[EncodedPrompt], Theta]]
SCHEMES = ("W3A16", "W3A16-g32-asym")


@pytest.fixture(scope="module")
def cases(small: Path) -> Cases:
    """A float64 policy of the given scheme, its sequences and its theta."""
    made: dict[str, tuple[Tiny, Policy, list[EncodedPrompt], Theta]] = {}

    def get(scheme: str) -> tuple[Tiny, Policy, list[EncodedPrompt], Theta]:
        if scheme not in made:
            checkpoint = open_small(small)
            policy = exact_policy(checkpoint, scheme)
            prompts = checkpoint.encode(policy, PROMPTS)
            theta = awq(policy, prompts, responses=short_responses(prompts))
            made[scheme] = checkpoint, policy, sequences_of(policy, prompts), theta
        return made[scheme]

    return get


def plain_quantize(weight: np.ndarray, scheme: Scheme, clip: np.ndarray | float = 1.0) -> np.ndarray:
    """Symmetric absmax or asymmetric min-max rounding of [O, I], whose ranges are shrunk by clip [O, G]."""
    bits, size = scheme.weight_bits, scheme.group_size or weight.shape[1]
    grouped = weight.reshape(len(weight), -1, size)
    share = np.broadcast_to(clip, grouped.shape[:2])[..., None]
    if scheme.symmetric:
        scale, zero = oracles.row_scale(grouped, share, bits), 0.0
        low = -(2 ** (bits - 1))
    else:
        floor, ceiling = np.minimum(grouped.min(-1, keepdims=True), 0), np.maximum(grouped.max(-1, keepdims=True), 0)
        scale, low = share * (ceiling - floor) / (2**bits - 1), 0
        zero = np.round(-share * floor / scale)
    codes = np.clip(np.round(grouped / scale + zero), low, low + 2**bits - 1)
    return ((codes - zero) * scale).reshape(weight.shape)


def plain_scales(x: np.ndarray, exponent: float, block: Block, pair: str) -> np.ndarray:
    """s per input channel as the authors have it; the query heads of one KV head share theirs."""
    mean = np.abs(x).mean(0)
    if pair == "v_o":
        mean = np.tile(
            mean.reshape(block.kv_heads, -1, 1, block.head_dim).mean(1, keepdims=True),
            (1, block.heads // block.kv_heads, 1, 1),
        ).ravel()
    scales = np.maximum(mean**exponent, 1e-4)
    return scales / np.sqrt(scales.max() * scales.min())


@torch.no_grad()
def plain_losses(
    checkpoint: Tiny, policy: Policy, sequences: list[EncodedPrompt], index: int, pair: str
) -> list[float]:
    """Mean squared error of the judging module for every exponent, on a checkpoint that nobody wrapped."""
    scheme, consumers = policy.scheme, PAIRS[pair][1]
    structure = find_structure(checkpoint.model(torch.float64))
    block = structure.blocks[index]
    judge = block.owner(consumers[0]) if len(consumers) > 1 else block.child(consumers[0])
    rotary = [
        structure.decoder.get_submodule("rotary_emb")(s.embeds[None], PromptBatch.of([s]).positions) for s in sequences
    ]
    inputs = np.split(
        inputs_of(policy, "D", sequences, policy.structure.blocks[index], consumers[0]),
        np.cumsum([s.length for s in sequences])[:-1],
    )

    def outputs(xs: list[np.ndarray]) -> list[Tensor]:
        results = []
        for x, table, sequence in zip(xs, rotary, sequences, strict=True):
            hidden = torch.from_numpy(x)[None]
            if pair == "norm_qkv":
                causal = torch.ones(sequence.length, sequence.length, dtype=torch.bool).tril()[None, None]
                results.append(judge(hidden, attention_mask=causal, position_embeddings=table)[0])
            else:
                results.append(judge(hidden))
        return results

    dense, losses = outputs(inputs), []
    weights = {name: block.child(name).get_parameter("weight").clone() for name in consumers}
    for exponent in EXPONENTS:
        s = plain_scales(np.concatenate(inputs), exponent, block, pair)
        for name in consumers:
            rounded = plain_quantize(weights[name].numpy() * s, scheme) / s
            block.child(name).get_parameter("weight").copy_(torch.from_numpy(rounded))
        xs = inputs
        if scheme.quantizes_activations:
            token_scales = [oracles.token_scale(x / s, scheme.activation_bits) for x in inputs]
            xs = [
                s * oracles.rounding(x / s, scale, scheme.activation_bits)(x / s, scale)
                for x, scale in zip(inputs, token_scales, strict=True)
            ]
        actual = outputs(xs)
        losses.append(sum(float((a - b).square().sum()) for a, b in zip(actual, dense, strict=True)))
    return losses


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("scheme", [*SCHEMES, "W4A6-g32"])
def test_every_pair_takes_the_exponent_of_least_output_error(cases: Cases, scheme: str, pair: str) -> None:
    checkpoint, policy, sequences, theta = cases(scheme)
    tolerance = (
        1e-2 if policy.scheme.quantizes_activations else 1e-5
    )  # a token's largest value may lie between two codes
    for block in policy.structure.blocks:
        first = PAIRS[pair][1][0]
        x = inputs_of(policy, "D", sequences, block, first)
        grid = [np.log(plain_scales(x, exponent, block, pair)) for exponent in EXPONENTS]
        distance = [np.abs(log_scales_in(theta, block, first).numpy() - u).max() for u in grid]  # type: ignore[union-attr]
        chosen = int(np.argmin(distance))
        assert distance[chosen] < 1e-5
        losses = plain_losses(checkpoint, policy, sequences, block.index, pair)
        assert losses[chosen] <= min(losses) * (1 + tolerance)
        assert losses[chosen] <= losses[0] * (1 + tolerance), "the first is plain rounding"


def test_the_grids_are_the_authors() -> None:
    assert np.allclose(EXPONENTS, np.arange(20) / 20)
    assert np.allclose(CLIPS, [1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55])
    assert set(LINEARS) - set(CLIPPED) == {"q_proj", "k_proj"}
    module = importlib.import_module("onptq.methods.awq")
    assert (module.FLOOR, module.CLIP_TOKENS) == (1e-4, 512)


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_group_takes_the_clip_of_least_partial_error(cases: Cases, scheme: str, name: str) -> None:
    _, policy, sequences, theta = cases(scheme)
    block = policy.structure.blocks[1]
    actual = theta.ratio[block.path(name)].exp().double().numpy()
    if name not in CLIPPED:
        assert (actual == 1).all()
        return
    u_in = log_scales_in(theta, block, name).double().numpy()  # type: ignore[union-attr]
    u_out = log_scales_out(theta, block, name)
    weight = oracles.smoothed_weight(
        block.child(name).get_parameter("weight").double().numpy(),
        u_in,
        None if u_out is None else u_out.double().numpy(),
    )
    x = inputs_of(policy, "D", sequences, block, name) / np.exp(u_in)
    assert len(x) < 1024, "all tokens are used"
    groups = actual.shape[1]
    errors = []
    for clip in CLIPS:
        difference = (plain_quantize(weight, policy.scheme, clip) - weight).reshape(len(weight), groups, -1)
        partial = np.einsum("ogi,tgi->ogt", difference, x.reshape(len(x), groups, -1))
        errors.append((partial**2).mean(-1))
    check_clips(actual, np.array(errors))


def test_clips_are_judged_on_rounded_inputs(small: Path) -> None:
    """Of a candidate on the inputs that the quantized linear multiplies; the target is the dense linear's output."""
    checkpoint = open_small(small)
    policy = exact_policy(checkpoint, "W4A3")
    prompts = checkpoint.encode(policy, PROMPTS)
    errors: dict[bool, list[np.ndarray]] = {True: [], False: []}
    with naive.without_ties():
        theta = awq(policy, prompts, responses=short_responses(prompts))
    block, name = policy.structure.blocks[1], "down_proj"
    u_in = log_scales_in(theta, block, name).double().numpy()  # type: ignore[union-attr]
    weight = oracles.smoothed_weight(block.child(name).get_parameter("weight").double().numpy(), u_in, None)
    x = inputs_of(policy, "D", sequences_of(policy, prompts), block, name) / np.exp(u_in)
    token = oracles.token_scale_off_ties(x, 3)
    for rounded, seen in ((True, oracles.rounding(x, token, 3)(x, token)), (False, x)):
        for clip in CLIPS:
            errors[rounded].append(((seen @ plain_quantize(weight, policy.scheme, clip).T - x @ weight.T) ** 2).sum(0))
    actual = theta.ratio[block.path(name)].exp()[:, 0].double().numpy()
    check_clips(actual, np.array(errors[True]))
    other = np.array(CLIPS)[np.array(errors[False]).argmin(0)]
    assert (np.abs(actual - other) > 1e-6).mean() > 0.2, "unrounded inputs choose other clips"


def test_rows_are_clipped_a_few_at_a_time(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial outputs are [rows, groups, tokens], too large for all rows of a real model at once."""
    module, rows = importlib.import_module("onptq.methods.awq"), list[int]()
    quantize = module.fake_quantize_weight

    def spy(weight: Tensor, *arguments: Any) -> Tensor:
        rows.append(len(weight))
        return quantize(weight, *arguments)

    checkpoint = open_small(small)
    policy = exact_policy(checkpoint, "W3A16-g32")
    prompts = checkpoint.encode(policy, 1)
    whole = awq(policy, prompts, responses=short_responses(prompts))
    before = module.ROWS
    monkeypatch.setattr(module, "ROWS", 24)
    monkeypatch.setattr(module, "fake_quantize_weight", spy)
    parts = awq(policy, prompts, responses=short_responses(prompts))
    assert max(rows) == 24
    assert same_theta(parts, whole)
    assert before <= 256, "of 7B's down_proj in groups of 128 these take 78 MB"


def check_clips(actual: np.ndarray, errors: np.ndarray) -> None:
    """Every entry is on the grid and has the least of its errors [clips, ...]."""
    distance = np.abs(actual - np.array(CLIPS).reshape(-1, *([1] * actual.ndim)))
    assert distance.min(0).max() < 1e-6
    chosen = np.take_along_axis(errors, distance.argmin(0)[None], 0)[0]
    least = chosen <= errors.min(0) * (1 + 1e-4)
    assert least.mean() > 0.99, "but for weights halfway between two codes, which may fall either way"
    assert len(np.unique(distance.argmin(0))) > 3


def test_many_tokens_are_clipped_by_a_stride_of_them(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("onptq.methods.awq")
    monkeypatch.setattr(module, "CLIP_TOKENS", 10)
    monkeypatch.setattr(module, "EXPONENTS", (0.0,))
    checkpoint = open_small(small)
    policy = exact_policy(checkpoint, "W3A16")
    prompts = checkpoint.encode(policy, PROMPTS)
    theta = awq(policy, prompts, responses=short_responses(prompts))
    block = policy.structure.blocks[0]
    x = inputs_of(policy, "D", sequences_of(policy, prompts), block, "down_proj")
    x, weight = x[:: len(x) // 10], block.child("down_proj").get_parameter("weight").double().numpy()
    errors = [(((plain_quantize(weight, policy.scheme, clip) - weight) @ x.T) ** 2).sum(1) for clip in CLIPS]
    check_clips(theta.ratio[block.path("down_proj")].exp()[:, 0].double().numpy(), np.array(errors))


@pytest.mark.parametrize("scheme", ["W4A8", "W3A16-g32-asym"])
def test_exponent_zero_without_clips_is_plain_rounding(
    small: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("onptq.methods.awq")
    monkeypatch.setattr(module, "EXPONENTS", (0.0,))
    monkeypatch.setattr(module, "CLIPS", (1.0,))
    checkpoint = open_small(small)
    policy = checkpoint.policy(scheme)
    prompts = checkpoint.encode(policy, 2)
    theta = awq(policy, prompts, responses=short_responses(prompts))
    plain = Theta.rtn(policy.structure.blocks, policy.scheme).tensors()
    assert theta.tensors().keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in theta.tensors().items())


@pytest.mark.parametrize("scheme", ["W3A16", "W3A16-g32-asym", "W4A6"])
def test_the_first_block_errs_less_than_under_plain_rounding(cases: Cases, scheme: str) -> None:
    _, policy, sequences, theta = cases(scheme)
    dense, errors = block_outputs(policy, "D", sequences)[0], []
    for each in (theta, Theta.rtn(policy.structure.blocks, policy.scheme)):
        policy.freeze(each)
        actual = block_outputs(policy, "Q", sequences)[0]
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(actual, dense, strict=True)))
    assert errors[0] < 0.9 * errors[1]


def test_unquantized_weights_are_not_clipped(small: Path) -> None:
    checkpoint = open_small(small)
    policy = checkpoint.policy("W16A6")
    prompts = checkpoint.encode(policy, 1)
    theta = awq(policy, prompts, responses=short_responses(prompts))
    assert not any(ratio.any() for ratio in theta.ratio.values())
    assert any(u.any() for u in theta.smoothing.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5-omni"])
def test_other_families_are_searched_and_left_as_it_was(tiny: Callable[[str], Tiny], family: str) -> None:
    def method(policy: Policy, prompts: list[EncodedPrompt], advance: Callable[[int], None]) -> Theta:
        return awq(policy, prompts, advance, responses=short_responses(prompts))

    policy, theta = check_contract(tiny(family), "W4A8", method)
    assert not theta.offset
    for pair in PAIRS:
        assert any(theta.smoothing[pair_key(block, pair)].any() for block in policy.structure.blocks), pair
