"""QIG against its own formulas: attributions in closed form where the unit is linear, and what integrated gradients promise."""

from __future__ import annotations

import importlib
import inspect

import numpy as np
import oracles
import pytest
import torch
from method_models import check_contract
from naive_search import make_policy, plain_units, short_answers

from onptq.methods.layerwise import answer_prompts, open_streams
from onptq.methods.linears import quantized_linears, replaced
from onptq.methods.qig import _along_inputs, _along_outputs, difference, integrated_gradients, qig, token_importance
from onptq.models.structure import PAIRS
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.theta import Theta, pair_key


@pytest.fixture(scope="module")
def case(tiny):
    """Two sequences of different length in one stream, in float64, at the input of the first block."""
    t = tiny("qwen2.5-vl")
    policy = make_policy(t, "W4A8", torch.float64)
    prompts = t.encode(policy, 12)
    prompts = [min(prompts, key=lambda prompt: prompt.length), max(prompts, key=lambda prompt: prompt.length)]
    (stream,) = open_streams(policy, prompts)
    assert not stream.real.all()
    block, theta = policy.structure.blocks[0], Theta.rtn(policy.structure.blocks, policy.scheme)
    with torch.no_grad():
        inputs = stream.inputs(block)
    return policy, theta, block, stream, inputs


def rounded_input(policy, x):
    return fake_quantize_activations(x, 4) if policy.scheme.quantizes_activations else x


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_attributions_of_a_sequence_sum_to_its_difference_between_the_ends_of_the_path(case, pair):
    policy, theta, block, stream, inputs = case
    end = inputs[pair]
    begin = rounded_input(policy, end)
    rounded = quantized_linears(policy, theta, block, [pair], activations=False)

    def ends(x):
        with torch.no_grad():
            plain = stream.unit(block, pair, x)
            with replaced(block, rounded):
                return difference(plain, stream.unit(block, pair, x), stream.real)

    expected = ends(end) - ends(begin)
    actual = integrated_gradients(policy, theta, block, pair, stream, begin, end, points=64)
    torch.testing.assert_close(actual.sum((1, 2)), expected, rtol=0.02, atol=1e-7)
    assert not actual[~stream.real].any(), "padding has no attribution"
    assert expected.abs().min() > 1e-6


@pytest.mark.parametrize("pair", ["v_o", "up_down"])
def test_attributions_of_a_linear_are_its_formula(case, pair):
    """F(x) = mean |x (W - Q(W))^T|, so dF/dx = sign(x (W - Q(W))^T) (W - Q(W)) / (tokens * rows)."""
    policy, theta, block, stream, inputs = case
    (name,) = PAIRS[pair][1]
    theta = theta.clone()
    theta.ratio[block.path(name)].fill_(np.log(0.97))  # off the ties between two codes
    end = inputs[pair][0, stream.real[0]].numpy()
    begin = rounded_input(policy, inputs[pair])[0, stream.real[0]].numpy()
    weight = block.child(name).weight.numpy()
    scale = 0.97 * np.abs(weight).max(1, keepdims=True) / oracles.half_range(4)
    coarse = np.round(np.clip(weight / scale, -8, 7)) * scale
    total = np.zeros_like(end)
    for a in (np.arange(32) + 0.5) / 32:
        x = begin + a * (end - begin)
        total += np.sign(x @ (weight - coarse).T) @ (weight - coarse) / (len(x) * len(weight))
    expected = (end - begin) * total / 32
    actual = integrated_gradients(
        policy, theta, block, pair, stream, rounded_input(policy, inputs[pair]), inputs[pair]
    )[0, stream.real[0]].numpy()
    assert np.abs(actual - expected).sum() < 1e-5 * np.abs(expected).sum()


@pytest.mark.parametrize("pair", PAIRS)
def test_the_path_of_the_outputs_has_the_gradients_of_the_path_of_the_input(case, pair):
    policy, theta, block, stream, inputs = case
    rounded = quantized_linears(policy, theta, block, [pair], activations=False)
    path = rounded_input(policy, inputs[pair]), inputs[pair], 8
    expected = _along_inputs(block, pair, stream, rounded, *path)
    assert expected.any()
    torch.testing.assert_close(_along_outputs(block, pair, stream, rounded, *path), expected)


