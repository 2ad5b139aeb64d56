"""MASQuant: the merged form against its formula and against training on Q's own graph; the full form token by token."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from conftest import MULTIMODAL
from naive import random_theta
from naive_search import footprint, make_policy

from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.methods import smoothquant
from onptq.methods.layerwise import IN_ORDER, quantized_linears, replaced
from onptq.methods.linears import dense_weight, rounded_weight
from onptq.methods.masquant import (
    COUNTS,
    RATE,
    SCALE_FLOOR,
    balanced_error,
    masquant,
    modality_of,
    open_each,
)
from onptq.methods.masquant_full import ModalityLinear, ModalityQuantized, low_rank, masquant_full
from onptq.models.decoder import Tokens
from onptq.models.encoding import PromptBatch
from onptq.models.family import AUDIO, IMAGE, TEXT
from onptq.quantizer.theta import PAIRS, Theta, log_scales_in, pair_key

SMOOTHED = ("norm_qkv", "norm_gate_up", "v_o")


def forward(policy, prompt, side):
    batch = PromptBatch.of([prompt])
    causal = torch.ones(prompt.length, prompt.length, dtype=torch.bool).tril()[None, None]
    with torch.no_grad(), policy.speaking(side):
        return policy.run(Tokens(batch.embeds, batch.positions, causal, batch.deepstack))[0]


def inputs_of(policy, prompts, block, pair):
    """What enters a pair under D, [tokens, I], and every token's modality."""
    seen = []
    hook = block.child(PAIRS[pair][1][0]).register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    for prompt in prompts:
        forward(policy, prompt, "D")
    hook.remove()
    return torch.cat(seen).double().numpy(), np.concatenate([prompt.modality.numpy() for prompt in prompts])


@pytest.mark.parametrize("family", [*MULTIMODAL, "qwen3"])
def test_untrained_and_merged_the_scales_are_smoothquants(tiny, family):
    """With one modality (qwen3) or several: the largest of their scales is the scale of their largest inputs."""
    t = tiny(family)
    policy = t.policy("W4A8")
    prompts = t.encode(policy, 3)
    found, known = masquant(policy, prompts, epochs=0), smoothquant(policy, prompts)
    for block in policy.structure.blocks:
        for pair in ("norm_qkv", "norm_gate_up"):
            key = pair_key(block, pair)
            torch.testing.assert_close(found.smoothing[key], known.smoothing[key], rtol=1e-4, atol=1e-5)
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
            u = found.smoothing[pair_key(block, pair)].double().numpy()
            np.testing.assert_allclose(u, expected - expected.mean(), atol=1e-4)
        assert not found.smoothing[pair_key(block, "up_down")].any(), "down_proj is never smoothed"


def test_the_error_counts_pictures_half():
    random = np.random.default_rng(0)
    found, wanted = random.normal(size=(2, 1, 7, 5))
    modality = np.array([[TEXT, IMAGE, IMAGE, AUDIO, TEXT, IMAGE, AUDIO]])
    by_kind = {kind: np.abs(found - wanted)[modality == kind].mean(-1).sum() for kind in COUNTS}
    expected = (by_kind[TEXT] + by_kind[AUDIO] + 0.5 * by_kind[IMAGE]) / 7
    error = balanced_error(*(torch.from_numpy(v) for v in (found, wanted, modality)))
    assert float(error) == pytest.approx(expected, rel=1e-6)


def test_training_is_that_of_the_deployed_graph(tiny):
    """The same recipe on Q itself, whose norms are folded: block by block, quantized prefix in, dense output wanted."""
    t = tiny("qwen3-vl")
    policy = make_policy(t, "W4A16")
    prompts = t.encode(policy, 2)
    found = masquant(policy, prompts)

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
    dense, quantized = open_each(policy, prompts), open_each(policy, prompts)
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
    start = masquant(policy, prompts, epochs=0)
    for key in raw:
        u = theta.smoothing[key] - theta.smoothing[key].mean()
        moved, expected = found.smoothing[key] - start.smoothing[key], u - start.smoothing[key]
        # Adam turns the noise of a vanishing gradient into a step, and one flipped code changes the gradients behind it.
        likeness = float(torch.corrcoef(torch.stack((moved, expected)))[0, 1])
        assert likeness > (0.995 if key.startswith("layers.0.") else 0.94), key
        assert expected.std() > 1e-2, "training moves what is compared"


