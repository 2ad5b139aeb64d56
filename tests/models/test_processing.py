from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MULTIMODAL, Tiny
from PIL import Image
from test_audio import wav

from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.models.processing import PromptProcessor, context_length
from onptq.registry import FAMILIES

PATCH = {"qwen2.5-vl": 14, "qwen3-vl": 16, "qwen2.5-omni": 14}
AROUND_IMAGE = {
    "qwen2.5-vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "qwen3-vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "qwen2.5-omni": ("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
}
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def drawing(width: int, height: int, seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def png(image: Image.Image, **options: Any) -> Media:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return embedded(buffer.getvalue())


def tone(seconds: float, seed: int = 0) -> Media:
    return embedded(wav(np.random.default_rng(seed).uniform(-0.3, 0.3, int(16_000 * seconds)), 2))


def embedded(data: bytes) -> Media:
    return Media(None, hashlib.sha256(data).hexdigest(), data)


def ask(*parts: str, images: tuple[Media, ...] = (), audios: tuple[Media, ...] = ()) -> Prompt:
    """One user turn: "image" and "audio" stand for media, anything else for itself."""
    content = [{"type": part} if part in ("image", "audio") else {"type": "text", "text": part} for part in parts]
    return Prompt(3, "the-prompt", [{"role": "user", "content": content}], images, audios)


def refusal(processor: PromptProcessor, prompt: Prompt) -> str:
    with pytest.raises(OnPTQError) as refused:
        processor(prompt)
    assert "'the-prompt'" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_each_image_becomes_its_merged_patches_in_order(family: str, tiny: Callable[[str], Tiny]) -> None:
    processor, unit = tiny(family).processor, 2 * PATCH[family]
    sizes = [(4, 2), (2, 3), (5, 5)]  # in merged patches
    images = tuple(png(drawing(w * unit, h * unit, seed)) for seed, (w, h) in enumerate(sizes))
    inputs = processor(ask("See ", "image", " and ", "image", "image", "?", images=images))

    start, pad, end = AROUND_IMAGE[family]
    seen = [start + pad * (w * h) + end for w, h in sizes]
    text = f"{SYSTEM}<|im_start|>user\nSee {seen[0]} and {seen[1]}{seen[2]}?<|im_end|>\n<|im_start|>assistant\n"
    assert processor.tokenizer.decode(inputs.input_ids[0]) == text
    assert inputs.input_ids[0].tolist() == processor.tokenizer(text)["input_ids"]

    assert inputs.tensors["image_grid_thw"].tolist() == [[1, 2 * h, 2 * w] for w, h in sizes]
    assert inputs.tensors["pixel_values"].shape == (4 * 39, 3 * 2 * PATCH[family] ** 2)
    assert int((inputs.modality == 1).sum()) == 39
    pad_id = processor.tokenizer.convert_tokens_to_ids(pad)
    assert torch.equal(inputs.modality == 1, inputs.input_ids[0] == pad_id)
    assert inputs.tensors["attention_mask"].tolist() == [[1] * inputs.length]


@pytest.mark.parametrize("family", MULTIMODAL)
def test_images_are_those_of_the_pil_image_processor(family: str, tiny: Callable[[str], Tiny]) -> None:
    processor = tiny(family).processor
    drawings = [drawing(210, 97, 1), drawing(33, 401, 2)]
    inputs = processor(ask("image", "image", images=tuple(map(png, drawings))))
    reference = processor.image_processor(images=drawings, return_tensors="pt")
    assert torch.equal(inputs.tensors["pixel_values"], reference["pixel_values"])
    assert torch.equal(inputs.tensors["image_grid_thw"], reference["image_grid_thw"])
    assert type(processor.image_processor).__name__.endswith("Pil")


@pytest.mark.parametrize("family", MULTIMODAL)
def test_token_types_go_to_the_families_whose_positions_need_them(family: str, tiny: Callable[[str], Tiny]) -> None:
    inputs = tiny(family).processor(ask("image", "?", images=(png(drawing(60, 60)),)))
    assert ("mm_token_type_ids" in inputs.tensors) == (family != "qwen2.5-omni")
    if family != "qwen2.5-omni":
        assert torch.equal(inputs.tensors["mm_token_type_ids"][0], (inputs.modality == 1).long())


@pytest.mark.parametrize("family", MULTIMODAL)
def test_a_prompt_of_text_alone_carries_no_media_tensors(family: str, tiny: Callable[[str], Tiny]) -> None:
    inputs = tiny(family).processor(ask("Hello"))
    assert set(inputs.tensors) <= {"input_ids", "attention_mask", "mm_token_type_ids"}
    assert not inputs.modality.any()
    assert inputs.modality.dtype == torch.int8


def test_audio_clips_become_a_quarter_of_their_frames_and_lose_only_padding(tiny: Callable[[str], Tiny]) -> None:
    processor = tiny("qwen2.5-omni").processor
    audios = (tone(0.5, 1), tone(1.234, 2))
    inputs = processor(ask("audio", " or ", "audio", audios=audios))

    frames = [50, 124]  # of 10 ms, begun ones included
    assert inputs.tensors["feature_attention_mask"].sum(-1).tolist() == frames
    ids = processor.tokenizer.convert_tokens_to_ids(["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"])
    counts = [int((inputs.input_ids == token).sum()) for token in ids]
    assert counts == [2, 12 + 31, 2]
    assert torch.equal(inputs.modality == 2, inputs.input_ids[0] == ids[1])

    waves = [np.frombuffer(media.read()[44:], "<i2").astype(np.float32) / 32768 for media in audios]
    padded = processor.feature_extractor(waves, sampling_rate=16_000, return_tensors="pt", padding="max_length")
    assert padded["input_features"].shape[-1] == 3_000
    assert torch.equal(inputs.tensors["input_features"], padded["input_features"][..., :124])


def test_images_and_audio_in_one_prompt_keep_their_places(tiny: Callable[[str], Tiny]) -> None:
    processor = tiny("qwen2.5-omni").processor
    images = (png(drawing(56, 56)), png(drawing(84, 56)))
    inputs = processor(ask("image", "audio", "image", "?", images=images, audios=(tone(0.2),)))
    runs = [
        value
        for value, before in zip(inputs.modality.tolist(), [0, *inputs.modality.tolist()], strict=False)
        if value != before
    ]
    assert [value for value in runs if value] == [1, 2, 1]
    assert [int((inputs.modality == kind).sum()) for kind in (1, 2)] == [4 + 6, 5]


@pytest.mark.parametrize("family", MULTIMODAL)
def test_settings_are_read_from_every_form_in_which_checkpoints_keep_them(
    family: str, tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    checkpoint, prompt = tiny(family), ask("image", images=(png(drawing(300, 200)),))
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint.folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "media"))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    size = settings.pop("size")

    def grid() -> list[int]:
        processor = PromptProcessor.from_folder(folder, FAMILIES[family], checkpoint.source.config)
        sizes: list[list[int]] = processor(prompt).tensors["image_grid_thw"].tolist()
        return sizes[0]

    usual = checkpoint.processor(prompt).tensors["image_grid_thw"][0].tolist()
    old = settings | {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(old))
    assert grid() == usual
    small = settings | {"min_pixels": 56 * 56, "max_pixels": 100 * 100}
    (folder / "preprocessor_config.json").write_text(json.dumps(small))
    assert grid() != usual
    (folder / "preprocessor_config.json").unlink()
    nested = {"image_processor": settings | {"size": size}, "feature_extractor": settings}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert grid() == usual


def test_a_camera_that_was_held_sideways_does_not_turn_the_image(tiny: Callable[[str], Tiny]) -> None:
    processor = tiny("qwen2.5-vl").processor
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    inputs = processor(ask("image", images=(png(drawing(56, 112), exif=exif),)))
    assert inputs.tensors["image_grid_thw"].tolist() == [[1, 4, 8]]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "I;16"])
