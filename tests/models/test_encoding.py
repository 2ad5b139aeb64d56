"""Encoding: the decoder's door. What passes it once is all that D, Q, branches and updates need of a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import MULTIMODAL, Tiny, encode_one
from naive import extended, forward
from torch import Tensor

from onptq.data.manifest import load_manifest
from onptq.data.prompts import Prompt
from onptq.engine.prefixes import whole_prompts
from onptq.errors import OnPTQError
from onptq.models.encoding import CHUNK_PROMPTS, CHUNK_ROWS, EncodedPrompt, PromptBatch, _chunks, encode
from onptq.models.processing import ModelInputs
from onptq.models.windows import windows_at_once
from onptq.quantizer.policy import Policy

RESPONSE = (5, 60, 200, 7)
FAMILIES = (*MULTIMODAL, "qwen3")  # models of text alone are encoded alike
COUNT = 8  # prompts with one image, with two, with audio, with both, and with neither


def all_inputs(tiny: Tiny) -> list[ModelInputs]:
    return [tiny.inputs(ordinal) for ordinal in range(COUNT)]


def crowded(prompts: Sequence[Prompt]) -> Prompt:
    """A prompt of three images, and of two audio clips where the others have any."""
    images = [image for prompt in prompts for image in prompt.images][:3]
    audios = [audio for prompt in prompts for audio in prompt.audios][:2]
    parts = [{"type": "image"}, {"type": "text", "text": "then"}, *[{"type": "audio"}] * len(audios)]
    content = [*parts, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "which one?"}]
    return replace(
        prompts[0], messages=({"role": "user", "content": content},), images=tuple(images), audios=tuple(audios)
    )


def with_response(policy: Policy, prompt: EncodedPrompt) -> EncodedPrompt:
    ids = torch.tensor(RESPONSE)
    return prompt.extended(ids, policy.embed(ids))


@torch.no_grad()
def decode(policy: Policy, batch: PromptBatch, *, masked: bool = True) -> Tensor:
    """D's residual stream [B, P, d] from nothing but what was encoded; without a mask as a GPU runs it."""
    tokens = whole_prompts(batch)
    with policy.speaking("D"):
        return policy.run(tokens if masked else replace(tokens, mask=None))


