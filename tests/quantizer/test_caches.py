"""A KV cache of 8 bits: keys and values of Q rounded as compressed-tensors rounds them, in every cache and without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
import transformers
from conftest import Tiny
from naive import Scene, extended, make_policy, random_theta
from test_floats import codes_of
from test_policy import inputs_of, speak
from torch import Tensor

import onptq
from onptq.check.static import check_folder
from onptq.checkpoint.load import load_reader
from onptq.checkpoint.quantization import parse_quantization
from onptq.checkpoint.source import Source, open_checkpoint
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.methods.inputs import fit_scales, fitting_caches
from onptq.models.caching import ChangedCache, change_cached
from onptq.quantizer.caches import ROOM, QuantCache, check_cache
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import final_theta
from onptq.schemes import E4M3, Scheme

SCHEME = "W4A16+kv8"


def test_the_scheme_has_a_name_and_a_kind_without_it() -> None:
    for name, kind in (("W4A16-g128+kv8", "W4A16"), ("FP8+kv8", "FP8"), ("W4A8+kv8", "W4A8"), ("NVFP4+kv8", "NVFP4")):
        scheme = Scheme.parse(name)
        assert (str(scheme), scheme.kind) == (name, kind)
        assert Scheme.parse(str(scheme)) == scheme
        assert str(scheme.of_linears) == name.removesuffix("+kv8")
        assert not scheme.simulated
    assert Scheme.parse("fp8+KV8") == Scheme.parse("FP8+kv8")
    for wrong in ("W4A16+kv4", "W4A16+", "+kv8", "FP8+kv8+kv8"):
        with pytest.raises(OnPTQError, match="unknown scheme"):
            Scheme.parse(wrong)


def caches(policy: Policy) -> list[QuantCache]:
    return [module for module in policy.wrapped if isinstance(module, QuantCache)]


def with_caches(policy: Policy, seed: int = 0) -> Theta:
    theta = random_theta(policy, seed)
    random = torch.Generator().manual_seed(seed)
    theta.caches = {one.key: (torch.rand(2, generator=random) / 40 + 1e-3) for one in caches(policy)}
    return theta


def test_keys_and_values_are_rounded_by_the_definition_with_straight_through_gradients(
    tiny: Callable[[str], Tiny],
) -> None:
    """The oracle takes value by value in float64: the nearest code of x / scale, and beyond the last code nothing."""
    policy = make_policy(tiny("llama"), SCHEME, torch.float64)
    theta = with_caches(policy)
    policy.freeze(theta)
    module = caches(policy)[1]
    with policy.speaking("Q"):
        change = module._change()
    assert change is not None
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    key, value = x.clone().requires_grad_(), x.flip(2).clone().requires_grad_()
    scales = theta.caches[module.key].to(policy.storage).double().tolist()
    for given, out, scale in zip((key, value), change(key, value), scales, strict=True):
        wanted, inside = np.zeros(x.shape), np.zeros(x.shape)
        for place in np.ndindex(*x.shape):
            scaled = float(given[place].detach()) / scale
            wanted[place] = oracles.nearest_float(scaled, codes_of(E4M3)) * scale
            inside[place] = abs(scaled) <= E4M3.largest
        np.testing.assert_allclose(out.detach().numpy(), wanted, rtol=1e-12)
        grad = torch.autograd.grad(out.sum(), given)[0]
        np.testing.assert_array_equal(grad.numpy(), inside)
        assert 0 < inside.sum() < inside.size or scale > 0.01
    with policy.speaking("D"):
        assert module._change() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_live_frozen_settled_and_centred_are_one_policy_and_d_is_as_it_was(
    tiny: Callable[[str], Tiny], dtype: torch.dtype
) -> None:
    inputs, policy = inputs_of(tiny("qwen2.5-vl")), make_policy(tiny("qwen2.5-vl"), SCHEME, dtype)
    without = make_policy(tiny("qwen2.5-vl"), "W4A16", dtype)
    theta = with_caches(policy)
    policy.attach(theta)
    without.attach(theta)
    live, dense = speak(policy, "Q", inputs), speak(policy, "D", inputs)
    assert not torch.equal(live, speak(without, "Q", inputs))
    assert torch.equal(dense, speak(without, "D", inputs))
    policy.freeze(theta)
    assert torch.equal(speak(policy, "Q", inputs), live)
    for other in (policy.settle(theta), policy.centre(theta), theta.clone(), Theta.of_tensors(theta.tensors())):
        assert other.caches.keys() == theta.caches.keys()
        policy.attach(other)
        assert torch.equal(speak(policy, "Q", inputs), live)
    assert theta.freed().caches.keys() == theta.caches.keys()
    theta.caches = {}
    policy.attach(theta)
    assert torch.equal(speak(policy, "Q", inputs), speak(without, "Q", inputs)), "before scales are known"


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_every_cache_sees_what_one_pass_over_everything_sees(tiny: Callable[[str], Tiny], name: str) -> None:
    """Prefixes, responses and branches in caches, against transformers' own forward without any."""
    scenery = Scene(tiny(name), SCHEME, torch.float64, ordinals=(0, 2))
    policy = scenery.policy
    trajectories = [scenery.rollout(ordinal, 2) for ordinal in scenery.ordinals]
    prefixes = Prefixes(policy, scenery.encoded(policy), max_tokens=2)
    states = compare(prefixes, trajectories)
    for row in range(len(states)):
        expected = scenery.state(int(states.prompt[row]), int(states.t[row]))
        assert (states.reference[row], states.quantized[row]) == (expected.reference, expected.quantized)
        assert states.kl[row] == pytest.approx(expected.kl, abs=1e-6)
    found = branch(prefixes, trajectories, states, horizon=3, everywhere=True)
    fork = scenery.fork(int(states.prompt[0]), int(states.t[0]), 3)
    assert found.consequence[0] == pytest.approx(fork.consequence(3, ()), abs=1e-6)
    rolled = follow(prefixes)
    assert [one.tokens for one in rolled] == [one.tokens for one in trajectories]


