"""Encoding: the decoder's door. What passes it once is all that D, Q, branches and updates need of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, MULTIMODAL, Tiny
from naive import extended, forward
from torch import Tensor

from onptq.cycle.prefixes import causal_mask
from onptq.data.manifest import load_manifest
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.processing import ModelInputs
from onptq.policy import Policy

RESPONSE = (5, 60, 200, 7)
COUNT = 8  # prompts with one picture, with two, with a sound, with both, and with neither


def all_inputs(tiny: Tiny) -> list[ModelInputs]:
    return [tiny.processor(prompt) for prompt in load_manifest(tiny.manifest)[:COUNT]]


def encode(policy: Policy, inputs: ModelInputs, ordinal: int = 0) -> EncodedPrompt:
    return policy.encode(inputs.tensors, inputs.modality, ordinal)


def with_response(policy: Policy, prompt: EncodedPrompt) -> EncodedPrompt:
    ids = torch.tensor(RESPONSE)
    return prompt.extended(ids, policy.embed(ids))


@torch.no_grad()
def decode(policy: Policy, batch: PromptBatch) -> Tensor:
    """D's residual stream [B, P, d] from nothing but what was encoded."""
    tokens = Tokens(batch.embeds, batch.positions, causal_mask(batch.real, 0), batch.deepstack)
    with policy.speaking("D"):
        return policy.run(tokens)