def test_training_lowers_the_error_it_trains_on(tiny):
    t = tiny("qwen2.5-omni")
    policy = make_policy(t, "W4A6")
    prompts = t.encode(policy, 6)
    assert {int(kind) for prompt in prompts for kind in prompt.modality} == {TEXT, IMAGE, AUDIO}

    def error(theta):
        dense, quantized = open_each(policy, prompts), open_each(policy, prompts)
        total = 0.0
        with torch.no_grad(), policy.speaking("D"):
            for block in policy.structure.blocks:
                for target, stream in zip(dense, quantized, strict=True):
                    target.advance(block)
                    with replaced(block, quantized_linears(policy, theta, block, IN_ORDER)):
                        stream.advance(block)
                    total += float(balanced_error(stream.hidden, target.hidden, modality_of(stream)))
        return total

    assert error(masquant(policy, prompts)) < 0.99 * error(masquant(policy, prompts, epochs=0))


@pytest.mark.parametrize("family", MULTIMODAL)
def test_every_family_gives_the_same_theta_twice_and_keeps_its_policy(tiny, family):
    t = tiny(family)
    policy = t.policy("W4A8")
    prompts = t.encode(policy, 2)
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
    before, steps = footprint(policy), []
    theta = masquant(policy, prompts, steps.append)
    assert footprint(policy) == before
    assert steps == [1] * policy.blocks
    again = masquant(policy, prompts)
    assert all(torch.equal(a, b) for a, b in zip(theta.tensors().values(), again.tensors().values(), strict=True))
    assert all(torch.isfinite(u).all() and not u.requires_grad for u in theta.smoothing.values())
    assert all(not ratio.any() for ratio in theta.ratio.values())


# The full form


def test_the_branch_is_the_nearest_of_its_rank_over_the_inputs():
    random = np.random.default_rng(0)
    matrix = random.normal(size=(20, 12))
    x = random.normal(size=(300, 12)) * np.exp(2 * random.normal(size=12))
    outputs = x @ matrix.T
    values = np.linalg.svd(outputs, compute_uv=False)
    left, sizes, right = np.linalg.svd(matrix)
    for rank in (1, 4, 12):
        down, up = (part.numpy() for part in low_rank(torch.from_numpy(matrix), torch.from_numpy(x), rank))
        assert down.shape == (12, rank)
        assert up.shape == (rank, 20)
        error = ((outputs - x @ down @ up) ** 2).sum()
        assert error == pytest.approx((values[rank:] ** 2).sum(), rel=1e-6, abs=1e-9 * (outputs**2).sum())
        blind = (left[:, :rank] * sizes[:rank]) @ right[:rank]
        if rank < 12:
            assert error < 0.99 * ((outputs - x @ blind.T) ** 2).sum(), "better than without the inputs' metric"


def test_a_modality_linear_scales_rounds_and_corrects_token_by_token():
    random = np.random.default_rng(1)
    x, modality = random.normal(size=(1, 9, 6)), np.array([[TEXT, IMAGE, IMAGE, AUDIO, TEXT, IMAGE, AUDIO, TEXT, TEXT]])
    scales, weight, bias = np.exp(random.normal(size=(3, 6))), random.normal(size=(5, 6)), random.normal(size=5)
    branch = random.normal(size=(6, 2)), random.normal(size=(2, 5))
    linear = ModalityLinear(
        *(torch.from_numpy(v) for v in (scales, weight, bias)), 8, {IMAGE: tuple(map(torch.from_numpy, branch))}
    )
    found = linear(torch.from_numpy(x), torch.from_numpy(modality))[0].numpy()
    for t, kind in enumerate(modality[0]):
        scaled = x[0, t] / scales[kind]
        step = oracles.token_step(scaled, 8)
        expected = weight @ oracles.rounding(scaled, step, 8)(scaled, step) + bias
        if kind == IMAGE:
            expected = expected + scaled @ branch[0] @ branch[1]
        np.testing.assert_allclose(found[t], expected, atol=2 * np.abs(weight).max() * float(step.max()))  # a tie apart
        if kind != IMAGE:
            assert np.abs(found[t] - expected - scaled @ branch[0] @ branch[1]).max() > 0.1


def test_branches_of_full_rank_make_pictures_and_sounds_dense_again(tiny):
    """Of the linears that have them; text goes through the quantized weight alone."""
    t = tiny("qwen2.5-omni")
    policy = make_policy(t, "W3A16")
    prompts = t.encode(policy, 6)
    full = masquant_full(policy, prompts, epochs=0, rank_ratio=1.0)
    modality = torch.tensor([[TEXT, IMAGE, AUDIO]])
    for block in policy.structure.blocks:
        for pair in SMOOTHED:
            for name in PAIRS[pair][1]:
                weight, bias = dense_weight(block, name), block.child(name).bias
                x = torch.randn(1, 3, weight.shape[1], generator=torch.Generator().manual_seed(0))
                expected = torch.nn.functional.linear(x, weight, bias)
                error = (full.linears[block.path(name)](x, modality) - expected)[0].abs().amax(-1)
                assert error[1:].max() < 1e-2 * expected.abs().max(), block.path(name)
                assert error[0] > 1e-2 * expected.abs().max()
                linear, plain = full.linears[block.path(name)], Theta.rtn(policy.structure.blocks, policy.scheme)
                own = linear.scales[TEXT].log()
                assert torch.equal(linear.weight, rounded_weight(policy, plain, block, name, own))
    assert not full.linears["layers.0.mlp.down_proj"].branches
    assert full.label == "graph changed"