def test_images_of_every_kind_become_rgb(mode: str, tiny: Callable[[str], Tiny]) -> None:
    image = drawing(56, 56).convert("L" if mode == "I;16" else mode)
    inputs = tiny("qwen3-vl").processor(ask("image", images=(png(image.convert(mode)),)))
    assert torch.isfinite(inputs.tensors["pixel_values"]).all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_text_models_get_their_parts_as_one_string(family: str, tiny: Callable[[str], Tiny]) -> None:
    processor = tiny(family).processor
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Count "}, {"type": "text", "text": "to three."}]},
    ]
    inputs = processor(Prompt(0, "p", turns))
    strings = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to three."}]
    expected = processor.tokenizer.apply_chat_template(strings, add_generation_prompt=True, return_dict=False)
    assert inputs.input_ids[0].tolist() == expected
    assert set(inputs.tensors) == {"input_ids", "attention_mask"}


def test_a_chat_template_that_begins_the_text_is_not_given_a_second_beginning(tiny: Callable[[str], Tiny]) -> None:
    processor = tiny("llama").processor
    ids = processor(ask("Hello")).input_ids[0].tolist()
    assert ids.count(processor.tokenizer.bos_token_id) == 1


def test_without_a_chat_template_a_prompt_is_its_text_after_the_beginning_token(tiny: Callable[[str], Tiny]) -> None:
    llama, qwen = (replace(tiny(family).processor, template=None) for family in ("llama", "qwen2"))
    turns = [
        {"role": role, "content": [{"type": "text", "text": text}]} for role, text in (("user", "One"), ("user", "two"))
    ]
    prompt = Prompt(0, "p", turns)
    assert llama.tokenizer.decode(llama(prompt).input_ids[0]) == "<|begin_of_text|>One\ntwo"
    assert qwen.tokenizer.decode(qwen(prompt).input_ids[0]) == "One\ntwo"


