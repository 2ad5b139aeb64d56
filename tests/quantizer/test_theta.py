"""theta: what folds folds exactly, the gauge is free, the trust region holds, and live and frozen Q are the same Q."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from conftest import FAMILIES, Tiny, in_turn
from safetensors.torch import load_file
from torch import Tensor

from onptq.engine.prefixes import causal_mask
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.structure import LINEARS, NORMS, PAIRS
from onptq.quantizer.folded import Folded, FoldedLinear
from onptq.quantizer.modules import QuantLinear, QuantNorm
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import (
    OFFSET_RANGE,
    RATIO_RANGE,
    SETTLED_RANGE,
    SMOOTHING_REACH,
    Learned,
    LinearTheta,
    Settled,
    Theta,
    log_scales_in,
    log_scales_out,
    pair_key,
)
from onptq.quantizer.weights import smoothed, weight_codes
from onptq.schemes import Scheme

SCHEMES = ("W8A8", "W4A16", "W4A16-g128", "W4A16-asym", "W4A16-g128-asym", "W4A8", "W4A6", "W3A8")


def exact_policy(tiny: Tiny, scheme: Scheme) -> Policy:
    """Everything in float64, the stored gains, biases and steps too."""
    model = tiny.model(torch.float64)
    return Policy(model, scheme, storage=torch.float64, eos=tiny.source.eos())


def random_theta(policy: Policy, dtype: torch.dtype = torch.float32, offsets: bool = False) -> Theta:
    generator = torch.Generator().manual_seed(0)
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    if offsets:
        theta = with_offsets(theta, zero_offsets(policy))
    for u in theta.smoothing.values():
        u.normal_(0, 0.5, generator=generator)
    for c in theta.ratio.values():
        c.uniform_(*RATIO_RANGE, generator=generator)
    for v in theta.offset.values():
        v.uniform_(*OFFSET_RANGE, generator=generator)
    return Theta.of_tensors({name: tensor.to(dtype) for name, tensor in theta.tensors().items()})


def with_offsets(theta: Theta, offsets: Mapping[str, Tensor]) -> Theta:
    return Theta(theta.smoothing, {path: Learned(theta.ratio[path], offset) for path, offset in offsets.items()})


def zero_offsets(policy: Policy) -> dict[str, Tensor]:
    return {
        block.path(name): torch.zeros(block.child(name).weight.shape)  # type: ignore[union-attr, arg-type]
        for block in policy.structure.blocks
        for name in LINEARS
    }


def learnable(theta: Theta) -> Theta:
    """A copy whose gradients are kept."""
    live = theta.clone()
    for part in (live.smoothing, live.ratio, live.offset):
        for parameter in part.values():
            parameter.requires_grad_()
    return live


def deployed(policy: Policy, theta: Theta) -> dict[str, FoldedLinear]:
    policy.freeze(theta)
    return {path: piece for path, piece in policy.folded() if isinstance(piece, FoldedLinear)}


def batch_logits(policy: Policy, prompts: list[EncodedPrompt], side: str) -> Tensor:
    batch = PromptBatch.of(prompts)
    tokens = Tokens(batch.embeds, batch.positions, causal_mask(batch.real, 0), batch.deepstack)
    with torch.no_grad(), policy.speaking(side):  # type: ignore[arg-type]
        return policy.logits(policy.run(tokens)[batch.real])


def model_logits(policy: Policy, tiny: Tiny, side: str, prompt: int = 0) -> np.ndarray:
    """Through the checkpoint's own forward, with the prompt's image and sound."""
    inputs = tiny.inputs(prompt).tensors
    blocks = [block.module for block in policy.structure.blocks]
    with policy.speaking(side):  # type: ignore[arg-type]
        return oracles.plain_forward(policy.model, blocks, inputs, [1, 2, 3])[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_smoothing_folds_exactly(tiny: Callable[[str], Tiny], family: str) -> None:
    """With 16 bits nothing is rounded, so that Q is D: norms, GQA values with their bias, and up rows divide out."""
    checkpoint = tiny(family)
    policy = exact_policy(checkpoint, Scheme(16, 16))
    attention = policy.structure.blocks[0].module.self_attn
    assert policy.structure.blocks[0].heads > policy.structure.blocks[0].kv_heads
    assert (policy.structure.blocks[0].child("v_proj").bias is not None) == (
        family in ("qwen2.5-vl", "qwen2.5-omni", "qwen2")
    )
    assert hasattr(attention, "q_norm") == family.startswith("qwen3")
    theta = random_theta(policy, torch.float64)
    dense = model_logits(policy, checkpoint, "D")
    for become_q in (policy.attach, policy.freeze):
        become_q(theta)
        np.testing.assert_allclose(model_logits(policy, checkpoint, "Q"), dense, rtol=0, atol=1e-11)
    folded = dict(policy.folded())
    for block in policy.structure.blocks:
        for name in (*NORMS, *LINEARS):
            piece = folded[block.path(name)]
            moved = piece.weight if name in NORMS else piece.codes  # type: ignore[union-attr]
            assert not torch.allclose(moved, block.child(name).weight, rtol=1e-3), f"{name} was smoothed"  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_16_bits_without_smoothing_are_the_dense_model_bit_for_bit(tiny: Callable[[str], Tiny], family: str) -> None:
    checkpoint = tiny(family)
    policy = checkpoint.policy("W16A16")
    prompts = checkpoint.encode(policy, 2)
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    dense = batch_logits(policy, prompts, "D")
    for become_q in (policy.attach, policy.freeze):
        become_q(theta)
        assert torch.equal(batch_logits(policy, prompts, "Q"), dense)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_scale_of_the_wrong_channel_would_be_noticed(tiny: Callable[[str], Tiny], pair: str) -> None:
    """Fold one pair's producer with a permuted vector: the exactness above depends on every channel meeting its own scale."""
    checkpoint = tiny("qwen2.5-vl")
    policy = exact_policy(checkpoint, Scheme(16, 16))
    theta = random_theta(policy, torch.float64)
    policy.freeze(theta)
    block, key = policy.structure.blocks[0], pair_key(policy.structure.blocks[0], pair)
    wrong = theta.clone()
    wrong.smoothing[key] = wrong.smoothing[key].roll(1)
    producer = block.child(PAIRS[pair][0])
    assert isinstance(producer, QuantLinear | QuantNorm)
    producer.freeze(wrong)
    assert np.abs(model_logits(policy, checkpoint, "Q") - model_logits(policy, checkpoint, "D")).max() > 1e-2


