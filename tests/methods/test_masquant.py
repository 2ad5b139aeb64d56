"""MASQuant against its formula and against training on Q's own graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import MULTIMODAL, Tiny
from method_models import check_contract
from naive_search import make_policy

from onptq.methods.layerwise import Stream
from onptq.methods.linears import dense_weight, quantized_linears, replaced
from onptq.methods.masquant import RATE, SCALE_FLOOR, balanced_error, masquant, modality_of
from onptq.methods.smoothquant import smoothquant
from onptq.models.decoder import Tokens
from onptq.models.encoding import PromptBatch
from onptq.models.family import AUDIO, IMAGE, TEXT
from onptq.models.structure import PAIRS
from onptq.quantizer.theta import pair_key

SMOOTHED = ("norm_qkv", "norm_gate_up", "v_o")


def forward(policy, prompt, side):
    batch = PromptBatch.of([prompt])
    causal = torch.ones(prompt.length, prompt.length, dtype=torch.bool).tril()[None, None]
    with torch.no_grad(), policy.speaking(side):
        return policy.run(Tokens(batch.embeds, batch.positions, causal, batch.deepstack))[0]


def inputs_of(policy, prompts, block, pair):
    """The inputs of a pair under D, [tokens, I], and every token's modality."""
    inputs = []
    hook = block.child(PAIRS[pair][1][0]).register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
    for prompt in prompts:
        forward(policy, prompt, "D")
    hook.remove()
    return torch.cat(inputs).double().numpy(), np.concatenate([prompt.modality.numpy() for prompt in prompts])


@pytest.mark.parametrize("family", [*MULTIMODAL, "qwen3"])
def test_untrained_and_merged_the_scales_are_smoothquants(tiny, family):
    """With one modality (qwen3) or several: the largest of their scales is the scale of their largest inputs."""
    t = tiny(family)
    policy = t.policy("W4A8")
    prompts = t.encode(policy, 3)
    actual, smoothed = masquant(policy, prompts, epochs=0), smoothquant(policy, prompts)
    for block in policy.structure.blocks:
        for pair in ("norm_qkv", "norm_gate_up"):
            key = pair_key(block, pair)
            torch.testing.assert_close(actual.smoothing[key], smoothed.smoothing[key], rtol=1e-4, atol=1e-5)
        for pair in SMOOTHED:
            x, modality = inputs_of(policy, prompts, block, pair)
            w = np.max([np.abs(dense_weight(block, name).double().numpy()).max(0) for name in PAIRS[pair][1]], axis=0)
            best = []
            for kind in np.unique(modality):
                x_max = np.abs(x[modality == kind]).max(0)
                if pair == "v_o":
                    x_max, columns = (v.reshape(block.kv_heads, -1, block.head_dim).max(1).ravel() for v in (x_max, w))
                else:
                    columns = w
                best.append(np.sqrt(x_max) / np.sqrt(columns))
            expected = np.log(np.max(best, axis=0))
            u = actual.smoothing[pair_key(block, pair)].double().numpy()
            np.testing.assert_allclose(u, expected - expected.mean(), atol=1e-4)
        assert not actual.smoothing[pair_key(block, "up_down")].any(), "down_proj is never smoothed"


def test_the_error_counts_images_half():
    random = np.random.default_rng(0)
    output, target = random.normal(size=(2, 1, 7, 5))
    modality = np.array([[TEXT, IMAGE, IMAGE, AUDIO, TEXT, IMAGE, AUDIO]])
    by_kind = {kind: np.abs(output - target)[modality == kind].mean(-1).sum() for kind in (TEXT, IMAGE, AUDIO)}
    expected = (by_kind[TEXT] + by_kind[AUDIO] + 0.5 * by_kind[IMAGE]) / 7
    error = balanced_error(*(torch.from_numpy(v) for v in (output, target, modality)))
    assert float(error) == pytest.approx(expected, rel=1e-6)


