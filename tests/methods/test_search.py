"""Search: its choices are the best of their grids by output error, and never worse than plain rounding."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from conftest import Tiny
from method_models import exact_policy

from onptq.checkpoint.source import find_source
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.methods.layerwise import answer_prompts
from onptq.methods.linears import quantized_input, rounded_weight
from onptq.methods.search import sample_inputs, search, search_on
from onptq.methods.smoothquant import migrated, weight_maxima
from onptq.models.encoding import EncodedPrompt
from onptq.models.processing import PromptProcessor
from onptq.models.structure import PAIRS, Block, find_structure
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Free, Theta, log_scales_in, log_scales_out, pair_key
from onptq.zoo.random import write_random

PROMPTS = 4
STRENGTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RATIOS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
Case = tuple[Tiny, Policy, list[EncodedPrompt], Theta]


@pytest.fixture(scope="module")
def cases(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Case]:
    """A policy of the given scheme with and without outlier channels, its prompts and its searched theta."""
    folder = tmp_path_factory.mktemp("outliers")
    write_random("qwen2.5-vl", folder, prompts=PROMPTS, outliers=20)
    made: dict[tuple[str, bool], Case] = {}

    def get(scheme: str, outliers: bool) -> Case:
        if (scheme, outliers) not in made:
            small = outlying(folder) if outliers else tiny("qwen2.5-vl")
            policy = small.policy(scheme)
            prompts = small.encode(policy, PROMPTS)
            made[scheme, outliers] = small, policy, prompts, search_on(policy, prompts)
        return made[scheme, outliers]

    return get


def outlying(folder: Path) -> Tiny:
    source = find_source(folder)
    return Tiny(folder, source, PromptProcessor.from_folder(folder, source.family, source.config))


def dense_inputs(checkpoint: Tiny) -> dict[tuple[int, str], np.ndarray]:
    """What enters each pair's consumers in the plain checkpoint, every token of every prompt: (block, pair) -> [n, I]."""
    model = checkpoint.model(torch.float64)
    blocks = find_structure(model).blocks
    inputs: dict[tuple[int, str], list[torch.Tensor]] = {(block.index, pair): [] for block in blocks for pair in PAIRS}

    def listener(key: tuple[int, str]) -> Callable[..., None]:
        return lambda module, args: inputs[key].append(args[0][0])

    for block in blocks:
        for pair, (_, consumers) in PAIRS.items():
            block.child(consumers[0]).register_forward_pre_hook(listener((block.index, pair)))
    for ordinal in range(PROMPTS):
        oracles.plain_forward(model, [block.module for block in blocks], checkpoint.inputs(ordinal).tensors, [])
    return {key: torch.cat(parts).numpy() for key, parts in inputs.items()}