def test_every_query_head_of_a_group_meets_the_scale_of_its_kv_channel(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("qwen3").policy()
    theta, block = random_theta(policy), policy.structure.blocks[1]
    u, columns = theta.smoothing[pair_key(block, "v_o")], log_scales_in(theta, block, "o_proj")
    share = block.heads // block.kv_heads
    for head in range(block.heads):
        for channel in range(block.head_dim):
            expected = u[(head // share) * block.head_dim + channel]
            assert columns[head * block.head_dim + channel] == expected  # type: ignore[index]
    assert log_scales_out(theta, block, "v_proj") is u
    assert log_scales_out(theta, block, "o_proj") is None
    assert log_scales_out(theta, block, "gate_proj") is None


def test_smoothing_multiplies_columns_and_divides_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, u_in, u_out = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 6), (6,), (4,))
    )
    weight = weight.float().double()
    for out in (None, u_out):
        expected = oracles.smoothed_weight(weight.numpy(), u_in.numpy(), None if out is None else out.numpy())
        np.testing.assert_allclose(smoothed(weight, u_in, out), expected, rtol=1e-12)


# The gauge and the trust region


@pytest.mark.parametrize("pair", PAIRS)
def test_a_constant_added_to_a_pair_changes_nothing(tiny: Callable[[str], Tiny], pair: str) -> None:
    checkpoint = tiny("qwen2.5-vl")
    policy = exact_policy(checkpoint, Scheme(4, 16))
    theta = random_theta(policy, torch.float64)
    policy.freeze(theta)
    before, codes = model_logits(policy, checkpoint, "Q"), dict(policy.folded())
    for block in policy.structure.blocks:
        theta.smoothing[pair_key(block, pair)] += 0.37
    policy.freeze(theta)
    np.testing.assert_allclose(model_logits(policy, checkpoint, "Q"), before, rtol=0, atol=1e-10)
    for path, piece in policy.folded():
        if hasattr(piece, "codes"):
            assert torch.equal(piece.codes, codes[path].codes)  # type: ignore[union-attr]