def test_a_chat_template_of_an_older_processor_is_read_and_comes_first(
    tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    checkpoint, folder = tiny("qwen2.5-vl"), tmp_path / "copy"
    shutil.copytree(checkpoint.folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "media"))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "old{{ messages[0].role }}"}))
    processor = PromptProcessor.from_folder(folder, FAMILIES["qwen2.5-vl"], checkpoint.source.config)
    assert processor.tokenizer.decode(processor(ask("Hello")).input_ids[0]) == "olduser"


def test_text_longer_than_the_context_is_not_cut_but_refused(tiny: Callable[[str], Tiny]) -> None:
    processor = tiny("qwen3").processor
    prompt = ask("word " * 5_000)
    inputs = processor(prompt)
    assert inputs.length > 5_000
    with pytest.raises(OnPTQError, match=rf"'the-prompt' is {inputs.length} tokens.* 64: .* context of 4096"):
        processor.check_length(prompt, inputs.length, 64)


def test_prompt_and_response_may_fill_the_context_exactly(tiny: Callable[[str], Tiny]) -> None:
    processor = tiny("qwen3").processor
    processor.check_length(ask("Hello"), 4_000, 96)
    with pytest.raises(OnPTQError):
        processor.check_length(ask("Hello"), 4_000, 97)


def test_a_rope_scaling_extends_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8_192}
    assert context_length({"max_position_embeddings": 32_768, "rope_scaling": yarn}) == 131_072
    assert context_length({"max_position_embeddings": 131_072, "rope_parameters": llama3}) == 131_072
    assert context_length({"text_config": {"max_position_embeddings": 77, "rope_scaling": None}}) == 77
    assert context_length({}) is None


def test_media_that_cannot_be_read_are_named_with_their_prompt(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    processor = tiny("qwen2.5-omni").processor
    broken = tmp_path / "broken.png"
    broken.write_bytes(png(drawing(50, 50)).read()[:60])
    gone = tmp_path / "gone.wav"
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"RIFF\0\0\0\0WAVE")
    assert f"image {broken} cannot be decoded" in refusal(processor, ask("image", images=(Media(broken, "0"),)))
    assert f"audio {gone} cannot be read: No such file" in refusal(processor, ask("audio", audios=(Media(gone, "0"),)))
    assert f"audio {noise}" in refusal(processor, ask("audio", audios=(Media(noise, "0"),)))


def test_an_image_too_narrow_for_the_model_is_refused(tiny: Callable[[str], Tiny]) -> None:
    message = refusal(tiny("qwen3-vl").processor, ask("image", images=(png(drawing(2, 900)),)))
    assert "aspect ratio" in message


def test_audio_clips_are_never_cut_and_never_vanish(tiny: Callable[[str], Tiny]) -> None:
    processor = tiny("qwen2.5-omni").processor
    assert "lasts 30.5 s; expected at most 30 s" in refusal(processor, ask("audio", audios=(tone(30.5),)))
    assert "too short" in refusal(processor, ask("audio", audios=(tone(0.01),)))


