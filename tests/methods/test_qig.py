"""QIG against its own formulas: attributions in closed form where the unit is linear, and what integrated gradients promise."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from conftest import MULTIMODAL
from naive_search import footprint, make_policy, plain_units, short_answers

from onptq.methods.layerwise import answer_prompts, open_streams, quantized_linears, replaced
from onptq.methods.mbq import balanced_search
from onptq.methods.qig import difference, integrated_gradients, qig, token_importance
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.theta import PAIRS, Theta, pair_key


@pytest.fixture(scope="module")
def bed(tiny):
    """Two sequences of different length in one stream, in float64, at the first block's door."""
    t = tiny("qwen2.5-vl")
    policy = make_policy(t, "W4A8", torch.float64)
    prompts = t.encode(policy, 12)
    prompts = [min(prompts, key=lambda prompt: prompt.length), max(prompts, key=lambda prompt: prompt.length)]
    (stream,) = open_streams(policy, prompts)
    assert not stream.real.all()
    block, theta = policy.structure.blocks[0], Theta.rtn(policy.structure.blocks, policy.scheme)
    with torch.no_grad():
        inputs = stream.entering(block)
    return policy, theta, block, stream, inputs


def rounded_start(policy, x):
    return fake_quantize_activations(x, 4) if policy.scheme.quantizes_activations else x


@pytest.mark.parametrize("pair", PAIRS)
def test_attributions_of_a_sequence_sum_to_its_difference_between_the_ends_of_the_path(bed, pair):
    policy, theta, block, stream, inputs = bed
    end = inputs[pair]
    start = rounded_start(policy, end)
    rounded = quantized_linears(policy, theta, block, [pair], activations=False)

    def ends(x):
        with torch.no_grad():
            plain = stream.unit(block, pair, x)
            with replaced(block, rounded):
                return difference(plain, stream.unit(block, pair, x), stream.real)

    expected = ends(end) - ends(start)
    found = integrated_gradients(policy, theta, block, pair, stream, start, end, points=64)
    torch.testing.assert_close(found.sum((1, 2)), expected, rtol=0.02, atol=1e-7)
    assert not found[~stream.real].any(), "padding has no say"
    assert expected.abs().min() > 1e-6


@pytest.mark.parametrize("released", [False, True], ids=["paper", "released"])
@pytest.mark.parametrize("pair", ["v_o", "up_down"])
def test_attributions_of_a_linear_are_its_formula(bed, pair, released):
    """F(x) = mean |x (W - Q(W))^T|, so dF/dx = sign(x (W - Q(W))^T) (W - Q(W)) / (tokens * rows); the released form follows
    the dense branch alone, and its quantized branch rounds the input too."""
    policy, theta, block, stream, inputs = bed
    (name,) = PAIRS[pair][1]
    theta = theta.clone()
    theta.ratio[block.path(name)].fill_(np.log(0.97))  # off the ties between two codes
    end = inputs[pair][0, stream.real[0]].numpy()
    start = rounded_start(policy, inputs[pair])[0, stream.real[0]].numpy()
    weight = block.child(name).weight.numpy()
    step = 0.97 * np.abs(weight).max(1, keepdims=True) / oracles.half_range(4)
    coarse = np.round(np.clip(weight / step, -8, 7)) * step
    path = np.arange(32) / 31 if released else (np.arange(32) + 0.5) / 32
    total = np.zeros_like(end)
    for a in path:
        x = start + a * (end - start)
        entering = x
        if released:
            token = np.abs(x).max(-1, keepdims=True) / 127.5
            entering = np.round(np.clip(x / token, -128, 127)) * token
        sign = np.sign(x @ weight.T - entering @ coarse.T)
        total += sign @ (weight if released else weight - coarse) / (len(x) * len(weight))
    expected = (end - start) * total / 32
    found = integrated_gradients(
        policy, theta, block, pair, stream, rounded_start(policy, inputs[pair]), inputs[pair], released=released
    )[0, stream.real[0]].numpy()
    # The deployed step puts a token's negative largest value on a tie, so that its last bit decides (docs/architecture.md).
    tolerance = 2e-2 if released else 1e-5
    assert np.abs(found - expected).sum() < tolerance * np.abs(expected).sum()


def test_importances_are_clipped_at_the_fences_and_sum_to_one():
    random = np.random.default_rng(0)
    attributed = random.normal(size=(2, 40, 8)) * np.exp(random.normal(size=(2, 40, 1)))
    attributed[0, 3] *= 200
    real = np.ones((2, 40), bool)
    real[1, 25:] = False
    for clipped in (True, False):
        found = token_importance(torch.from_numpy(attributed), torch.from_numpy(real), clipped=clipped).double().numpy()
        for row in range(2):
            score = np.abs(attributed[row, real[row]]).mean(-1)
            if clipped:
                low, high = np.percentile(score, [25, 75])
                score = np.clip(score, low - 1.5 * (high - low), high + 1.5 * (high - low))
            np.testing.assert_allclose(found[row, real[row]], score / score.sum(), rtol=1e-5)
            assert not found[row, ~real[row]].any()
    assert found[0, 3] > 0.3, "unclipped, one token can outweigh the rest"


def test_tokens_weigh_alike_where_nothing_is_attributed():
    real = torch.tensor([[True, True, True, False]])
    found = token_importance(torch.zeros(1, 4, 2), real, clipped=True)
    torch.testing.assert_close(found, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]))


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
            x = stream.entering(block)[pair]
        start = fake_quantize_activations(x, 6)
        attributed = integrated_gradients(policy, plain, block, pair, stream, start, x, points=8)
        weights.append(token_importance(attributed, stream.real, clipped=True)[0].double().numpy())
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


def test_the_released_form_begins_with_uniform_weights_where_only_weights_are_quantized(tiny):
    t = tiny("qwen3-vl")
    policy = make_policy(t, "W4A16")
    prompts = t.encode(policy, 3)
    responses = short_answers(policy, prompts)
    released, paper = (qig(policy, prompts, responses=responses, released=form, points=3) for form in (True, False))
    alike = {name: torch.ones(policy.blocks, 3) for name in ("o_proj", "down_proj")}
    uniform = balanced_search(policy, answer_prompts(policy, prompts, responses), alike)
    keys = [pair_key(policy.structure.blocks[0], pair) for pair in PAIRS]
    keys.append(pair_key(policy.structure.blocks[1], "norm_qkv"))
    assert all(torch.equal(released.smoothing[key], uniform.smoothing[key]) for key in keys)
    assert any(not torch.equal(paper.smoothing[key], uniform.smoothing[key]) for key in keys)


@pytest.mark.parametrize("released", [False, True], ids=["paper", "released"])
@pytest.mark.parametrize("family", MULTIMODAL)
def test_every_family_gives_the_same_theta_twice_and_keeps_its_policy(tiny, family, released):
    t = tiny(family)
    policy = t.policy("W4A8")
    prompts = t.encode(policy, 2)
    responses = short_answers(policy, prompts)
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
    before, steps = footprint(policy), []
    theta = qig(policy, prompts, steps.append, responses=responses, released=released, points=3)
    assert footprint(policy) == before
    assert steps == [1] * policy.blocks
    again = qig(policy, prompts, responses=responses, released=released, points=3)
    assert all(torch.equal(a, b) for a, b in zip(theta.tensors().values(), again.tensors().values(), strict=True))
    assert all(torch.isfinite(u).all() and not u.requires_grad for u in theta.smoothing.values())
    assert any(u.any() for u in theta.smoothing.values())
    assert all(not ratio.any() for ratio in theta.ratio.values())