def test_token_steps_absorb_a_constant() -> None:
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(4))
    for bits in (4, 6, 8):  # a power of two, so that nothing but the exponent changes
        assert torch.equal(fake_quantize_activations(x / 4, bits) * 4, fake_quantize_activations(x, bits))


def moved_theta(distance: float) -> tuple[Theta, Theta]:
    generator = torch.Generator().manual_seed(5)
    linears: dict[str, LinearTheta] = {"r": Learned(torch.zeros(8, 1), torch.zeros(8, 16))}
    origin = Theta({"p": torch.randn(64, generator=generator)}, linears)
    origin.smoothing["p"] -= origin.smoothing["p"].mean()
    theta = origin.clone()
    for parameter in theta.tensors().values():
        parameter += distance * torch.randn(parameter.shape, generator=generator)
    return theta, origin


def test_small_travel_is_projected_onto_zero_mean_only() -> None:
    theta, origin = moved_theta(0.05)
    before = theta.clone()
    theta.project_(origin)
    assert abs(float(theta.smoothing["p"].mean())) < 1e-6
    torch.testing.assert_close(theta.smoothing["p"], before.smoothing["p"] - before.smoothing["p"].mean())
    assert torch.equal(theta.offset["r"], before.offset["r"])


def test_far_travel_is_brought_back_into_the_trust_region() -> None:
    theta, origin = moved_theta(4.0)
    theta.project_(origin)
    travel = (theta.smoothing["p"] - origin.smoothing["p"]).abs()
    assert travel.max() == pytest.approx(SMOOTHING_REACH, abs=1e-6)
    assert theta.ratio["r"].min() >= math.log(0.4)
    assert theta.ratio["r"].max() <= 0
    assert theta.offset["r"].abs().max() == 0.5
    assert (theta.ratio["r"] == 0).any(), "full range is the end of the ratios"


def test_projection_leaves_the_origin_alone() -> None:
    theta, origin = moved_theta(4.0)
    untouched = origin.clone()
    theta.project_(origin)
    assert all(torch.equal(a, b) for a, b in zip(origin.tensors().values(), untouched.tensors().values(), strict=True))


# Persistence


@pytest.mark.parametrize("offsets", [False, True])
def test_theta_survives_the_disk_bit_for_bit(tiny: Callable[[str], Tiny], tmp_path: Path, offsets: bool) -> None:
    policy = tiny("qwen2").policy("W4A16-g128")
    theta = random_theta(policy, offsets=offsets)
    theta.save(tmp_path / "theta.safetensors")
    loaded = Theta.load(tmp_path / "theta.safetensors")
    for part in ("smoothing", "ratio", "offset"):
        before, after = getattr(theta, part), getattr(loaded, part)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert bool(loaded.offset) == offsets