def assert_same(one: EncodedPrompt, other: EncodedPrompt, tolerance: float = 0.0) -> None:
    """Ids, positions and places are the same; features within a share `tolerance` of the largest."""
    for name in ("ids", "embeds", "positions", "modality", "deepstack", "deepstack_at"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            allowed = tolerance * float(theirs.abs().max()) if theirs.is_floating_point() else 0.0
            torch.testing.assert_close(mine, theirs, rtol=0, atol=allowed, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoded_prompt_gives_the_logits_of_transformers_own_forward(
    tiny: Callable[[str], Tiny], family: str
) -> None:
    policy = tiny(family).policy("W4A16")
    for inputs in all_inputs(tiny(family)):
        prompt = with_response(policy, encode_one(policy, inputs))
        ours = policy.logits(decode(policy, PromptBatch.of([prompt])))[0, inputs.length - 1 :]
        torch.testing.assert_close(ours, forward(policy, "D", inputs, RESPONSE), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_response_positions_are_those_transformers_derives_from_the_whole_sequence(
    tiny: Callable[[str], Tiny], family: str
) -> None:
    policy = tiny(family).policy("W4A16")
    for inputs in all_inputs(tiny(family)):
        prompt = with_response(policy, encode_one(policy, inputs))
        modality = torch.cat((inputs.modality, torch.zeros(len(RESPONSE), dtype=inputs.modality.dtype)))
        whole = encode_one(policy, ModelInputs(extended(inputs, RESPONSE), modality))
        assert_same(prompt, whole)
        batch = PromptBatch.of([encode_one(policy, inputs)])
        assert torch.equal(batch.response_positions(len(RESPONSE))[:, 0], whole.positions[:, inputs.length :])
        assert whole.positions.shape[0] == (3 if family in MULTIMODAL else 1)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_all_windows_at_once_give_the_features_of_one_after_another(
    tiny: Callable[[str], Tiny], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, inputs, calls = tiny(family).policy("W4A16"), all_inputs(tiny(family)), list[int]()
    plain = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return plain(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    one_by_one = encode(policy, inputs)
    looped = len(calls)
    with windows_at_once(policy.model):
        at_once = encode(policy, inputs)
    assert 0 < len(calls) - looped < looped
    for mine, theirs in zip(at_once, one_by_one, strict=True):
        assert_same(mine, theirs, tolerance=1e-6)
    calls.clear()
    encode(policy, inputs)
    assert len(calls) == looped


@pytest.mark.parametrize("family", MULTIMODAL)
def test_images_occupy_fewer_positions_than_tokens(tiny: Callable[[str], Tiny], family: str) -> None:
    """Under M-RoPE an image is as long as its longer side, so positions that merely count tokens would be wrong."""
    policy = tiny(family).policy("W4A16")
    seen = {
        encode_one(policy, inputs).next_position < inputs.length for inputs in all_inputs(tiny(family)) if _sees(inputs)
    }
    assert seen == {True}
    blind = next(inputs for inputs in all_inputs(tiny(family)) if not inputs.modality.any())
    assert torch.equal(encode_one(policy, blind).positions, torch.arange(blind.length).expand(3, -1))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_tokens_are_embedded_and_placeholders_replaced(tiny: Callable[[str], Tiny], family: str) -> None:
    policy = tiny(family).policy("W4A16")
    for inputs in all_inputs(tiny(family)):
        prompt = encode_one(policy, inputs)
        plain = (prompt.embeds == policy.embed(prompt.ids)).all(-1)
        assert torch.equal(plain, prompt.modality == 0)
        assert torch.equal(prompt.ids, inputs.input_ids[0])


@pytest.mark.parametrize("family", MULTIMODAL)
def test_deepstack_features_lie_on_the_image_and_matter(tiny: Callable[[str], Tiny], family: str) -> None:
    policy = tiny(family).policy("W4A16")
    for inputs in all_inputs(tiny(family)):
        prompt = encode_one(policy, inputs)
        if family != "qwen3-vl" or not _sees(inputs):
            assert prompt.deepstack is None
            continue
        assert prompt.deepstack is not None
        assert prompt.deepstack_at is not None
        assert torch.equal(prompt.deepstack_at, (inputs.modality == 1).nonzero()[:, 0])
        assert prompt.deepstack.shape[1:] == (int((inputs.modality == 1).sum()), prompt.embeds.shape[1])
        without = replace(prompt, deepstack=None, deepstack_at=None)
        full, bare = (decode(policy, PromptBatch.of([one]))[0, -1] for one in (prompt, without))
        assert (full - bare).abs().max() > 1e-3


# --- nothing leaks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MULTIMODAL)
def test_a_prompt_is_encoded_the_same_whatever_was_encoded_before_it(tiny: Callable[[str], Tiny], family: str) -> None:
    inputs = all_inputs(tiny(family))
    policy = tiny(family).policy("W4A16")
    in_order = [encode_one(policy, one) for one in inputs]
    backwards = [encode_one(policy, one) for one in reversed(inputs)][::-1]
    for one, other in zip(in_order, backwards, strict=True):
        assert_same(one, other)
    for index in (0, COUNT - 1):  # an image, and text alone
        assert_same(in_order[index], encode_one(tiny(family).policy("W4A16"), inputs[index]))


@pytest.mark.parametrize("family", MULTIMODAL)
def test_encoding_does_not_see_what_the_model_remembers_of_a_generation(
    tiny: Callable[[str], Tiny], family: str
) -> None:
    image, *_, text = all_inputs(tiny(family))
    policy = tiny(family).policy("W4A16")
    expected = encode_one(policy, text)
    with torch.no_grad():
        policy.model(**image.tensors, use_cache=True)  # as `generate` begins: the rope offset stays in the model
    assert_same(encode_one(policy, text), expected)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_encoding_leaves_no_trace_in_the_model(tiny: Callable[[str], Tiny], family: str) -> None:
    image, *_, text = all_inputs(tiny(family))
    policy, fresh = tiny(family).policy("W4A16"), tiny(family).policy("W4A16")
    encode_one(policy, image)
    assert torch.equal(forward(policy, "D", text), forward(fresh, "D", text))
    broken = {name: tensor for name, tensor in image.tensors.items() if name != "image_grid_thw"}
    with pytest.raises(Exception, match=r".+"):
        encode_one(policy, ModelInputs(broken, image.modality))
    assert torch.equal(forward(policy, "D", text), forward(fresh, "D", text))


@pytest.mark.parametrize("family", MULTIMODAL)
def test_encoding_is_d_s_business_even_while_q_speaks(tiny: Callable[[str], Tiny], family: str) -> None:
    policy, inputs = tiny(family).policy("W4A8"), all_inputs(tiny(family))[0]
    with policy.speaking("Q"):  # Q has no theta and would refuse
        prompt = encode_one(policy, inputs)
        assert policy.switch.quantized
    assert_same(prompt, encode_one(policy, inputs))


# --- side by side ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(tiny: Callable[[str], Tiny], family: str, masked: bool) -> None:
    policy = tiny(family).policy("W4A16")
    prompts = [with_response(policy, encode_one(policy, inputs)) for inputs in all_inputs(tiny(family))]
    batch = PromptBatch.of(prompts)
    assert not batch.real.all()
    together = decode(policy, batch, masked=masked)
    for row, prompt in enumerate(prompts):
        alone = decode(policy, PromptBatch.of([prompt]))[0]
        torch.testing.assert_close(together[row, : prompt.length], alone, rtol=0, atol=2e-5)
        assert int(batch.next_position[row]) == prompt.next_position


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("family", MULTIMODAL)
def test_what_stands_in_the_padding_is_never_read(tiny: Callable[[str], Tiny], family: str, masked: bool) -> None:
    policy = tiny(family).policy("W4A16")
    batch = PromptBatch.of([encode_one(policy, inputs) for inputs in all_inputs(tiny(family))])
    clean, padding = decode(policy, batch, masked=masked), ~batch.real
    noise = torch.randn(batch.embeds.shape, generator=torch.Generator().manual_seed(0))
    dirty = replace(
        batch,
        embeds=torch.where(padding[..., None], 50 * noise, batch.embeds),
        positions=torch.where(padding, 1000, batch.positions),
        deepstack=tuple(torch.where(padding[..., None], noise, level) for level in batch.deepstack),
    )
    other = decode(policy, dirty, masked=masked)
    assert torch.equal(other[batch.real], clean[batch.real])
    assert not torch.equal(other[padding], clean[padding])


# --- many at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_encoded_together_are_what_each_is_alone(tiny: Callable[[str], Tiny], family: str) -> None:
    policy, inputs = tiny(family).policy("W4A16", torch.float64), all_inputs(tiny(family))
    assert len({one.length for one in inputs}) > COUNT / 2
    if family in MULTIMODAL:
        inputs.append(tiny(family).processor(crowded(load_manifest(tiny(family).manifest)[:COUNT])))
        grids = [one.tensors["image_grid_thw"] for one in inputs if _sees(one)]
        assert {len(grid) for grid in grids} >= {1, 3}
        assert len({tuple(grid) for grid in torch.cat(grids).tolist()}) > 1
    for chosen in (inputs, inputs[::-1], [*inputs[3:], inputs[0], inputs[0]]):
        for ordinal, (one, together) in enumerate(zip(chosen, encode(policy, chosen), strict=True)):
            assert_same(together, encode_one(policy, one), tolerance=1e-12)
            assert together.ordinal == ordinal


def test_audio_clips_of_different_lengths_are_encoded_together(tiny: Callable[[str], Tiny]) -> None:
    omni = tiny("qwen2.5-omni")
    policy = omni.policy("W4A16", torch.float64)
    heard = [one for one in map(omni.processor, load_manifest(omni.manifest)) if "input_features" in one.tensors]
    assert len({one.tensors["input_features"].shape[-1] for one in heard}) > 1
    for one, together in zip(heard, encode(policy, heard), strict=True):
        assert_same(together, encode_one(policy, one), tolerance=1e-12)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_neighbours_do_not_matter(tiny: Callable[[str], Tiny], family: str) -> None:
    """Other images beside it, as large and as many, leave a prompt's features alone."""
    policy, inputs = tiny(family).policy("W4A16", torch.float64), all_inputs(tiny(family))
    seen = [one for one in inputs if _sees(one)]
    noisy = [replace(one, tensors=one.tensors | {"pixel_values": 5 - one.tensors["pixel_values"]}) for one in seen[1:]]
    expected, *others = encode(policy, seen)
    first, *changed = encode(policy, [seen[0], *noisy])
    assert_same(first, expected, tolerance=1e-12)
    assert all((one.embeds - other.embeds).abs().max() > 1e-3 for one, other in zip(others, changed, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoded_prompt_holds_no_memory_of_its_neighbours(tiny: Callable[[str], Tiny], family: str) -> None:
    for prompt in encode(tiny(family).policy("W4A16"), all_inputs(tiny(family))):
        for tensor in (prompt.ids, prompt.embeds, prompt.positions, prompt.deepstack):
            assert tensor is None or tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("family", MULTIMODAL)
def test_padding_is_never_taken_for_an_image(tiny: Callable[[str], Tiny], family: str) -> None:
    """Even where the placeholder is token 0, with which a batch would else be padded."""
    policy = tiny(family).policy("W4A16", torch.float64)
    placeholder = tiny(family).processor.placeholders[1]
    inputs = [one for one in all_inputs(tiny(family)) if _sees(one)]
    expected = [encode_one(policy, one) for one in inputs]
    swapped = []
    for one in inputs:
        ids = one.input_ids.clone()
        assert not (ids == 0).any()
        ids[ids == placeholder] = 0
        swapped.append(replace(one, tensors=one.tensors | {"input_ids": ids}))
    for module in policy.model.modules():
        if hasattr(module, "config") and hasattr(module.config, "image_token_id"):
            module.config.image_token_id = 0
    for together, alone in zip(encode(policy, swapped), expected, strict=True):
        torch.testing.assert_close(together.embeds, alone.embeds, rtol=0, atol=1e-11)
        assert torch.equal(together.positions, alone.positions)


def test_nothing_is_encoded_into_nothing(tiny: Callable[[str], Tiny]) -> None:
    assert encode(tiny("llama").policy("W4A16"), []) == []


def test_chunks_bound_prompts_and_rows_and_keep_the_order() -> None:
    def inputs(tokens: int, patches: int = 0, frames: int = 0) -> ModelInputs:
        media = {"pixel_values": torch.empty(patches, 1)} if patches else {}
        heard = {"feature_attention_mask": torch.empty(2, frames // 2)} if frames else {}
        return ModelInputs(media | heard, torch.zeros(tokens, dtype=torch.int8))

    def sizes(*given: ModelInputs) -> list[int]:
        chunks = list(_chunks(iter(given)))
        assert [id(one) for chunk in chunks for one in chunk] == [id(one) for one in given]
        return [len(chunk) for chunk in chunks]

    assert sizes() == []
    assert sizes(*[inputs(1)] * (CHUNK_PROMPTS + 1)) == [CHUNK_PROMPTS, 1]
    half = CHUNK_ROWS // 2
    assert sizes(*[inputs(half)] * 3) == [2, 1]
    assert sizes(inputs(1), inputs(half), inputs(1)) == [2, 1]  # padded to the longest, three would be too many
    assert sizes(*[inputs(10, patches=half - 10)] * 3) == [2, 1]
    assert sizes(*[inputs(10, frames=half - 10)] * 3) == [2, 1]
    assert sizes(inputs(1), inputs(10, patches=3 * CHUNK_ROWS), inputs(1)) == [1, 1, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_encoded_chunk_by_chunk_under_their_ordinals(
    tiny: Callable[[str], Tiny], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onptq.models.encoding.CHUNK_PROMPTS", 3)
    policy, prompts = tiny(family).policy("W4A16", torch.float64), load_manifest(tiny(family).manifest)[:COUNT]
    advanced: list[int] = []
    ordinals = [7 * index for index in range(COUNT)]
    encoded = encode(policy, tiny(family).processor.ahead(prompts, 4), ordinals, advanced.append)
    assert sum(advanced) == COUNT
    assert max(advanced) <= 3
    assert [one.ordinal for one in encoded] == ordinals
    for one, inputs in zip(encoded, all_inputs(tiny(family)), strict=True):
        assert_same(one, encode_one(policy, inputs), tolerance=1e-12)


def test_a_prompt_that_does_not_fit_with_its_own_response_is_refused(tiny: Callable[[str], Tiny]) -> None:
    policy, prompts = tiny("llama").policy("W4A16"), load_manifest(tiny("llama").manifest)[:2]
    processor = tiny("llama").processor
    assert processor.context is not None
    room = processor.context - processor(prompts[1]).length
    encode(policy, processor.ahead(prompts, [1, room]))
    with pytest.raises(OnPTQError, match=re.escape(repr(prompts[1].id))):
        encode(policy, processor.ahead(prompts, [1, room + 1]))


def _sees(inputs: ModelInputs) -> bool:
    return bool((inputs.modality == 1).any())


def test_a_response_follows_the_largest_position_of_any_axis_and_token() -> None:
    positions = torch.tensor([[0, 1, 1, 2], [0, 1, 9, 2], [0, 5, 1, 2]])
    ids = torch.arange(4)
    prompt = EncodedPrompt(0, ids, torch.zeros(4, 2), positions, torch.zeros(4, dtype=torch.int8))
    assert prompt.next_position == 10
    longer = prompt.extended(torch.tensor([7, 8]), torch.ones(2, 2))
    assert longer.positions[:, 4:].tolist() == [[10, 11]] * 3
    assert PromptBatch.of([prompt, longer]).response_positions(2)[:, :, :].tolist() == [[[10, 11], [12, 13]]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_with_a_bias_adds_it(tiny: Callable[[str], Tiny], dtype: torch.dtype) -> None:
    policy = tiny("llama").policy(dtype=dtype)
    head, hidden = policy.structure.head, torch.randn(3, 5, policy.structure.embedding.embedding_dim).to(dtype)
    plain = policy.logits(hidden)
    head.bias = torch.nn.Parameter(torch.linspace(-4, 4, policy.vocabulary).to(dtype), requires_grad=False)
    assert torch.equal(policy.logits(hidden), plain + head.bias.float())
    norm: Any = policy.structure.decoder.norm
    torch.testing.assert_close(policy.logits(hidden), head(norm(hidden)).float(), rtol=0.02, atol=0.05)