def output_errors(
    policy: Policy, theta: Theta, block: Block, name: str, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Squared output error and squared output of every row of the deployed linear, on the dense model's inputs."""
    policy.freeze(theta)
    piece = dict(policy.folded())[block.path(name)]
    codes, scale = piece.codes.double().numpy(), piece.scale.double().numpy()  # type: ignore[union-attr]
    dense = x @ block.child(name).weight.double().numpy().T  # type: ignore[operator]
    x = x / np.exp(log_scales_in(theta, block, name).double().numpy())  # type: ignore[union-attr]
    if policy.scheme.quantizes_activations:
        token = oracles.token_scale(x, policy.scheme.activation_bits)
        x = oracles.rounding(x, token, policy.scheme.activation_bits)(x, token)
    out = log_scales_out(theta, block, name)
    quant = x @ (codes * scale).T * (1.0 if out is None else np.exp(out.double().numpy()))
    return ((quant - dense) ** 2).sum(0), (dense**2).sum(0)


def relative_error(policy: Policy, theta: Theta, block: Block, name: str, x: np.ndarray) -> float:
    error, energy = output_errors(policy, theta, block, name, x)
    return float(error.sum() / energy.sum())


def test_strengths_go_from_a_tenth_to_nine_and_ratios_down_to_one_half() -> None:
    module = importlib.import_module("onptq.methods.search")
    assert list(module.STRENGTHS) == pytest.approx(list(STRENGTHS))
    assert list(module.RATIOS) == pytest.approx(list(RATIOS))


def test_the_sample_is_what_the_plain_model_feeds_its_linears(cases: Callable[[str, bool], Case]) -> None:
    checkpoint, policy, prompts, _ = cases("W4A8", True)
    expected = dense_inputs(checkpoint)
    sampled = sample_inputs(policy, prompts)
    for (block, pair), x in expected.items():
        assert sampled[block][pair].shape == x.shape, "few short prompts are sampled whole"
        np.testing.assert_allclose(sampled[block][pair], x, rtol=0, atol=1e-4 * np.abs(x).max())


def test_a_large_manifest_is_sampled_evenly(
    cases: Callable[[str, bool], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("onptq.methods.search"), "SAMPLE_TOKENS", 40)
    checkpoint, policy, prompts, _ = cases("W4A8", True)
    expected, sampled = dense_inputs(checkpoint), sample_inputs(policy, prompts)
    starts = np.cumsum([0, *(prompt.length for prompt in prompts)])[:-1]
    rows = np.concatenate(
        [s + np.linspace(0, p.length - 1, 10).astype(int) for s, p in zip(starts, prompts, strict=True)]
    )
    for (block, pair), x in expected.items():
        np.testing.assert_allclose(sampled[block][pair], x[rows], rtol=0, atol=1e-4 * np.abs(x).max())


def test_of_many_sequences_some_are_sampled_and_none_by_its_first_token_alone(
    cases: Callable[[str, bool], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activations of a first token are unlike all others: a grid searched on them alone breaks a model."""
    monkeypatch.setattr(importlib.import_module("onptq.methods.search"), "SAMPLE_TOKENS", 16)
    checkpoint, policy, prompts, _ = cases("W4A8", True)
    expected, sampled = dense_inputs(checkpoint), sample_inputs(policy, prompts)
    starts = np.cumsum([0, *(prompt.length for prompt in prompts)])[:-1]
    rows = np.concatenate([starts[n] + np.linspace(0, prompts[n].length - 1, 8).astype(int) for n in (0, PROMPTS - 1)])
    for (block, pair), x in expected.items():
        np.testing.assert_allclose(sampled[block][pair], x[rows], rtol=0, atol=1e-4 * np.abs(x).max())


@pytest.mark.parametrize("outliers", [False, True], ids=["", "outliers"])
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A8", "W8A8", "W4A16"])
def test_no_linear_errs_more_than_under_plain_rounding(
    cases: Callable[[str, bool], Case], scheme: str, outliers: bool
) -> None:
    checkpoint, policy, _, theta = cases(scheme, outliers)
    plain, inputs = Theta.rtn(policy.structure.blocks, policy.scheme), dense_inputs(checkpoint)
    for block in policy.structure.blocks:
        for pair, (_, consumers) in PAIRS.items():
            for name in consumers:
                x = inputs[block.index, pair]
                actual, rtn = (relative_error(policy, each, block, name, x) for each in (theta, plain))
                assert actual <= rtn * (1 + 1e-3), block.path(name)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_strength_is_the_best_of_its_grid(cases: Callable[[str, bool], Case], pair: str) -> None:
    checkpoint, policy, _, theta = cases("W4A8", True)
    block, x = policy.structure.blocks[0], dense_inputs(checkpoint)[0, pair]
    consumers = PAIRS[pair][1]
    weights = [block.child(name).weight.double().numpy() for name in consumers]  # type: ignore[operator]
    x_max, w_max = np.abs(x).max(0), np.max([np.abs(weight).max(0) for weight in weights], axis=0)
    if pair == "v_o":  # the query heads of a group share their KV channel's scale
        x_max, w_max = (values.reshape(block.kv_heads, -1, block.head_dim).max(1).ravel() for values in (x_max, w_max))
    key = pair_key(block, pair)
    errors, grid = {}, []
    for strength in (None, *STRENGTHS):
        candidate = Theta.rtn(policy.structure.blocks, policy.scheme)
        if strength is not None:
            u = strength * np.log(x_max) - (1 - strength) * np.log(w_max)
            candidate.smoothing[key] = torch.from_numpy(u - u.mean()).float()
        grid.append(candidate.smoothing[key])
        errors[strength] = sum(relative_error(policy, candidate, block, name, x) for name in consumers)
    chosen = Theta.rtn(policy.structure.blocks, policy.scheme)
    chosen.smoothing[key] = theta.smoothing[key]
    error = sum(relative_error(policy, chosen, block, name, x) for name in consumers)
    assert error <= min(errors.values()) * (1 + 1e-3)
    assert error <= errors[None] * (1 + 1e-3)
    assert min(float((theta.smoothing[key] - u).abs().max()) for u in grid) < 1e-3


def smoothing_errors(policy: Policy, block: Block, pair: str, x: np.ndarray) -> dict[float | None, tuple[float, float]]:
    """Relative and absolute squared output error, summed over the consumers, of no smoothing and of every strength."""
    weights = [block.child(name).weight.double().numpy() for name in PAIRS[pair][1]]  # type: ignore[operator]
    x_max, w_max = np.abs(x).max(0), np.max([np.abs(weight).max(0) for weight in weights], axis=0)
    errors, bits = {}, policy.scheme.weight_bits
    for strength in (None, *STRENGTHS):
        u = np.zeros(len(x_max)) if strength is None else strength * np.log(x_max) - (1 - strength) * np.log(w_max)
        s, terms = np.exp(u - u.mean()), []
        for weight in weights:
            scale = oracles.row_scale(weight * s, np.ones(1), bits)
            rounded = oracles.rounding(weight * s, scale, bits)(weight * s, scale) / s
            terms.append((((x @ (rounded - weight).T) ** 2).sum(), ((x @ weight.T) ** 2).sum()))
        errors[strength] = sum(a / b for a, b in terms), sum(a for a, _ in terms)
    return errors


def test_errors_are_relative_to_each_consumers_output_and_no_smoothing_is_tried(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One consumer's weights are 30 times as large, so that absolute errors would be its own alone."""
    checkpoint, random = outlying(small), np.random.default_rng(1)
    policy = exact_policy(checkpoint, "W3A16")
    inputs: dict[int, dict[str, torch.Tensor]] = {}
    for block in policy.structure.blocks:
        inputs[block.index] = {}
        for pair, (_, consumers) in PAIRS.items():
            size = block.child(consumers[0]).get_parameter("weight").shape[1]
            x = random.normal(size=(40, size)) * np.exp(0.5 * random.normal(size=size))
            inputs[block.index][pair] = torch.from_numpy(x)
            if len(consumers) > 1:
                block.child(consumers[1]).weight.data.mul_(30)  # type: ignore[union-attr, operator]
    module = importlib.import_module("onptq.methods.search")
    expected = {block: {pair: x.numpy() for pair, x in pairs.items()} for block, pairs in inputs.items()}
    monkeypatch.setattr(module, "sample_inputs", lambda policy, sequences: inputs)
    theta = search_on(policy, [])
    unsmoothed = apart = 0
    for block in policy.structure.blocks:
        for pair in ("norm_qkv", "norm_gate_up", "up_down"):
            errors = smoothing_errors(policy, block, pair, expected[block.index][pair])
            best, absolute = (min(errors, key=lambda each: errors[each][place]) for place in (0, 1))
            others = [error for strength, (error, _) in errors.items() if strength != best]
            assert min(others) > errors[best][0] * (1 + 2e-4), "the choice is clear"
            x_max, w_max = torch.from_numpy(np.abs(expected[block.index][pair]).max(0)), weight_maxima(block, pair)
            u = torch.zeros(len(x_max)) if best is None else migrated(x_max, w_max, best)
            torch.testing.assert_close(theta.smoothing[pair_key(block, pair)].float(), u.float(), rtol=0, atol=1e-4)
            unsmoothed += best is None
            apart += absolute != best
    assert unsmoothed
    assert apart


def test_the_query_heads_of_a_group_agree_on_their_kv_channels_scale(tiny: Callable[[str], Tiny]) -> None:
    """An outlier in one value channel, which only the second query head of its group reads with a large weight."""
    checkpoint = tiny("qwen3")
    policy = checkpoint.policy("W4A8")
    prompts, block = checkpoint.encode(policy, PROMPTS), policy.structure.blocks[0]
    channel, share = 5, block.heads // block.kv_heads
    columns = [head * block.head_dim + channel for head in range(share)]
    block.child("v_proj").weight[channel] *= 40  # type: ignore[operator, index]
    block.child("o_proj").weight[:, columns[0]] /= 40  # type: ignore[operator, index]
    u = search_on(policy, prompts).smoothing[pair_key(block, "v_o")]
    x = sample_inputs(policy, prompts)[0]["v_o"].double().numpy()
    weight = block.child("o_proj").weight.double().numpy()  # type: ignore[operator]
    x_max, w_max = (np.abs(values).max(0).reshape(block.kv_heads, share, -1).max(1).ravel() for values in (x, weight))
    grid = [a * np.log(x_max) - (1 - a) * np.log(w_max) for a in STRENGTHS]
    assert min(np.abs(u.numpy() - (v - v.mean())).max() for v in grid) < 1e-3
    assert int(u.argmax()) == channel


def test_every_row_takes_the_ratio_of_least_output_error_and_may_keep_its_full_range(
    cases: Callable[[str, bool], Case],
) -> None:
    checkpoint, policy, _, theta = cases("W8A8", False)
    grid = torch.tensor((1.0, *RATIOS)).log()
    for ratio in theta.ratio.values():
        assert (ratio[..., None] - grid).abs().amin(-1).max() < 1e-6
    chosen = torch.cat([ratio.flatten() for ratio in theta.ratio.values()])
    assert 0.05 < (chosen == 0).double().mean() < 1, "some rows keep the full range, some do not"

    block, name = policy.structure.blocks[1], "down_proj"
    x, path = dense_inputs(checkpoint)[1, "up_down"], block.path(name)
    actual = output_errors(policy, theta, block, name, x)[0]
    for value in (1.0, *RATIOS):
        other = theta.clone()
        other.linears[path] = Free(torch.full_like(other.ratio[path], value).log())
        assert (actual <= output_errors(policy, other, block, name, x)[0] * (1 + 1e-2)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "factor"), [("W8A8", 10), ("W4A8", 2), ("W4A16", 2)])
def test_outliers_are_smoothed_away(cases: Callable[[str, bool], Case], scheme: str, factor: float) -> None:
    _, policy, prompts, theta = cases(scheme, True)

    def on_policy_kl(theta: Theta) -> float:
        policy.freeze(theta)
        prefixes = Prefixes(policy, prompts, max_tokens=12)
        return float(compare(prefixes, follow(prefixes)).kl.mean())

    rtn = on_policy_kl(Theta.rtn(policy.structure.blocks, policy.scheme))
    assert on_policy_kl(theta) < rtn / factor
    for block in policy.structure.blocks:  # outlier channels are the ones divided most
        for pair in ("norm_qkv", "norm_gate_up"):
            u = theta.smoothing[pair_key(block, pair)]
            assert u[::32].min() > u.reshape(-1, 32)[:, 1:].max()


def test_progress_is_reported_block_by_block(cases: Callable[[str, bool], Case]) -> None:
    _, policy, prompts, theta = cases("W4A8", True)
    steps: list[int] = []
    again = search_on(policy, prompts, steps.append)
    assert steps == [1] * policy.blocks
    assert all(torch.equal(a, b) for a, b in zip(again.tensors().values(), theta.tensors().values(), strict=True))
    assert not again.offset


def test_hooks_do_not_stay_behind(cases: Callable[[str, bool], Case]) -> None:
    _, policy, _, _ = cases("W4A8", True)
    assert not any(module._forward_pre_hooks for module in policy.model.modules())


@pytest.mark.slow
def test_the_dense_models_own_responses_are_part_of_the_sample(cases: Callable[[str, bool], Case]) -> None:
    _, policy, prompts, alone = cases("W4A8", True)
    actual, sequences = search(policy, prompts), [one.sequence for one in answer_prompts(policy, prompts)]
    assert all(sequence.length > prompt.length for sequence, prompt in zip(sequences, prompts, strict=True))
    expected = search_on(policy, sequences)
    assert all(torch.equal(a, b) for a, b in zip(actual.tensors().values(), expected.tensors().values(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(actual.tensors().values(), alone.tensors().values(), strict=True))


@pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4"])
def test_groups_take_valid_scales_and_no_row_errs_more_than_at_full_range(
    cases: Callable[[str, bool], Case], scheme: str
) -> None:
    _, policy, prompts, theta = cases(scheme, True)
    valid = importlib.import_module("onptq.methods.search").VALID[policy.scheme.scales]
    inputs, full = sample_inputs(policy, prompts), theta.freed()
    for ratio in full.ratio.values():
        ratio.zero_()
    chosen = torch.cat([ratio.exp().flatten() for ratio in theta.ratio.values()])
    assert (chosen[:, None] - torch.tensor(valid)).abs().amin(1).max() < 1e-5
    assert (chosen > 1.01).any()
    assert (chosen < 0.99).any()
    totals = np.zeros(2)
    for block in policy.structure.blocks:
        for pair, (_, consumers) in PAIRS.items():
            x = inputs[block.index][pair]
            for name in consumers:
                log_in, log_out = log_scales_in(theta, block, name), log_scales_out(theta, block, name)
                entering = quantized_input(policy.scheme, log_in, x)
                exact = x @ block.child(name).weight.T  # type: ignore[operator]
                exact = exact if log_out is None else exact / log_out.exp()
                weights = [rounded_weight(policy, each, block, name, log_in, log_out) for each in (theta, full)]
                found, plain = (((entering @ weight.T) - exact).square().sum(0) for weight in weights)
                assert bool((found <= plain * (1 + 1e-4)).all()), block.path(name)
                totals += float(found.sum()), float(plain.sum())
    assert totals[0] < 0.99 * totals[1]