def assert_same(one: EncodedPrompt, other: EncodedPrompt) -> None:
    for name in ("ids", "embeds", "positions", "modality", "deepstack", "deepstack_at"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or torch.equal(mine, theirs), name


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoded_prompt_gives_the_logits_of_transformers_own_forward(
    tiny: Callable[[str], Tiny], family: str
) -> None:
    policy = tiny(family).policy("W4A16")
    for inputs in all_inputs(tiny(family)):
        prompt = with_response(policy, encode(policy, inputs))
        ours = policy.logits(decode(policy, PromptBatch.of([prompt])))[0, inputs.length - 1 :]
        torch.testing.assert_close(ours, forward(policy, "D", inputs, RESPONSE), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_response_positions_are_those_transformers_derives_from_the_whole_sequence(
    tiny: Callable[[str], Tiny], family: str
) -> None:
    policy = tiny(family).policy("W4A16")
    for inputs in all_inputs(tiny(family)):
        prompt = with_response(policy, encode(policy, inputs))
        modality = torch.cat((inputs.modality, torch.zeros(len(RESPONSE), dtype=inputs.modality.dtype)))
        whole = policy.encode(extended(inputs, RESPONSE), modality)
        assert_same(prompt, whole)
        batch = PromptBatch.of([encode(policy, inputs)])
        assert torch.equal(batch.response_positions(len(RESPONSE))[:, 0], whole.positions[:, inputs.length :])
        assert whole.positions.shape[0] == (3 if family in MULTIMODAL else 1)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_pictures_occupy_fewer_positions_than_tokens(tiny: Callable[[str], Tiny], family: str) -> None:
    """Under M-RoPE a picture is as long as its longer side, so positions that merely count tokens would be wrong."""
    policy = tiny(family).policy("W4A16")
    seen = {
        encode(policy, inputs).next_position < inputs.length for inputs in all_inputs(tiny(family)) if _sees(inputs)
    }
    assert seen == {True}
    blind = next(inputs for inputs in all_inputs(tiny(family)) if not inputs.modality.any())
    assert torch.equal(encode(policy, blind).positions, torch.arange(blind.length).expand(3, -1))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_tokens_are_embedded_and_placeholders_replaced(tiny: Callable[[str], Tiny], family: str) -> None:
    policy = tiny(family).policy("W4A16")
    for inputs in all_inputs(tiny(family)):
        prompt = encode(policy, inputs)
        plain = (prompt.embeds == policy.embed(prompt.ids)).all(-1)
        assert torch.equal(plain, prompt.modality == 0)
        assert torch.equal(prompt.ids, inputs.input_ids[0])


@pytest.mark.parametrize("family", MULTIMODAL)
def test_deepstack_features_lie_on_the_picture_and_matter(tiny: Callable[[str], Tiny], family: str) -> None:
    policy = tiny(family).policy("W4A16")
    for inputs in all_inputs(tiny(family)):
        prompt = encode(policy, inputs)
        if family != "qwen3-vl" or not _sees(inputs):
            assert prompt.deepstack is None
            continue
        assert prompt.deepstack is not None
        assert torch.equal(prompt.deepstack_at, (inputs.modality == 1).nonzero()[:, 0])
        assert prompt.deepstack.shape[1:] == (int((inputs.modality == 1).sum()), prompt.embeds.shape[1])
        without = replace(prompt, deepstack=None, deepstack_at=None)
        full, bare = (decode(policy, PromptBatch.of([one]))[0, -1] for one in (prompt, without))
        assert (full - bare).abs().max() > 1e-3


# --- nothing leaks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MULTIMODAL)
def test_a_prompt_is_encoded_the_same_whatever_was_encoded_before_it(tiny: Callable[[str], Tiny], family: str) -> None:
    inputs = all_inputs(tiny(family))
    policy = tiny(family).policy("W4A16")
    in_order = [encode(policy, one) for one in inputs]
    backwards = [encode(policy, one) for one in reversed(inputs)][::-1]
    for one, other in zip(in_order, backwards, strict=True):
        assert_same(one, other)
    for index in (0, COUNT - 1):  # a picture, and text alone
        assert_same(in_order[index], encode(tiny(family).policy("W4A16"), inputs[index]))


@pytest.mark.parametrize("family", MULTIMODAL)
def test_encoding_does_not_see_what_the_model_remembers_of_a_generation(
    tiny: Callable[[str], Tiny], family: str
) -> None:
    picture, *_, text = all_inputs(tiny(family))
    policy = tiny(family).policy("W4A16")
    expected = encode(policy, text)
    with torch.no_grad():
        policy.model(**picture.tensors, use_cache=True)  # as `generate` begins: the rope offset stays in the model
    assert_same(encode(policy, text), expected)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_encoding_leaves_no_trace_in_the_model(tiny: Callable[[str], Tiny], family: str) -> None:
    picture, *_, text = all_inputs(tiny(family))
    policy, fresh = tiny(family).policy("W4A16"), tiny(family).policy("W4A16")
    encode(policy, picture)
    assert torch.equal(forward(policy, "D", text), forward(fresh, "D", text))
    broken = {name: tensor for name, tensor in picture.tensors.items() if name != "image_grid_thw"}
    with pytest.raises(Exception, match=r".+"):
        policy.encode(broken, picture.modality)
    assert torch.equal(forward(policy, "D", text), forward(fresh, "D", text))


@pytest.mark.parametrize("family", MULTIMODAL)
def test_encoding_is_d_s_business_even_while_q_speaks(tiny: Callable[[str], Tiny], family: str) -> None:
    policy, inputs = tiny(family).policy("W4A8"), all_inputs(tiny(family))[0]
    with policy.speaking("Q"):  # Q has no theta and would refuse
        prompt = encode(policy, inputs)
        assert policy.switch.quantized
    assert_same(prompt, encode(policy, inputs))


# --- side by side -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(tiny: Callable[[str], Tiny], family: str) -> None:
    policy = tiny(family).policy("W4A16")
    prompts = [with_response(policy, encode(policy, inputs)) for inputs in all_inputs(tiny(family))]
    batch = PromptBatch.of(prompts)
    assert not batch.real.all()
    together = decode(policy, batch)
    for row, prompt in enumerate(prompts):
        alone = decode(policy, PromptBatch.of([prompt]))[0]
        torch.testing.assert_close(together[row, : prompt.length], alone, rtol=0, atol=2e-5)
        assert int(batch.next_position[row]) == prompt.next_position


@pytest.mark.parametrize("family", MULTIMODAL)
def test_what_stands_in_the_padding_is_never_read(tiny: Callable[[str], Tiny], family: str) -> None:
    policy = tiny(family).policy("W4A16")
    batch = PromptBatch.of([encode(policy, inputs) for inputs in all_inputs(tiny(family))])
    clean, padding = decode(policy, batch), ~batch.real
    noise = torch.randn(batch.embeds.shape, generator=torch.Generator().manual_seed(0))
    dirty = replace(
        batch,
        embeds=torch.where(padding[..., None], 50 * noise, batch.embeds),
        positions=torch.where(padding, 1000, batch.positions),
        deepstack=tuple(torch.where(padding[..., None], noise, level) for level in batch.deepstack),
    )
    found = decode(policy, dirty)
    assert torch.equal(found[batch.real], clean[batch.real])
    assert not torch.equal(found[padding], clean[padding])


def _sees(inputs: ModelInputs) -> bool:
    return bool((inputs.modality == 1).any())