@pytest.mark.parametrize("scheme", ["W4A8", "W3A8", "W8A8", "W4A16-g32-asym"])
def test_settled_codes_survive_the_disk_and_take_no_more_of_it_than_they_need(
    tiny: Callable[[str], Tiny], tmp_path: Path, scheme: str
) -> None:
    policy = tiny("qwen2").policy(scheme)
    theta = policy.settle(random_theta(policy, offsets=False))
    theta.save(tmp_path / "theta.safetensors")
    loaded = Theta.load(tmp_path / "theta.safetensors")
    before, after = theta.tensors(), loaded.tensors()
    assert before.keys() == after.keys()
    assert loaded.settled.keys() == theta.ratio.keys() != set()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    weights = sum(linear.levels.numel() for linear in theta.settled.values())
    scales = [tensor for linear in theta.settled.values() for tensor in (linear.ratio, linear.scale)]
    rest = sum(4 * tensor.numel() for tensor in (*theta.smoothing.values(), *scales))
    bytes_each = {"W4A8": 0.5, "W3A8": 0.5, "W8A8": 1, "W4A16-g32-asym": 2}[scheme]
    stored = (tmp_path / "theta.safetensors").stat().st_size
    assert weights * bytes_each + rest < stored < weights * bytes_each + rest + 2**14


def test_a_halved_byte_holds_two_codes_the_first_below(tmp_path: Path) -> None:
    levels = torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8)
    theta = Theta(linears={"layers.0.mlp.up_proj": Settled(torch.zeros(1, 1), levels, torch.ones(1, 1))})
    theta.save(tmp_path / "theta.safetensors")
    stored = load_file(tmp_path / "theta.safetensors")
    assert stored.keys() == {f"{part}/layers.0.mlp.up_proj" for part in ("ratio", "halved", "step")}
    assert stored["halved/layers.0.mlp.up_proj"].tolist() == [[0 + 16 * 15, 8 + 16 * 7]]


@pytest.mark.parametrize("level", [8, -9])
def test_a_level_that_four_bits_do_not_hold_keeps_its_byte(tmp_path: Path, level: int) -> None:
    levels = torch.tensor([[0, level, 7, -8]], dtype=torch.int8)
    theta = Theta(linears={"layers.0.mlp.up_proj": Settled(torch.zeros(1, 1), levels, torch.ones(1, 1))})
    theta.save(tmp_path / "theta.safetensors")
    assert "halved/layers.0.mlp.up_proj" not in load_file(tmp_path / "theta.safetensors")
    loaded = Theta.load(tmp_path / "theta.safetensors").settled["layers.0.mlp.up_proj"]
    assert torch.equal(loaded.levels, levels)


