"""Prompts through the checkpoint's own transformers processor, for families that no file here describes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onptq.data.audio import read_audio
from onptq.data.media import MAX_PIXELS, decode_image
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.models.family import AUDIO, IMAGE, Family
from onptq.models.processing import (
    SETTINGS_FILES,
    ModelInputs,
    PromptProcessor,
    context_length,
    media_name,
    read_media,
    require_files,
    require_number,
)
from onptq.models.templates import read_template

KINDS = {1: IMAGE, 3: AUDIO}  # of mm_token_type_ids; 2 is video
EXTRA = "pip install 'onptq[vision]'"
LONGEST_AUDIO = 30.0  # seconds, where a feature extractor has no limit


@dataclass(frozen=True)
class OwnProcessor(PromptProcessor):
    """Turns prompts into model inputs as any user of the checkpoint's AutoProcessor does."""

    processor: Any = None
    arguments: frozenset[str] = field(default_factory=frozenset)  # of the model's forward

    @classmethod
    def open(cls, folder: Path, family: Family, config: Mapping[str, Any]) -> OwnProcessor:
        import transformers

        require_files(folder, SETTINGS_FILES)
        processor = _load(folder, family)
        tokenizer = processor.tokenizer
        require_number(tokenizer, folder)
        forward = getattr(transformers, family.model_class).forward
        return cls(
            family,
            tokenizer,
            read_template(folder, tokenizer) or getattr(processor, "chat_template", None),
            {},
            context_length(config),
            processor=processor,
            arguments=frozenset(inspect.signature(forward).parameters),
        )

    def _read_media(self, prompt: Prompt) -> Any:
        for kind, given in (("images", prompt.images), ("audio", prompt.audios)):
            if given and kind.removesuffix("s") not in self.family.modalities:
                takes = ", ".join(sorted(self.family.modalities))
                raise OnPTQError(f"{prompt} has {kind}, but {self.family.name} takes only: {takes}")
        images, waves = [], []
        for media in prompt.images:
            name = media_name(prompt, "image", media)
            images.append(decode_image(read_media(name, media), name))
        for media in prompt.audios:
            name, extractor = media_name(prompt, "audio", media), self.processor.feature_extractor
            rate = extractor.sampling_rate
            longest = getattr(extractor, "n_samples", LONGEST_AUDIO * rate) / rate
            waves.append(read_audio(read_media(name, media), name, rate, longest=longest))
        return images, waves

    def _assembled(self, prompt: Prompt, media: Any) -> ModelInputs:
        images, waves = media
        given_media = bool(images or waves)
        text = self._text(prompt)
        given: dict[str, Any] = {"images": [images]} if images else {}
        if waves:
            given |= {"audio": waves, "sampling_rate": self.processor.feature_extractor.sampling_rate}
        bos = self.tokenizer.bos_token
        if self.template is not None and bos is not None and text.startswith(bos):  # as apply_chat_template decides
            given["add_special_tokens"] = False
        try:
            made = self.processor(text=[text], return_tensors="pt", return_mm_token_type_ids=True, **given)
        except Exception as error:  # processors check in many ways that text and media belong together
            raise OnPTQError(f"{prompt}: {type(self.processor).__name__} refuses it: {error}") from error
        types = made.get("mm_token_type_ids", made.get("token_type_ids"))
        modality = torch.zeros_like(made["input_ids"][0], dtype=torch.int8)
        for value, kind in KINDS.items() if types is not None else ():
            modality[types[0] == value] = kind
        if given_media and not modality.any():
            raise OnPTQError(
                f"{prompt}: {type(self.processor).__name__} marks none of its tokens as an image's or a clip's"
            )
        tensors = {name: value for name, value in made.items() if name in self.arguments and isinstance(value, Tensor)}
        return ModelInputs(tensors, modality, alone=given_media)


def _load(folder: Path, family: Family) -> Any:
    from transformers import AutoImageProcessor, AutoProcessor, ProcessorMixin
    from transformers.utils import is_torchvision_available

    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        processor = AutoProcessor.from_pretrained(str(folder), **options)
        if hasattr(processor, "image_processor"):  # Pillow's resampling is the same on every machine
            processor.image_processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil", **options)
    except Exception as error:  # broken files raise errors of every kind
        if not is_torchvision_available() and "image" in family.by_processor:
            raise OnPTQError(
                f"{folder}: the processor of {family.model_class} cannot be used without torchvision: {EXTRA} "
                f"({str(error).strip()})"
            ) from error
        raise OnPTQError(f"{folder}: its processor cannot be used: {error}") from error
    if not isinstance(processor, ProcessorMixin):  # of a checkpoint without the files of its processor
        raise OnPTQError(f"{folder} has no processor but a {type(processor).__name__}; expected one for its media")
    takes = inspect.signature(type(processor).__call__).parameters
    for kind in family.by_processor:
        if kind not in takes and f"{kind}s" not in takes:
            raise OnPTQError(
                f"{folder}: {type(processor).__name__} takes no {kind} beside a text, as those of {family.model_class} "
                "would have to: unsupported"
            )
    _check_sizes(processor, folder)
    return processor


def _check_sizes(processor: Any, folder: Path) -> None:
    """Refuse a processor that would enlarge every image beyond what an image may have."""
    images = getattr(processor, "image_processor", None)
    size: Any = getattr(images, "size", None) or {}
    sides = {name: size[name] for name in ("height", "width", "shortest_edge", "longest_edge") if size.get(name)}
    in_all = hasattr(images, "merge_size")  # processors that cut patches give pixels, others sides
    height, width = sides.get("height", 1), sides.get("width", 1)
    least = sides.get("shortest_edge", 1)
    pixels = (height * width, least if in_all else least**2)
    if not all(isinstance(one, int) and one <= MAX_PIXELS for one in pixels):
        raise OnPTQError(
            f"{folder}: {' or '.join(SETTINGS_FILES)} enlarges images to {dict(sides)}; expected at most {MAX_PIXELS:,} pixels"
        )