def test_scales_fit_the_policy_s_own_responses(tiny: Callable[[str], Tiny]) -> None:
    policy = make_policy(tiny("qwen2.5-vl"), SCHEME, torch.float32)
    prompts, theta = tiny("qwen2.5-vl").encode(policy, 2), random_theta(policy)
    theta.caches = {}
    found = fitting_caches(policy, theta, prompts)
    assert list(found) == [one.key for one in caches(policy)]
    fit_scales(policy, theta, prompts)
    assert {key: scales.tolist() for key, scales in theta.caches.items()} == {k: v.tolist() for k, v in found.items()}
    seen: dict[int, list[float]] = {}

    def see(layer: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def change(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            largest = [float(key.abs().max()), float(value.abs().max())]
            seen[layer] = [max(pair) for pair in zip(largest, seen.get(layer, [0, 0]), strict=True)]
            return key, value

        return change

    plain = make_policy(tiny("qwen2.5-vl"), "W4A16", torch.float32)
    plain.freeze(theta)
    hooks = [change_cached(b.owner("o_proj"), partial(see, b.index)) for b in plain.structure.blocks]
    for ordinal in (0, 1):
        inputs = tiny("qwen2.5-vl").processor(onptq.load_manifest(tiny("qwen2.5-vl").manifest)[ordinal])
        with plain.speaking("Q"), torch.no_grad():
            plain.model(**inputs.tensors, use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer, largest in seen.items():
        for scale, value in zip(found[f"layers.{layer}"].tolist(), largest, strict=True):
            assert value <= 1.02 * scale * E4M3.largest / ROOM, "responses may only have larger ones"


def test_a_model_that_shares_keys_between_layers_is_refused(tiny: Callable[[str], Tiny]) -> None:
    policy = make_policy(tiny("llama"), "W4A16", torch.float32)
    policy.structure.decoder.config.num_kv_shared_layers = 2  # type: ignore[union-attr]
    check_cache(policy.structure, Scheme.parse("W4A16"))
    with pytest.raises(OnPTQError, match=r"W4A16\+kv8: 2 layers of LlamaModel read keys and values of other layers"):
        check_cache(policy.structure, Scheme.parse(SCHEME))


def test_a_changed_cache_is_otherwise_the_cache() -> None:
    cache = transformers.DynamicCache()
    changed = ChangedCache(cache, lambda key, value: (key + 1, value * 2))
    key = torch.ones(1, 1, 3, 2)
    assert changed.update(key, key, 0)[0].unique().tolist() == [2]
    assert changed.get_seq_length() == cache.get_seq_length() == 3
    assert ChangedCache(None, lambda key, value: (value, key)).update(key, key * 3, 0)[0].unique().tolist() == [3]


SHORT = {
    "scheme": SCHEME,
    "rounds": 1,
    "data.prompts": 3,
    "data.holdout": 1,
    "follow.max_tokens": 4,
    "init": "smoothquant",
    "calibrate.epochs": 1,
    "calibrate.batch": 2,
    "calibrate.keep": "last",
    "compute.device": "cpu",
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A8+kv8", "FP8+kv8"])
def test_transformers_reloads_exactly_what_was_calibrated_with_and_without_a_cache(
    tiny: Callable[[str], Tiny], scheme: str, tmp_path: Path
) -> None:
    one, out = tiny("qwen2.5-vl"), tmp_path / "out"
    recipe = Recipe.preset("default", SHORT | {"scheme": scheme})
    result = onptq.quantize(one.folder, out, calibration=one.manifest, recipe=recipe)
    assert result.summary["verification"]["max_abs_difference"] == 0.0
    assert result.summary["scheme"] == scheme
    assert all(check["passed"] for check in result.summary["verification"]["checks"] if check["name"] != "answers")
    stated = parse_quantization(open_checkpoint(str(out)).checkpoint.quantization)
    assert stated is not None
    assert str(stated.scheme) == scheme
    assert not [finding for finding in check_folder(out) if not finding.passed]

    inputs = extended(inputs_of(one), (5, 60, 200))
    assert "pixel_values" in inputs
    policy = make_policy(one, scheme, torch.float32)
    policy.freeze(Theta.load(final_theta(out, 1)))
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration
    loaded = model.from_pretrained(out, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode(), policy.speaking("Q"):
        expected = policy.model(**inputs, use_cache=False).logits
        assert torch.equal(loaded(**inputs, use_cache=False).logits, expected)
        cached = loaded(**inputs, use_cache=True)
        assert torch.equal(cached.logits, expected)
        ours = policy.model(**inputs, use_cache=True)
        assert torch.equal(ours.logits, expected)
        for theirs, mine in zip(cached.past_key_values.layers, ours.past_key_values.layers, strict=True):
            assert torch.equal(theirs.keys, mine.keys)
            assert torch.equal(theirs.values, mine.values)
        more = {"input_ids": inputs["input_ids"][:, -1:], "position_ids": torch.full((3, 1, 1), 7)}
        given = cached.past_key_values, ours.past_key_values
        next_theirs, next_ours = (
            m(**more, past_key_values=past).logits for m, past in zip((loaded, policy.model), given, strict=True)
        )
        assert torch.equal(next_theirs, next_ours)
    reader = load_reader(open_checkpoint(str(out)), torch.float32, torch.device("cpu"), ())
    answers = [
        [row.tokens for row in follow(Prefixes(speaker, one.encode(speaker, 3), max_tokens=4))]
        for speaker in (policy, reader)
    ]
    assert answers[0] == answers[1]


def test_other_models_in_the_checkpoint_are_refused_before_any_weight_is_read(
    tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    from onptq.checkpoint.exportable import check_cached

    source = tiny("qwen2.5-vl").source

    def beside(other: str) -> Source:
        return replace(source, family=replace(source.family, other_models=(other,)))

    check_cached(beside("talker."), Scheme.parse(SCHEME))
    name = next(iter(source.checkpoint.tensors)).split(".")[0] + "."
    with pytest.raises(OnPTQError, match="holds other models"):
        check_cached(beside(name), Scheme.parse(SCHEME))
    check_cached(beside(name), Scheme.parse("W4A16"))