def test_media_of_a_kind_that_the_family_lacks_are_refused(tiny: Callable[[str], Tiny]) -> None:
    image, audio = png(drawing(50, 50)), tone(0.2)
    assert "takes only: image, text" in refusal(tiny("qwen2.5-vl").processor, ask("audio", audios=(audio,)))
    assert "takes only: text" in refusal(tiny("llama").processor, ask("image", images=(image,)))


def test_a_placeholder_in_the_text_itself_is_no_image(tiny: Callable[[str], Tiny]) -> None:
    processor = tiny("qwen2.5-vl").processor
    written = "its text contains <|image_pad|>, which stands for one of its images: expected text without it"
    assert written in refusal(processor, ask("What is <|image_pad|>?"))
    without = ask("image", "image", images=(png(drawing(50, 50)),))
    assert "2 <|image_pad|> placeholders for 1 images" in refusal(processor, without)


def test_a_chat_template_that_asks_for_the_date_gets_the_same_every_day(tiny: Callable[[str], Tiny]) -> None:
    today = "{% if date_string is defined %}{{ date_string }}{% else %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    dated = replace(tiny("llama").processor, template=today)
    assert dated.tokenizer.decode(dated(ask("Hello")).input_ids[0]) == "26 Jul 2024"


def test_what_a_chat_template_refuses_is_passed_on(tiny: Callable[[str], Tiny]) -> None:
    strict = replace(tiny("qwen2").processor, template="{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in refusal(strict, ask("Hello"))
    empty = replace(tiny("qwen2").processor, template="{{ '' }}")
    assert "is empty" in refusal(empty, ask("Hello"))


def test_images_without_a_chat_template_are_refused(tiny: Callable[[str], Tiny]) -> None:
    bare = replace(tiny("qwen2.5-vl").processor, template=None)
    assert "need a chat template" in refusal(bare, ask("image", images=(png(drawing(50, 50)),)))


def test_a_config_whose_placeholder_is_another_token_is_refused(tiny: Callable[[str], Tiny]) -> None:
    checkpoint = tiny("qwen2.5-vl")
    config = dict(checkpoint.source.config) | {"image_token_id": 5}
    with pytest.raises(OnPTQError, match=r"<\|image_pad\|>.*image token is 5"):
        PromptProcessor.from_folder(checkpoint.folder, FAMILIES["qwen2.5-vl"], config)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "tokenizer.json"])
def test_a_folder_without_a_needed_file_or_with_a_broken_one_is_refused(
    file: str, tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    checkpoint, folder = tiny("qwen2.5-vl"), tmp_path / "copy"
    shutil.copytree(checkpoint.folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "media"))
    (folder / file).unlink()
    with pytest.raises(OnPTQError, match=f"has none of .*{file}"):
        PromptProcessor.from_folder(folder, FAMILIES["qwen2.5-vl"], checkpoint.source.config)
    (folder / file).write_text("{")
    with pytest.raises(OnPTQError, match=f"{file} cannot be used"):
        PromptProcessor.from_folder(folder, FAMILIES["qwen2.5-vl"], checkpoint.source.config)


def test_what_is_processed_ahead_is_what_is_processed_alone_in_its_order(tiny: Callable[[str], Tiny]) -> None:
    processor = tiny("qwen2.5-vl").processor
    sizes = [(64 + 28 * n, 56 + 28 * (n % 3)) for n in range(21)]
    prompts = [ask("image", f"What is {n}?", images=(png(drawing(*size, n)),)) for n, size in enumerate(sizes)]
    alone = [processor(prompt) for prompt in prompts]
    ahead = list(processor.ahead(prompts))
    assert len(ahead) == len(alone)
    for one, other in zip(ahead, alone, strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_an_image_that_is_none_is_refused_when_its_turn_comes(tiny: Callable[[str], Tiny]) -> None:
    good, bad = (ask("image", images=(media,)) for media in (png(drawing(56, 56)), embedded(b"no image")))
    taken = tiny("qwen2.5-vl").processor.ahead([good, good, bad, good])
    assert next(taken).length == next(taken).length
    with pytest.raises(OnPTQError, match="cannot be decoded"):
        next(taken)