def test_importances_are_clipped_at_the_fences_and_sum_to_one():
    random = np.random.default_rng(0)
    attributions = random.normal(size=(2, 40, 8)) * np.exp(random.normal(size=(2, 40, 1)))
    attributions[0, 3] *= 200
    real = np.ones((2, 40), bool)
    real[1, 25:] = False
    actual = token_importance(torch.from_numpy(attributions), torch.from_numpy(real)).double().numpy()
    for row in range(2):
        score = np.abs(attributions[row, real[row]]).mean(-1)
        low, high = np.percentile(score, [25, 75])
        clipped = np.clip(score, low - 1.5 * (high - low), high + 1.5 * (high - low))
        np.testing.assert_allclose(actual[row, real[row]], clipped / clipped.sum(), rtol=1e-5)
        assert not actual[row, ~real[row]].any()
        assert row or (score / score.sum())[3] > 0.3, "unclipped, one token would outweigh the rest"


def test_the_integral_has_32_points_by_default():
    assert inspect.signature(qig).parameters["points"].default == 32


def test_tokens_have_equal_weights_where_nothing_is_attributed():
    real = torch.tensor([[True, True, True, False]])
    actual = token_importance(torch.zeros(1, 4, 2), real)
    torch.testing.assert_close(actual, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]))


@pytest.mark.slow
def test_the_first_search_takes_the_least_importance_weighted_error_of_its_grid(tiny):
    """Before anything is quantized the path begins at the dense input itself, rounded."""
    t = tiny("qwen3-vl")
    policy = make_policy(t, "W3A6")
    prompts = t.encode(policy, 3)
    responses = short_answers(policy, prompts)
    theta = qig(policy, prompts, responses=responses, points=8)
    block, pair = policy.structure.blocks[0], "norm_qkv"
    plain = Theta.rtn(policy.structure.blocks, policy.scheme)
    weights = []
    for one in answer_prompts(policy, prompts, responses):
        (stream,) = open_streams(policy, [one.sequence])
        with torch.no_grad():
            x = stream.inputs(block)[pair]
        begin = fake_quantize_activations(x, 6)
        attributions = integrated_gradients(policy, plain, block, pair, stream, begin, x, points=8)
        weights.append(token_importance(attributions, stream.real)[0].double().numpy())
    unit = plain_units(t, responses)[0, pair]
    candidates = unit.candidates()
    errors = [unit.error(u, policy.scheme, weights) for u in candidates]
    u = theta.smoothing[pair_key(block, pair)].double().numpy()
    distances = [np.abs(u - other).max() for other in candidates]
    chosen = int(np.argmin(distances))
    assert distances[chosen] < 1e-4
    assert errors[chosen] <= min(errors) * (1 + 2e-4) < max(errors)
    uniform = [unit.error(u, policy.scheme, [np.ones_like(weight) for weight in weights]) for u in candidates]
    assert chosen != int(np.argmin(uniform)), "the importances matter here"


@pytest.mark.slow
def test_the_paper_form_judges_every_pair_on_the_dense_models_inputs(tiny, monkeypatch):
    """With all tokens alike it is the plain search: dense inputs, dense target, whatever is quantized before."""

    def alike(attributions, real):
        return real.float()

    monkeypatch.setattr(importlib.import_module("onptq.methods.qig"), "token_importance", alike)
    t = tiny("qwen3-vl")
    policy = make_policy(t, "W3A16")
    prompts = t.encode(policy, 3)
    responses = short_answers(policy, prompts)
    theta = qig(policy, prompts, responses=responses, points=1)
    for (index, pair), unit in plain_units(t, responses).items():
        candidates = unit.candidates()
        u = theta.smoothing[pair_key(policy.structure.blocks[index], pair)].double().numpy()
        distances = [np.abs(u - other).max() for other in candidates]
        chosen = int(np.argmin(distances))
        assert distances[chosen] < 1e-4, (index, pair, "a candidate of the dense inputs")
        errors = [unit.error(u, policy.scheme, [np.ones(len(x)) for x in unit.inputs()]) for u in candidates]
        assert errors[chosen] <= min(errors) * (1 + 2e-4), (index, pair)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-omni"])
def test_every_family_gives_the_same_theta_twice_and_keeps_its_policy(tiny, family):
    def method(policy, prompts, advance):
        responses = short_answers(policy, prompts)
        return qig(policy, prompts, advance, responses=responses, points=3)

    _, theta = check_contract(tiny(family), "W4A8", method)
    assert any(u.any() for u in theta.smoothing.values())
    assert all(not ratio.any() for ratio in theta.ratio.values())
    assert not theta.offset
