"""Compare: one teacher-forced forward per model and trajectory says what a prefill of every state alone would say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import oracles
import pytest
import torch
from conftest import MULTIMODAL, Tiny, encode_one
from naive import (
    WEIGHT_ONLY,
    WITH_ACTIVATIONS,
    Scene,
    decoder_forwards,
    deployed_rounding,
    make_policy,
    next_logits,
    random_theta,
    scene,
    scenes,
    without_ties,
)

from onptq.bank import AGREE, MISMATCH, NEAR_MISS, States, Trajectory
from onptq.cycle import compare as comparison
from onptq.cycle.branch import branch
from onptq.cycle.calibrate import calibrate
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.risk import score, select
from onptq.data.manifest import load_manifest
from onptq.engine.prefixes import Prefixes
from onptq.quantizer.policy import Policy
from onptq.recipe import CalibrateConfig, RiskConfig, SelectConfig

LIMIT = 5
NUMBERS = ("margin_dense", "margin_quant", "js", "kl")


@pytest.fixture(autouse=True)
def _without_ties() -> Iterator[None]:
    with without_ties():
        yield


def prefixes_of(scenery: Scene, policy: Policy, batches: str = "several", budget: int | None = None) -> Prefixes:
    size = scenery.batch_tokens(batches, LIMIT)
    return Prefixes(policy, scenery.encoded(policy), max_tokens=LIMIT, batch_tokens=size, budget=budget)


def ragged(scenery: Scene) -> list[Trajectory]:
    """Rollouts of different lengths, so that the batch has to pad them."""
    return [scenery.rollout(ordinal, LIMIT - index % 3) for index, ordinal in enumerate(scenery.ordinals)]


def same_columns(one: States, other: States) -> None:
    for name in one.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@scenes((*MULTIMODAL, "llama"))
def test_every_state_is_compared_as_if_it_had_been_prefilled_alone(
    tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype
) -> None:
    scenery = scene(tiny(family), scheme, dtype)
    trajectories = ragged(scenery)
    visited = [
        (one.prompt, t, token, scenery.state(one.prompt, t))
        for one in trajectories
        for t, token in enumerate(one.tokens, start=1)
    ]
    for batches in ("several", "one"):
        states = compare(prefixes_of(scenery, scenery.policy, batches), trajectories)
        assert list(zip(states.prompt, states.t, states.token, strict=True)) == [row[:3] for row in visited]
        for name in ("reference", "competitor", "quantized"):
            assert getattr(states, name).tolist() == [getattr(state, name) for *_, state in visited], name
        for name in NUMBERS:
            expected = np.array([getattr(state, name) for *_, state in visited])
            np.testing.assert_allclose(getattr(states, name), expected, rtol=0, atol=1e-5, err_msg=name)
        erosion = np.array([max(0.0, state.margin_dense - state.margin_quant) for *_, state in visited])
        np.testing.assert_allclose(states.erosion, erosion, rtol=0, atol=2e-5)


@scenes(MULTIMODAL)
def test_kinds_follow_the_decisions(tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype) -> None:
    scenery = scene(tiny(family), scheme, dtype)
    states = compare(prefixes_of(scenery, scenery.policy), ragged(scenery))
    changed = states.quantized != states.reference
    np.testing.assert_array_equal(states.kind == MISMATCH, changed)
    np.testing.assert_array_equal(states.kind == NEAR_MISS, ~changed & (states.erosion > 0))
    np.testing.assert_array_equal(states.competitor[changed], states.quantized[changed])
    assert set(states.kind.tolist()) == {AGREE, NEAR_MISS, MISMATCH}, "the models are made to show all three"
    for column in (states.horizon, states.consequence, states.risk, states.critical, states.weight):
        assert not column.any(), "nothing is branched, scored or selected yet"


def test_rollouts_choose_what_compare_says_q_chooses(tiny: Callable[[str], Tiny]) -> None:
    scenery = scene(tiny("qwen3-vl"), *WEIGHT_ONLY)
    states = compare(prefixes_of(scenery, scenery.policy), ragged(scenery))
    np.testing.assert_array_equal(states.token, states.quantized)


def test_near_misses_up_to_the_tolerance_are_none(tiny: Callable[[str], Tiny]) -> None:
    scenery = scene(tiny("llama"), *WEIGHT_ONLY)
    literal = compare(prefixes_of(scenery, scenery.policy), ragged(scenery))
    tolerance = float(np.median(literal.erosion[literal.kind == NEAR_MISS]))
    tolerant = compare(prefixes_of(scenery, scenery.policy), ragged(scenery), near_miss_tol=tolerance)
    forgiven = (literal.kind == NEAR_MISS) & (literal.erosion <= tolerance)
    assert forgiven.any()
    assert (tolerant.kind == NEAR_MISS).any()
    np.testing.assert_array_equal(tolerant.kind, np.where(forgiven, AGREE, literal.kind))


def test_a_small_chunk_of_logits_at_a_time_gives_the_same_states(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenery = scene(tiny("qwen2.5-vl"), *WITH_ACTIVATIONS)
    at_once = compare(prefixes_of(scenery, scenery.policy), ragged(scenery))
    monkeypatch.setattr(comparison, "LOGIT_BYTES", 3 * 4 * 2 * scenery.policy.vocabulary)
    assert comparison.state_rows(scenery.policy.vocabulary) == 3
    in_chunks = compare(prefixes_of(scenery, scenery.policy), ragged(scenery))
    for name in ("prompt", "t", "reference", "competitor", "quantized", "kind"):
        np.testing.assert_array_equal(getattr(in_chunks, name), getattr(at_once, name))
    for name in NUMBERS:
        np.testing.assert_allclose(getattr(in_chunks, name), getattr(at_once, name), rtol=0, atol=1e-9)


def test_a_model_of_its_own_is_compared_by_its_own_embeddings_and_head(tiny: Callable[[str], Tiny]) -> None:
    """As checkpoints of other tools are: Q's embeddings and head may differ from D's."""
    checkpoint = tiny("llama")
    dense, other = (make_policy(checkpoint, "W4A16", torch.float64) for _ in "DQ")
    other.freeze(random_theta(other), keep="floats")
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in (other.structure.embedding, other.structure.head):
            scale = module.weight.std()
            module.weight.add_(0.2 * scale * torch.randn(module.weight.shape, generator=noise, dtype=torch.float64))
    prompts = {prompt.ordinal: checkpoint.processor(prompt) for prompt in load_manifest(checkpoint.manifest)[:3]}
    ours, theirs = (
        Prefixes(policy, [encode_one(policy, one, ordinal) for ordinal, one in prompts.items()], max_tokens=4)
        for policy in (dense, other)
    )
    trajectories = follow(theirs)
    states = compare(ours, trajectories, quantized=theirs)
    by_prompt = {one.prompt: one.tokens for one in trajectories}
    for row in range(len(states)):
        inputs, prefix = prompts[int(states.prompt[row])], by_prompt[int(states.prompt[row])][: states.t[row] - 1]
        z = next_logits(dense, "D", inputs, prefix), next_logits(other, "Q", inputs, prefix)
        reference, quantized = oracles.eq3_actions(*z)
        competitor = oracles.eq4_competitor(z[1], reference)
        assert (states.reference[row], states.quantized[row], states.competitor[row]) == (
            reference,
            quantized,
            competitor,
        )
        margins = [oracles.eq5_margin(logits, reference, competitor) for logits in z]
        np.testing.assert_allclose((states.margin_dense[row], states.margin_quant[row]), margins, rtol=0, atol=1e-5)
        assert states.kl[row] == pytest.approx(oracles.kl(*map(oracles.softmax, z)), abs=1e-6)


@pytest.mark.parametrize("batches", ["several", "one"])
def test_each_model_reads_each_trajectory_once(tiny: Callable[[str], Tiny], batches: str) -> None:
    """After Follow, Q's prompts are cached: what is left is D's prefill and one teacher-forced forward of each model."""
    scenery = scene(tiny("qwen2.5-vl"), *WEIGHT_ONLY)
    prefixes = prefixes_of(scenery, scenery.policy, batches)
    trajectories = follow(prefixes)
    with decoder_forwards(scenery.policy) as forwards:
        compare(prefixes, trajectories)
    widths = [batch.width for batch in prefixes.batches]
    per_batch = [[("D", width), ("D", LIMIT - 1), ("Q", LIMIT - 1)] for width in widths]
    assert sorted(forwards) == sorted(forward for batch in per_batch for forward in batch)


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_states_do_not_depend_on_which_prefixes_were_kept(tiny: Callable[[str], Tiny], share: float) -> None:
    """What is computed again is what was dropped, bit for bit, or a tie somewhere would break the other way."""
    scenery = scene(tiny("qwen2.5-omni"), "W4A8", torch.float32)
    with deployed_rounding():
        kept = prefixes_of(scenery, scenery.policy)
        trajectories = follow(kept)
        expected = compare(kept, trajectories)
        size = sum(kept.prompt(index, side).nbytes for index in range(len(kept.batches)) for side in ("D", "Q"))
        dropping = prefixes_of(scenery, scenery.policy, budget=int(share * size))
        assert follow(dropping) == trajectories
        same_columns(compare(dropping, trajectories), expected)


def test_the_deployed_rounding_differs_from_a_lone_prefill_only_where_its_ties_fall(
    tiny: Callable[[str], Tiny],
) -> None:
    """The real activation step, whose ties any change of summation order may break: most states must still be equal."""
    deployed = Scene(tiny("qwen2.5-vl"), *WITH_ACTIVATIONS, ordinals=(0, 4, 7))
    with deployed_rounding():
        states = compare(prefixes_of(deployed, deployed.policy), ragged(deployed))
        naive = [deployed.state(prompt, t) for prompt, t in zip(states.prompt, states.t, strict=True)]
    np.testing.assert_array_equal(states.reference, [state.reference for state in naive])
    np.testing.assert_allclose(states.js, [state.js for state in naive], rtol=0, atol=1e-2)
    equal = np.abs(states.margin_quant - [state.margin_quant for state in naive]) < 1e-9
    assert equal.mean() > 0.75


@pytest.mark.parametrize("family", MULTIMODAL)
def test_towers_run_once_per_prompt_for_the_whole_cycle(tiny: Callable[[str], Tiny], family: str) -> None:
    scenery = scene(tiny(family), "W4A8", torch.float32)
    policy = scenery.policy_with(())
    calls = {"image": 0, "audio": 0}
    towers = {"image": tower(policy, "visual"), "audio": tower(policy, "audio_tower")}
    for name, module in towers.items():
        if module is not None:
            module.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    prompts = scenery.encoded(policy)
    expected = {
        "image": sum("pixel_values" in one.tensors for one in scenery.inputs.values()),
        "audio": sum("input_features" in one.tensors for one in scenery.inputs.values()),
    }
    assert expected["image"] > 0
    assert (expected["audio"] > 0) == (family == "qwen2.5-omni")
    assert calls == expected
    prefixes = Prefixes(policy, prompts, max_tokens=LIMIT, batch_tokens=scenery.batch_tokens("several", LIMIT))
    trajectories = follow(prefixes)
    states = branch(prefixes, trajectories, compare(prefixes, trajectories), horizon=2)
    states = select(score(states, RiskConfig()), SelectConfig(budget=8))
    calibrate(policy, prompts, trajectories, states, scenery.theta, CalibrateConfig(epochs=1, hidden=1.0, pair=0.1))
    assert calls == expected


def tower(policy: Policy, name: str) -> torch.nn.Module | None:
    found = [module for path, module in policy.model.named_modules() if path.rsplit(".", 1)[-1] == name]
    assert len(found) <= 1
    return found[0] if found else None