def test_scales_of_the_full_form_start_from_each_modalitys_own_largest_inputs(tiny):
    t = tiny("qwen2.5-vl")
    policy = make_policy(t, "W4A8")
    prompts = t.encode(policy, 3)
    full = masquant_full(policy, prompts, epochs=0)
    block = policy.structure.blocks[0]
    for pair, measured in (("norm_qkv", "q_proj"), ("v_o", "o_proj"), ("norm_gate_up", "up_proj")):
        x, modality = inputs_of(policy, prompts, block, pair)
        w = np.abs(dense_weight(block, measured).double().numpy()).max(0)
        for name in PAIRS[pair][1]:
            scales = full.linears[block.path(name)].scales.double().numpy()
            for kind in (TEXT, IMAGE):
                expected = np.sqrt(np.abs(x[modality == kind]).max(0)) / np.sqrt(w)
                np.testing.assert_allclose(scales[kind], expected, rtol=1e-4)
            np.testing.assert_array_equal(scales[AUDIO], scales[TEXT])
    trained = masquant_full(policy, prompts).linears[block.path("q_proj")].scales
    before = full.linears[block.path("q_proj")].scales
    assert ((trained - before).abs() > 1e-3)[[TEXT, IMAGE]].float().mean() > 0.9
    assert torch.equal(trained[AUDIO], before[AUDIO]), "no token, no gradient"


def test_attached_with_one_vector_for_all_it_is_what_theta_deploys(tiny):
    t = tiny("qwen3-vl")
    policy = make_policy(t, "W4A16")
    theta, linears = random_theta(policy), {}
    for block in policy.structure.blocks:
        for pair in PAIRS:
            for name in PAIRS[pair][1]:
                log_in = log_scales_in(theta, block, name)
                weight = rounded_weight(policy, theta, block, name, log_in)
                scales = log_in.exp().expand(3, -1)
                linears[block.path(name)] = ModalityLinear(scales, weight, block.child(name).bias, None, {})
    (prompt,) = t.encode(policy, 1)
    dense = forward(policy, prompt, "D")
    with ModalityQuantized(linears).attached(policy, [prompt]):
        found = forward(policy, prompt, "Q")
        assert torch.equal(forward(policy, prompt, "D"), dense), "D stays D"
    policy.freeze(theta)
    torch.testing.assert_close(found, forward(policy, prompt, "Q"), rtol=1e-3, atol=1e-3)
    assert (found - dense).abs().max() > 0.1


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_full_form_can_be_followed_and_compared_and_leaves_no_trace(tiny, family):
    t = tiny(family)
    policy = t.policy("W4A8")
    prompts = t.encode(policy, 3)
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
    before, steps = footprint(policy), []
    full = masquant_full(policy, prompts, steps.append)
    again = masquant_full(policy, prompts)
    assert footprint(policy) == before
    assert steps == [1] * policy.blocks
    for path, linear in full.linears.items():
        assert torch.equal(linear.scales, again.linears[path].scales)
        assert torch.equal(linear.weight, again.linears[path].weight)
        for kind, parts in linear.branches.items():
            assert all(torch.equal(a, b) for a, b in zip(parts, again.linears[path].branches[kind], strict=True))

    def kl():
        prefixes = Prefixes(policy, prompts, max_tokens=6)
        return float(compare(prefixes, follow(prefixes)).kl.mean())

    plain = kl()
    with full.attached(policy, prompts):
        known = kl()
    with full.attached(policy, []):
        unknown = kl()
    assert footprint(policy) == before
    assert kl() == plain
    assert len({plain, known, unknown}) == 3, "pictures and sounds are recognized only where they are known"


def test_inside_nothing_can_be_folded(tiny):
    t = tiny("qwen2.5-vl")
    policy = t.policy("W4A8")
    prompts = t.encode(policy, 1)
    full = masquant_full(policy, prompts, epochs=0)
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    with full.attached(policy, prompts), pytest.raises(AssertionError):
        policy.freeze(theta)
    policy.freeze(theta)