def test_clones_share_nothing(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("qwen2").policy()
    theta = random_theta(policy, offsets=True)
    copy, saved = theta.clone(), theta.clone()
    for parameter in theta.tensors().values():
        parameter.zero_()
    assert all(torch.equal(a, b) for a, b in zip(copy.tensors().values(), saved.tensors().values(), strict=True))


def test_clones_share_settled_codes_which_nothing_writes_to(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("qwen2").policy()
    settled = policy.settle(random_theta(policy))
    copy, before = settled.clone(), {key: linear.levels.clone() for key, linear in settled.settled.items()}
    assert all(copy.settled[key].levels is linear.levels for key, linear in settled.settled.items())
    for part in (copy.smoothing, copy.ratio):
        for tensor in part.values():
            tensor += 1
    copy.project_(settled)
    policy.freeze(copy)
    assert all(torch.equal(copy.settled[key].levels, levels) for key, levels in before.items())
    assert not any(torch.equal(copy.smoothing[key], u) for key, u in settled.smoothing.items())


# Live and frozen


@pytest.mark.parametrize(("scheme", "offsets"), in_turn(SCHEMES, [False, True]))
def test_live_and_frozen_q_give_the_same_bits(tiny: Callable[[str], Tiny], scheme: str, offsets: bool) -> None:
    checkpoint = tiny("qwen2.5-vl")
    policy = checkpoint.policy(scheme)
    prompts = checkpoint.encode(policy, 2)
    theta = random_theta(policy, offsets=offsets)
    dense = batch_logits(policy, prompts, "D")
    policy.attach(learnable(theta))
    live = batch_logits(policy, prompts, "Q")
    policy.freeze(theta)
    assert torch.equal(batch_logits(policy, prompts, "Q"), live)
    policy.freeze(theta, keep="floats")
    for _ in range(2):
        assert torch.equal(batch_logits(policy, prompts, "Q"), live)
    assert torch.equal(batch_logits(policy, prompts, "D"), dense), "D does not know about theta"
    assert (live - dense).abs().max() > 0.01


@pytest.mark.parametrize(
    ("family", "dtype"), in_turn(["qwen3-vl", "qwen2.5-omni", "llama"], [torch.bfloat16, torch.float64])
)
def test_live_and_frozen_agree_in_every_family_and_compute_dtype(
    tiny: Callable[[str], Tiny], family: str, dtype: torch.dtype
) -> None:
    checkpoint = tiny(family)
    policy = checkpoint.policy("W4A8", dtype)
    prompts = checkpoint.encode(policy, 2)
    theta = random_theta(policy)
    policy.attach(theta)
    live = batch_logits(policy, prompts, "Q")
    policy.freeze(theta)
    assert torch.equal(batch_logits(policy, prompts, "Q"), live)


@pytest.mark.parametrize("scheme", [*SCHEMES, "W8A16-asym"])
def test_settled_codes_stay_and_only_scales_move(tiny: Callable[[str], Tiny], scheme: str) -> None:
    checkpoint = tiny("qwen2.5-vl")
    policy = checkpoint.policy(scheme)
    prompts = checkpoint.encode(policy, 2)
    theta = random_theta(policy, offsets=True)
    policy.freeze(theta)
    before = batch_logits(policy, prompts, "Q")
    levels = {path: levels_of(piece) for path, piece in policy.folded() if path in theta.ratio}
    settled = policy.settle(theta)
    policy.freeze(settled)
    assert torch.equal(batch_logits(policy, prompts, "Q"), before), "settling changes nothing"

    generator = torch.Generator().manual_seed(1)
    for part in (settled.smoothing, settled.ratio):
        for moved in part.values():
            moved.add_(0.1 * torch.randn(moved.shape, generator=generator))
    policy.attach(learnable(settled))
    live = batch_logits(policy, prompts, "Q")
    policy.freeze(settled)
    assert torch.equal(batch_logits(policy, prompts, "Q"), live)
    assert (live - before).abs().max() > 0.01
    for path, piece in policy.folded():
        if path in levels:
            assert torch.equal(levels_of(piece), levels[path]), path


def levels_of(piece: Folded) -> Tensor:
    assert isinstance(piece, FoldedLinear)
    grouped = piece.codes.short().view(*piece.scale.shape, -1)
    return grouped if piece.zero is None else grouped - piece.zero[..., None]


CENTRED = ("W4A8", "W3A16", "W4A16-g128", "W4A16-asym", "W4A16-g128-asym", "W8A8")
STARTS = ("nearest", "offsets", "far")


def centring_start(policy: Policy, start: str) -> Theta:
    """Without offsets; with some inside their range; with some far beyond it, as compensated codes need them."""
    theta = random_theta(policy, offsets=start != "nearest")
    if start == "far":
        for offset in theta.offset.values():
            offset *= 4
    return theta


def positions(policy: Policy, theta: Theta, pieces: dict[str, FoldedLinear]) -> dict[str, np.ndarray]:
    """Where every weight lies among the codes, float64: W' / step + offset + zero."""
    found = {}
    for block in policy.structure.blocks:
        for name in LINEARS:
            path = block.path(name)
            out = log_scales_out(theta, block, name)
            weight = block.child(name).weight.double() * log_scales_in(theta, block, name).double().exp()  # type: ignore[operator, union-attr]
            weight = weight if out is None else weight / out.double().exp()[:, None]
            step, zero = pieces[path].scale.double(), pieces[path].zero
            grouped = weight.view(*step.shape, -1) / step[..., None] + (0 if zero is None else zero.double()[..., None])
            offset = theta.offset.get(path)
            found[path] = (grouped.view_as(weight) + (0 if offset is None else offset.double())).numpy()
    return found


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("scheme", CENTRED)
def test_centring_keeps_every_code_and_puts_its_weight_in_the_middle(
    tiny: Callable[[str], Tiny], scheme: str, start: str
) -> None:
    policy = tiny("qwen2.5-vl").policy(scheme)
    theta = centring_start(policy, start)
    given = theta.clone()
    before = deployed(policy, theta)
    centred = policy.centre(theta)
    after = deployed(policy, centred)
    assert all(torch.equal(tensor, given.tensors()[name]) for name, tensor in theta.tensors().items())
    assert all(torch.equal(u, centred.smoothing[key]) for key, u in theta.smoothing.items())
    assert all(torch.equal(ratio, centred.ratio[key]) for key, ratio in theta.ratio.items())
    assert before.keys() == after.keys() == centred.offset.keys()
    for path, piece in before.items():
        assert torch.equal(after[path].codes, piece.codes)
        assert torch.equal(after[path].scale, piece.scale)
        assert (piece.zero is None) == (after[path].zero is None) == policy.scheme.symmetric
        assert piece.zero is None or torch.equal(after[path].zero, piece.zero)  # type: ignore[arg-type]
    middle = positions(policy, centred, after)
    for path, place in positions(policy, theta, before).items():
        codes = before[path].codes.double().numpy()
        np.testing.assert_allclose(middle[path], codes, rtol=0, atol=1e-4)
        assert np.abs(place - codes).max() > 0.49, "the start has weights near the next code"


@pytest.mark.parametrize(("scheme", "start"), in_turn([scheme for scheme in CENTRED if scheme != "W8A8"], STARTS))
def test_a_small_change_of_scales_changes_no_centred_code(tiny: Callable[[str], Tiny], scheme: str, start: str) -> None:
    """A zero point that moves to the next integer takes its codes along, and only such groups may differ."""
    policy = tiny("qwen2.5-vl").policy(scheme)
    theta = centring_start(policy, start)
    changed = {}
    for name, one in (("as it came", theta), ("centred", policy.centre(theta))):
        before, moved = deployed(policy, one), one.clone()
        generator = torch.Generator().manual_seed(2)
        for part in (moved.smoothing, moved.ratio):
            for tensor in part.values():
                tensor += 0.003 * torch.randn(tensor.shape, generator=generator)
        after = deployed(policy, moved)
        codes = flips = 0
        for path, piece in after.items():
            flipped = (piece.codes != before[path].codes).view(*piece.scale.shape, -1)
            if piece.zero is not None:
                zero = before[path].zero
                assert zero is not None
                still = piece.zero == zero
                assert still.double().mean() > 0.9
                flipped = flipped[still]
            codes, flips = codes + flipped.numel(), flips + int(flipped.sum())
        changed[name] = flips / codes
    assert changed["centred"] == 0
    assert changed["as it came"] > 1e-3, "there were codes to change"


def test_weights_that_are_not_quantized_need_no_centre(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("qwen2.5-vl").policy("W16A8")
    assert not policy.centre(random_theta(policy)).offset


def test_the_gradient_of_a_settled_step_is_that_of_the_function_itself(tiny: Callable[[str], Tiny]) -> None:
    """No straight-through estimate is left in a weight-only scheme: finite differences agree."""
    checkpoint = tiny("qwen2.5-vl")
    policy = exact_policy(checkpoint, Scheme.parse("W3A16"))
    prompts = checkpoint.encode(policy, 1)
    theta = learnable(policy.settle(random_theta(policy, torch.float64)))
    theta.linears = {key: replace(linear, scale=linear.scale.double()) for key, linear in theta.settled.items()}
    policy.attach(theta)
    batch = PromptBatch.of(prompts)
    tokens = Tokens(batch.embeds, batch.positions, causal_mask(batch.real, 0), batch.deepstack)

    def value() -> Tensor:
        with policy.speaking("Q"):
            return policy.run(tokens).square().mean()

    value().backward()
    block = policy.structure.blocks[0]
    for parameter in (theta.ratio[block.path("gate_proj")], theta.smoothing[pair_key(block, "norm_qkv")]):
        assert parameter.grad is not None
        place = int(parameter.grad.abs().argmax())
        sides = []
        for change in (2e-3, -4e-3):
            with torch.no_grad():
                parameter.view(-1)[place] += change
                sides.append(float(value()))
        assert float(parameter.grad.view(-1)[place]) == pytest.approx((sides[0] - sides[1]) / 4e-3, rel=2e-3)


def test_settled_steps_travel_both_ways_within_their_range_and_no_mean_is_pinned(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("qwen2.5-vl").policy("W4A8")
    origin = policy.settle(random_theta(policy))
    moved = origin.clone()
    for part in (moved.smoothing, moved.ratio):
        for tensor in part.values():
            tensor.add_(0.3)
    kept = moved.clone()
    moved.project_(origin)
    assert all(torch.equal(tensor, kept.tensors()[name]) for name, tensor in moved.tensors().items())
    for ratio in moved.ratio.values():
        ratio.add_(9)
    moved.project_(origin)
    assert all(float(ratio.max()) == SETTLED_RANGE[1] for ratio in moved.ratio.values())


@pytest.mark.parametrize("scheme", ["W4A8", "W4A16-g128-asym"])
def test_what_folds_is_codes_and_steps_in_the_stored_dtype(tiny: Callable[[str], Tiny], scheme: str) -> None:
    checkpoint = tiny("qwen2.5-vl")
    policy = checkpoint.policy(scheme)
    theta = random_theta(policy)
    policy.freeze(theta)
    folded = dict(policy.folded())
    for block in policy.structure.blocks:
        for name in LINEARS:
            piece, weight = folded[block.path(name)], block.child(name).weight
            assert piece.codes.dtype == torch.int8  # type: ignore[union-attr]
            assert piece.scale.dtype == torch.bfloat16  # type: ignore[union-attr]
            assert (int(piece.codes.min()), int(piece.codes.max())) == (-8, 7)  # type: ignore[union-attr]
            out = log_scales_out(theta, block, name)
            expected = oracles.smoothed_weight(
                weight[:5].double().numpy(),  # type: ignore[index]
                log_scales_in(theta, block, name).double().numpy(),  # type: ignore[union-attr]
                None if out is None else out[:5].double().numpy(),
            )
            again = weight_codes(
                torch.from_numpy(expected).float(),
                theta.ratio[block.path(name)][:5],
                None,
                policy.scheme,
                torch.bfloat16,
            )
            assert (again[0] != piece.codes[:5]).double().mean() < 0.01  # type: ignore[union-attr]
        for name in NORMS:
            assert folded[block.path(name)].weight.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_without_ratios_and_smoothing_theta_is_plain_rounding(tiny: Callable[[str], Tiny]) -> None:
    checkpoint = tiny("qwen2.5-vl")
    policy = exact_policy(checkpoint, Scheme(4, 16))
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
    folded = dict(policy.folded())
    for block in policy.structure.blocks:
        for name in LINEARS:
            weight = block.child(name).weight.numpy()  # type: ignore[operator]
            step = oracles.row_scale(weight, np.ones((len(weight), 1)), 4)
            piece, rounded = folded[block.path(name)], oracles.rounding(weight, step, 4)
            clear = np.abs(rounded.residual) < 0.5 - 1e-5  # stored weights have few bits, so that exact ties occur
            assert clear.mean() > 0.99
            np.testing.assert_array_equal(piece.codes.numpy()[clear], rounded.code[clear])  # type: ignore[union-attr]
            np.testing.assert_allclose(piece.scale, step, rtol=1e-6)  # type: ignore[union-attr]


def test_a_scheme_names_its_groups_in_the_ratios(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("qwen2.5-vl").policy("W4A16-g128")
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    block = policy.structure.blocks[0]
    assert theta.ratio[block.path("down_proj")].shape == (256, 4)
    assert theta.ratio[block.path("q_proj")].shape == (256, 2)
    per_row = Theta.rtn(policy.structure.blocks, replace(policy.scheme, group_size=None))
    assert per_row.ratio[block.path("down_proj")].shape == (256, 1)
