"""SmoothQuant against its own formula, computed one token at a time in float64."""

from __future__ import annotations

import pytest
import torch

from onptq.methods.smoothquant import SMOOTHED, migrated, smoothquant
from onptq.models.decoder import Tokens
from onptq.models.encoding import PromptBatch
from onptq.models.structure import PAIRS
from onptq.quantizer.theta import pair_key

ALPHA = 0.5  # of the authors


def inputs_of(policy, prompts, block, name):
    """Every token that enters a linear under D, one prompt at a time: [tokens, I]."""
    inputs = []
    hook = block.child(name).register_forward_pre_hook(lambda module, args: inputs.append(args[0].flatten(0, -2)))
    with policy.speaking("D"):
        for prompt in prompts:
            batch = PromptBatch.of([prompt])
            causal = torch.ones(prompt.length, prompt.length, dtype=torch.bool).tril()[None, None]
            policy.run(Tokens(batch.embeds, batch.positions, causal, batch.deepstack))
    hook.remove()
    return torch.cat(inputs)


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-omni"])
def test_scales_follow_the_formula(tiny, family):
    t = tiny(family)
    policy = t.policy("W4A8", dtype=torch.float64)
    prompts = t.encode(policy, 3)
    theta = smoothquant(policy, prompts)
    for block in policy.structure.blocks:
        for pair in SMOOTHED:
            consumers = PAIRS[pair][1]
            tokens = inputs_of(policy, prompts, block, consumers[0])
            logs = []
            for column in range(tokens.shape[1]):
                x = max(abs(float(value)) for value in tokens[:, column])
                w = max(float(block.child(name).weight[:, column].abs().max()) for name in consumers)
                logs.append(torch.tensor(x**ALPHA / w ** (1 - ALPHA), dtype=torch.float64).log())
            expected = torch.stack(logs)
            actual = theta.smoothing[pair_key(block, pair)].double()
            torch.testing.assert_close(actual, expected - expected.mean(), rtol=1e-4, atol=1e-5)


def test_large_outliers_get_their_whole_scale():
    """The square root of a million; the bound of e^8 is for channels that are never there."""
    x_max, w_max = torch.tensor([1e6, 1.0, 1.0, 1.0], dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    u = migrated(x_max, w_max, ALPHA)
    torch.testing.assert_close((u[0] - u[1]).exp(), torch.tensor(1e3, dtype=torch.float64))
    assert u.mean().abs() < 1e-12
    x_max[0] = 1e30
    assert float(migrated(x_max, w_max, ALPHA)[0]) == 8.0


def test_channels_that_are_almost_silent_count_as_a_hundred_thousandth():
    """The authors' floor, of inputs and of weights: a channel without either gets no infinite scale."""
    ones = torch.ones(4, dtype=torch.float64)
    silent = torch.tensor([0.0, 1e-4, 1.0, 1.0], dtype=torch.float64)
    for u, sign in ((migrated(silent, ones, ALPHA), 1), (migrated(ones, silent, ALPHA), -1)):
        torch.testing.assert_close((sign * (u[0] - u[2])).exp(), torch.tensor(1e-5**0.5, dtype=torch.float64))
        torch.testing.assert_close((sign * (u[1] - u[2])).exp(), torch.tensor(1e-2, dtype=torch.float64))


def test_only_the_two_norms_are_smoothed_and_rows_keep_their_range(tiny):
    t = tiny("qwen2.5-vl")
    policy = t.policy("W4A8")
    theta = smoothquant(policy, t.encode(policy, 2), lambda blocks: None)
    moved = {key.split(".")[-1] for key, u in theta.smoothing.items() if u.abs().max() > 1e-3}
    assert moved == set(SMOOTHED)
    assert all(not ratio.any() for ratio in theta.ratio.values())


def test_the_fold_leaves_dense_outputs_unchanged(tiny):
    t = tiny("qwen3-vl")
    policy = t.policy("W8A16", dtype=torch.float64)
    prompts = t.encode(policy, 2)
    theta = smoothquant(policy, prompts)
    batch = PromptBatch.of([prompts[0]])
    causal = torch.ones(prompts[0].length, prompts[0].length, dtype=torch.bool).tril()[None, None]
    tokens = Tokens(batch.embeds, batch.positions, causal, batch.deepstack)
    with policy.speaking("D"):
        dense = policy.run(tokens)
    for block in policy.structure.blocks:  # what `theta` folds to, by hand and without rounding
        for pair in SMOOTHED:
            s = theta.smoothing[pair_key(block, pair)].double().exp()
            producer, consumers = PAIRS[pair]
            with torch.no_grad():
                block.child(producer).weight.div_(s)
                for name in consumers:
                    block.child(name).weight.mul_(s)
    with policy.speaking("D"):
        torch.testing.assert_close(policy.run(tokens), dense, rtol=1e-9, atol=1e-9)
