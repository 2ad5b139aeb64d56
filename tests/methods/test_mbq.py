"""MBQ against its own formulas: sensitivities of the plain checkpoint, and the weighted grid search one sequence at a time."""

from __future__ import annotations

import naive
import numpy as np
import pytest
import torch
from conftest import MULTIMODAL
from method_models import check_contract
from naive_search import make_policy, plain_units, short_answers

from onptq.bank import Trajectory
from onptq.errors import OnPTQError
from onptq.methods.layerwise import INSTRUCTION, answer_prompts, open_streams
from onptq.methods.linears import quantized_linears, replaced
from onptq.methods.mbq import GRADIENTS_AT, balanced_search, mbq, modality_ratios
from onptq.models.family import AUDIO, IMAGE, TEXT
from onptq.models.structure import PAIRS, find_structure
from onptq.quantizer.theta import pair_key

KINDS = (TEXT, IMAGE, AUDIO)


def kinds_of(prompt, response):
    """Kind of every token, by hand."""
    prompt_kinds = [INSTRUCTION if kind == TEXT else kind for kind in prompt.modality.tolist()]
    return np.array([*prompt_kinds, *(TEXT for _ in response.tokens)])


def naive_ratios(tiny, prompts, responses):
    """Gradients of transformers' own loss at every o_proj and down_proj, averaged token by token."""

    model = tiny.model(torch.float64).eval().requires_grad_(True)
    blocks = find_structure(model).blocks
    means: dict[tuple[str, int, int], list[float]] = {}
    for prompt, response in zip(prompts, responses, strict=True):
        outs: dict[tuple[str, int], torch.Tensor] = {}
        hooks = [
            block.child(name).register_forward_hook(
                lambda module, args, out, key=(name, block.index), outs=outs: outs.update({key: out})
            )
            for block in blocks
            for name in ("o_proj", "down_proj")
        ]
        for module in model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None  # type: ignore[assignment]
        logits = model(**naive.extended(tiny.inputs(prompt.ordinal), response.tokens)).logits[0]
        for hook in hooks:
            hook.remove()
        chances = logits.log_softmax(-1)
        loss = torch.zeros((), dtype=torch.float64)
        for t, token in enumerate(response.tokens):
            loss = loss - chances[prompt.length + t - 1, token] / len(response.tokens)
        kinds = kinds_of(prompt, response)
        for key, grad in zip(outs, torch.autograd.grad(loss, list(outs.values())), strict=True):
            sizes = grad[0].abs().mean(-1).numpy()
            for kind in KINDS:
                if (kinds == kind).any():
                    means.setdefault((*key, kind), []).append(sizes[kinds == kind].mean())
    ratios = {}
    for name in ("o_proj", "down_proj"):
        for kind in KINDS:
            if (name, 0, kind) not in means:
                continue
            actual = [np.mean(means[name, b.index, kind]) / np.mean(means[name, b.index, TEXT]) for b in blocks]
            ratios[name, kind] = np.maximum(actual, np.median(actual))
    return ratios


@pytest.mark.parametrize("family", MULTIMODAL)
def test_ratios_are_the_plain_models_gradients_floored_at_their_median(tiny, family):
    t = tiny(family)
    policy = make_policy(t, "W4A8", torch.float64)
    prompts = t.encode(policy, 4)
    responses = short_answers(policy, prompts)
    actual = modality_ratios(policy, answer_prompts(policy, prompts, responses))
    expected = naive_ratios(t, prompts, responses)
    assert {kind for _, kind in expected} == ({TEXT, IMAGE, AUDIO} if family == "qwen2.5-omni" else {TEXT, IMAGE})
    for (name, kind), ratio in expected.items():
        np.testing.assert_allclose(actual[name][:, kind], ratio, rtol=1e-4)
    assert not torch.allclose(actual["o_proj"][:, IMAGE], actual["down_proj"][:, IMAGE])


@pytest.fixture(scope="module")
def case(tiny):
    t = tiny("qwen2.5-omni")
    policy = make_policy(t, "W4A8")
    prompts = t.encode(policy, 4)
    responses = short_answers(policy, prompts)
    return policy, prompts, responses, plain_units(t, responses)