def test_training_is_that_of_the_deployed_graph(tiny):
    """The same recipe on Q itself, whose norms are folded: block by block, quantized prefix in, dense output as the target."""
    t = tiny("qwen3-vl")
    policy = make_policy(t, "W4A16")
    prompts = t.encode(policy, 2)
    actual = masquant(policy, prompts)

    theta = masquant(policy, prompts, epochs=0)
    raw = {}
    for block in policy.structure.blocks:  # the size of the scales matters to their training
        for pair in SMOOTHED:
            x, _ = inputs_of(policy, prompts, block, pair)
            w = np.max([np.abs(dense_weight(block, name).double().numpy()).max(0) for name in PAIRS[pair][1]], axis=0)
            logs = np.log(np.abs(x).max(0)) / 2, np.log(w) / 2
            if pair == "v_o":
                logs = tuple(v.reshape(block.kv_heads, -1, block.head_dim).max(1).ravel() for v in logs)
            raw[pair_key(block, pair)] = torch.from_numpy(np.exp(logs[0] - logs[1])).float().requires_grad_()
    dense, quantized = ([Stream(policy, [prompt]) for prompt in prompts] for _ in "DQ")
    policy.attach(theta)
    for block in policy.structure.blocks:
        mine = {pair_key(block, pair): raw[pair_key(block, pair)] for pair in SMOOTHED}
        optimizer = torch.optim.AdamW(mine.values(), lr=RATE, weight_decay=0)
        with torch.no_grad(), policy.speaking("D"):
            for stream in dense:
                stream.advance(block)
        for _ in range(2):
            for prompt, stream, target in zip(prompts, quantized, dense, strict=True):
                theta.smoothing.update({key: scale.log() for key, scale in mine.items()})
                with policy.speaking("Q"):
                    error = (stream.run(block) - target.hidden).abs().mean(-1)[0]
                weight = torch.tensor([0.5 if kind == IMAGE else 1.0 for kind in prompt.modality.tolist()])
                optimizer.zero_grad()
                (weight * error).mean().backward()
                optimizer.step()
                for scale in mine.values():
                    scale.data.clamp_(min=SCALE_FLOOR)
        theta.smoothing.update({key: scale.detach().log() for key, scale in mine.items()})
        with torch.no_grad(), policy.speaking("Q"):
            for stream in quantized:
                stream.advance(block)
    init = masquant(policy, prompts, epochs=0)
    for key in raw:
        u = theta.smoothing[key] - theta.smoothing[key].mean()
        moved, expected = actual.smoothing[key] - init.smoothing[key], u - init.smoothing[key]
        # Adam turns the noise of a vanishing gradient into a step, and one flipped code changes the gradients behind it.
        likeness = float(torch.corrcoef(torch.stack((moved, expected)))[0, 1])
        assert likeness > (0.995 if key.startswith("layers.0.") else 0.94), key
        assert expected.std() > 1e-2, "training moves what is compared"


@pytest.mark.slow
def test_training_lowers_the_error_it_trains_on(tiny):
    t = tiny("qwen2.5-omni")
    policy = make_policy(t, "W4A6")
    prompts = t.encode(policy, 6)
    assert {int(kind) for prompt in prompts for kind in prompt.modality} == {TEXT, IMAGE, AUDIO}

    def error(theta):
        dense, quantized = ([Stream(policy, [prompt]) for prompt in prompts] for _ in "DQ")
        total = 0.0
        with torch.no_grad(), policy.speaking("D"):
            for block in policy.structure.blocks:
                for target, stream in zip(dense, quantized, strict=True):
                    target.advance(block)
                    with replaced(block, quantized_linears(policy, theta, block, block.pairs)):
                        stream.advance(block)
                    total += float(balanced_error(stream.hidden, target.hidden, modality_of(stream)))
        return total

    assert error(masquant(policy, prompts)) < 0.99 * error(masquant(policy, prompts, epochs=0))


@pytest.mark.slow
@pytest.mark.parametrize("family", MULTIMODAL)
def test_every_family_gives_the_same_theta_twice_and_keeps_its_policy(tiny, family):
    _, theta = check_contract(tiny(family), "W4A8", masquant)
    assert all(not ratio.any() for ratio in theta.ratio.values())


def test_the_constants_are_the_authors() -> None:
    module = importlib.import_module("onptq.methods.masquant")
    assert (module.ALPHA, module.EPOCHS, module.RATE, module.SCALE_FLOOR) == (0.5, 2, 0.05, 0.01)
    assert module.TOKEN_WEIGHTS == {TEXT: 1.0, IMAGE: 0.5, AUDIO: 1.0}


def test_scales_that_training_drives_below_zero_stop_at_their_floor(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rate far above every scale, the first step takes each to one of its floor and far above it."""
    monkeypatch.setattr(importlib.import_module("onptq.methods.masquant"), "RATE", 100.0)
    t = tiny("qwen2.5-vl")
    policy = t.policy("W4A8")
    theta = masquant(policy, t.encode(policy, 1), epochs=1)
    for block in policy.structure.blocks:
        for pair in SMOOTHED:
            u = theta.smoothing[pair_key(block, pair)]
            assert torch.isfinite(u).all(), (block.index, pair)
            floored = u < u.mean()
            assert 0 < floored.sum() < len(u)
            assert u[floored].max() - u[floored].min() < 1e-5, "all of them at the same floor"
            assert (u.max() - u.min()).exp() > 5000, "0.01 and about 100"
