"""Gated delta nets: their states in caches, their foldable pairs, and what follows from a state that forgets no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import Tiny
from naive import Scene, decoder_forwards, random_theta, without_ties
from random_classes import write_class
from torch import Tensor

from onptq import methods
from onptq.checkpoint.source import find_source
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare
from onptq.engine import decoding
from onptq.engine.decoding import Decoding
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import rollouts
from onptq.models.processing import PromptProcessor
from onptq.plan.parts import VISION, find_parts
from onptq.quantizer.modules import QuantFollower
from onptq.quantizer.theta import log_scales_in
from onptq.schemes import Scheme

pytestmark = pytest.mark.skipif(not hasattr(transformers.Cache, "get_conv_state"), reason="its class is too old")

LIMIT, ORDINALS = 5, (0, 1, 2, 4, 7)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Three gated delta nets and an attention, with images and the tensors of a multi-token head."""
    folder = write_class("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))
    source = find_source(folder)
    return Tiny(folder, source, PromptProcessor.from_folder(folder, source.family, source.config))


@pytest.fixture(scope="module")
def scenery(hybrid: Tiny) -> Scene:
    return Scene(hybrid, "W4A16", torch.float32, ordinals=ORDINALS)


def prefixes_of(scenery: Scene, copies: int = 1) -> Prefixes:
    encoded = scenery.encoded(scenery.policy) * copies
    return Prefixes(scenery.policy, encoded, max_tokens=LIMIT, batch_tokens=scenery.batch_tokens("one", LIMIT))


@pytest.mark.parametrize("replays", [False, True])
def test_rollouts_of_prompts_of_unequal_lengths_are_the_naive_ones(
    scenery: Scene, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the cache of a recorded step, where there is nothing to record with; and once more from what was kept."""
    monkeypatch.setattr(decoding, "replays", lambda policy, limit: replays)
    prefixes = prefixes_of(scenery)
    assert len({scenery.inputs[ordinal].length for ordinal in ORDINALS}) > 2
    expected = [scenery.rollout(ordinal, LIMIT) for ordinal in ORDINALS]
    assert rollouts(prefixes, "Q") == expected
    assert rollouts(prefixes, "Q") == expected


def test_prompts_of_one_length_alone_go_through_the_blocks_together(scenery: Scene) -> None:
    """They share a batch with others, and padding would change their states."""
    encoded = scenery.encoded(scenery.policy)
    prefixes = Prefixes(scenery.policy, encoded[:1] + encoded, max_tokens=LIMIT, batch_tokens=10**6)
    assert prefixes.batches.sizes == [len(ORDINALS) + 1]
    with decoder_forwards(scenery.policy) as forwards:
        prefix = prefixes.prompt(0, "D")
    lengths = {one.length for one in encoded}
    assert sorted(width for _, width in forwards) == sorted(lengths)
    for row, prompt in enumerate(prefixes.batches[0].prompts):
        alone = Prefixes(scenery.policy, [prompt], max_tokens=LIMIT).prompt(0, "D")
        for layer, state in alone.cache.recurrent.items():
            assert torch.allclose(prefix.cache.recurrent[layer][row], state[0], atol=1e-5)


def test_a_recorded_step_would_find_the_states_where_they_were(scenery: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "replays", lambda policy, limit: True)
    prefixes = prefixes_of(scenery)
    with torch.no_grad(), scenery.policy.speaking("Q"):
        prefix = prefixes.prompt(0, "Q")
        steps = Decoding(scenery.policy, prefixes.batches[0], prefix, LIMIT)

        def states() -> list[Tensor]:
            return [*prefix.cache.conv.values(), *prefix.cache.recurrent.values()]

        places, before = [tensor.data_ptr() for tensor in states()], [tensor.clone() for tensor in states()]
        for _ in range(2):
            steps.step()
        assert [tensor.data_ptr() for tensor in states()] == places
        assert not any(torch.equal(now, then) for now, then in zip(states(), before, strict=True))
        prefix = prefixes.prompt(0, "Q")
        assert all(torch.equal(now, then) for now, then in zip(states(), before, strict=True)), (
            "back at the prompt's end"
        )


@pytest.mark.slow
def test_every_fork_is_the_naive_one_and_leaves_nothing_behind(scenery: Scene) -> None:
    with without_ties():
        prefixes = prefixes_of(scenery)
        trajectories = [scenery.rollout(ordinal, LIMIT) for ordinal in ORDINALS]
        states = compare(prefixes, trajectories)
        found = branch(prefixes, trajectories, states, horizon=3, everywhere=True)
        for row in np.linspace(0, len(states) - 1, 5).round().astype(int):
            fork = scenery.fork(int(states.prompt[row]), int(states.t[row]), 3)
            assert found.consequence[row] == pytest.approx(fork.consequence(3, ()), abs=1e-5)
        again = compare(prefixes, trajectories)
        np.testing.assert_array_equal(again.kl, states.kl)


def test_the_gated_norm_and_what_follows_the_input_norm_fold(hybrid: Tiny) -> None:
    """In float64 the folded block is weight times s in every column that reads the norm, and the gain over s."""
    policy = hybrid.policy("W4A8")
    assert policy.unfolded == ()
    theta = random_theta(policy)
    policy.freeze(theta)
    folded, block = dict(policy.folded()), policy.structure.blocks[0]
    u = theta.smoothing["layers.0.norm_qkv"].double().exp()
    for name in ("in_proj_a", "in_proj_b"):
        follower = block.child(f"linear_attn.{name}")
        assert isinstance(follower, QuantFollower)
        expected = follower.weight.double() * u
        assert torch.allclose(folded[f"layers.0.linear_attn.{name}"].weight.double(), expected, rtol=2**-8)  # type: ignore[union-attr]
    shared = theta.smoothing["layers.0.v_o"]
    assert len(shared) == block.head_dim < block.child("out_proj").in_features  # type: ignore[operator]
    repeated = log_scales_in(theta, block, "out_proj")
    assert repeated is not None
    assert torch.equal(repeated, shared.repeat(block.heads))
    gain = block.module.get_parameter("linear_attn.norm.inner.weight").double() / shared.double().exp()
    assert torch.allclose(folded["layers.0.linear_attn.norm"].weight.double(), gain, rtol=2**-8)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awq", "gptq", "masquant", "mbq", "search"])
def test_every_method_fits_both_kinds_of_layers(hybrid: Tiny, method: str) -> None:
    policy = hybrid.policy("W4A8")
    theta = methods.run(method, policy, hybrid.encode(policy, 2), lambda blocks: None)
    moved = {key for key, u in theta.smoothing.items() if bool(u.any())}
    assert method == "gptq" or {"layers.0.norm_qkv", "layers.3.norm_qkv"} <= moved
    policy.freeze(theta)


def test_the_plan_counts_keys_where_there_are_keys_and_states_elsewhere(hybrid: Tiny) -> None:
    parts = find_parts(hybrid.source, Scheme.parse("W4A8"))
    shapes = parts.shapes
    assert (shapes.layers, shapes.attending, shapes.query, shapes.kv) == (4, 1, 64, 32)
    assert shapes.recurrent == 3 * (4 * 16 * 16 + 128 * 4)
    assert not parts.unmatched
    policy = hybrid.policy("W4A8")
    cache = Prefixes(policy, hybrid.encode(policy, 1), max_tokens=1).prompt(0, "D").cache
    assert cache.states_nbytes == 2 * 4 * shapes.recurrent, "as they are, and as they were at the prompt's end"
    assert next(part for part in parts.parts if part.name == VISION)


def test_what_the_class_does_not_load_is_copied(hybrid: Tiny, tmp_path: Path) -> None:
    from random_classes import CLASSES
    from safetensors.torch import load_file

    import onptq
    from onptq.recipe import Recipe

    recipe = Recipe.preset("default", {"scheme": "W4A16", "method": "rtn"})
    onptq.quantize(hybrid.folder, tmp_path / "out", recipe=recipe, verify=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (hybrid.folder, tmp_path / "out"))
    for name in CLASSES["qwen3_5"].others:
        assert torch.equal(before[name], after[name])
    dense = {name.rpartition(".")[0] for name in after if name.endswith("in_proj_a.weight")}
    assert len(dense) == 3