@pytest.mark.parametrize("rho", [(1.0, 1.0, 1.0), (1.0, 0.1, 4.0)], ids=["equal", "unequal"])
@pytest.mark.slow
def test_errors_count_by_their_size_not_by_its_square(tiny, rho):
    t = tiny("qwen2.5-omni")
    policy = make_policy(t, "W3A16")
    prompts = t.encode(policy, 4)
    responses = short_answers(policy, prompts)
    ratios = {name: torch.tensor(rho).expand(policy.blocks, 3) for name in ("o_proj", "down_proj")}
    theta = balanced_search(policy, answer_prompts(policy, prompts, responses), ratios)
    kinds = [kinds_of(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    weights = [np.where(kind == INSTRUCTION, 0.0, np.array(rho)[kind.clip(0)]) for kind in kinds]
    apart = 0
    for (index, pair), unit in plain_units(t, responses).items():
        candidates = unit.candidates()
        errors, squares = ([unit.error(u, policy.scheme, weights, power) for u in candidates] for power in (1, 2))
        u = theta.smoothing[pair_key(policy.structure.blocks[index], pair)].double().numpy()
        chosen = int(np.argmin([np.abs(u - other).max() for other in candidates]))
        assert errors[chosen] <= min(errors) * (1 + 2e-4), (index, pair)
        apart += errors[int(np.argmin(squares))] > min(errors) * (1 + 1e-3)
    assert apart, "somewhere squares choose another candidate"


@pytest.mark.parametrize("rho", [(1.0, 1.0, 1.0), (1.0, 0.1, 4.0)], ids=["equal", "unequal"])
@pytest.mark.slow
def test_the_search_takes_the_least_weighted_error_of_its_grid(case, rho):
    """With equal ratios this is the plain search: mean absolute error over response, images and audio."""
    policy, prompts, responses, units = case
    answered = answer_prompts(policy, prompts, responses)
    ratios = {name: torch.tensor(rho).expand(policy.blocks, 3) for name in ("o_proj", "down_proj")}
    theta = balanced_search(policy, answered, ratios)
    kinds = [kinds_of(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    weights = [np.where(kind == INSTRUCTION, 0.0, np.array(rho)[kind.clip(0)]) for kind in kinds]
    for (index, pair), unit in units.items():
        candidates = unit.candidates()
        errors = [unit.error(u, policy.scheme, weights) for u in candidates]
        u = theta.smoothing[pair_key(policy.structure.blocks[index], pair)].double().numpy()
        distances = [np.abs(u - other).max() for other in candidates]
        chosen = int(np.argmin(distances))
        assert distances[chosen] < 1e-4, "one of AWQ's candidates"
        assert errors[chosen] <= min(errors) * (1 + 2e-4), (index, pair)
        assert errors[chosen] <= errors[0] * (1 + 2e-4), "never worse than plain rounding"
        assert max(errors) > min(errors) * (1 + 1e-2), "candidates differ by more than the tolerance"


@pytest.mark.slow
def test_each_pair_uses_the_gradients_of_its_own_half_of_the_block(case):
    policy, prompts, responses, _ = case
    answered = answer_prompts(policy, prompts, responses)
    text, image = torch.tensor([[1.0, 0.0, 0.0]] * 2), torch.tensor([[0.0, 1.0, 0.0]] * 2)
    only_text, only_image, split = (
        balanced_search(policy, answered, {"o_proj": o, "down_proj": down})
        for o, down in ((text, text), (image, image), (text, image))
    )
    assert any(not torch.equal(only_text.smoothing[key], only_image.smoothing[key]) for key in only_text.smoothing), (
        "the weights matter"
    )
    for block in policy.structure.blocks:
        for pair in PAIRS:
            key = pair_key(block, pair)
            expected = only_text if GRADIENTS_AT[pair] == "o_proj" else only_image
            assert torch.equal(split.smoothing[key], expected.smoothing[key])


@pytest.mark.slow
def test_only_the_proportion_of_the_weights_matters(case):
    policy, prompts, responses, _ = case
    answered = answer_prompts(policy, prompts, responses)
    rho = torch.tensor([[1.0, 0.25, 2.0]] * 2)
    one, other = (
        balanced_search(policy, answered, {"o_proj": factor * rho, "down_proj": factor * rho}) for factor in (1, 4)
    )
    assert all(torch.equal(one.smoothing[key], other.smoothing[key]) for key in one.smoothing)


@pytest.mark.slow
@pytest.mark.parametrize("family", MULTIMODAL)
def test_every_family_gives_the_same_theta_twice_and_keeps_its_policy(tiny, family):
    def method(policy, prompts, advance):
        return mbq(policy, prompts, advance)

    _, theta = check_contract(tiny(family), "W4A8", method)
    assert any(u.any() for u in theta.smoothing.values())
    assert all(not ratio.any() for ratio in theta.ratio.values())
    assert not theta.offset


@pytest.mark.slow
def test_the_dense_models_own_responses_are_the_default(case):
    policy, prompts, _, _ = case
    own = mbq(policy, prompts, responses=short_answers(policy, prompts, 64))
    assert all(
        torch.equal(a, b) for a, b in zip(mbq(policy, prompts).tensors().values(), own.tensors().values(), strict=True)
    )


def test_simulated_linears_are_what_folding_makes_of_them(tiny):
    t = tiny("qwen3-vl")
    policy = make_policy(t, "W4A16")
    theta = naive.random_theta(policy)  # its ratios keep weights off the ties between two codes
    block = policy.structure.blocks[0]
    (stream,) = open_streams(policy, t.encode(policy, 3))
    policy.freeze(theta)
    with torch.no_grad():
        with policy.speaking("Q"):
            expected = stream.run(block)
        with policy.speaking("D"), replaced(block, quantized_linears(policy, theta, block, PAIRS)):
            actual = stream.run(block)
        with policy.speaking("D"):
            dense = stream.run(block)
    torch.testing.assert_close(actual[stream.real], expected[stream.real], rtol=1e-4, atol=1e-4)
    assert (actual - dense)[stream.real].abs().max() > 1e-2


def test_responses_must_be_there_and_must_carry_a_gradient(case):
    policy, prompts, responses, _ = case
    with pytest.raises(OnPTQError, match=f"prompt {prompts[-1].ordinal} has no response"):
        mbq(policy, prompts, responses=responses[:-1])
    with pytest.raises(OnPTQError, match="two or more tokens"):
        mbq(policy, prompts, responses=[Trajectory(prompt.ordinal, (5,), False) for prompt in prompts])
