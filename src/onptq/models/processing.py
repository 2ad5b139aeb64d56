"""From a prompt to the arguments of the model's forward, as the family's own transformers processor would make them.

That processor itself is not used: it cannot be created without torchvision, and with torchvision it resamples images
differently. Tokenizer, PIL image processor and Whisper feature extractor give the same result on every machine.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onptq.data.audio import read_audio
from onptq.data.media import MAX_PIXELS, decode_image
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.models.family import AUDIO, IMAGE, TEXT, Family, text_config, thinker_config
from onptq.models.marks import KEEP, REFUSE, marks_of, require_text
from onptq.models.templates import check_text_length, read_template, render

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")
THREADS = min(8, os.cpu_count() or 1)  # that read media

Read = tuple[dict[str, Tensor], list[int]]  # arguments of the forward, and how many tokens each image or clip has
ReadMedia = tuple[Read, Read]  # images, audio clips


@dataclass(frozen=True)
class ModelInputs:
    """One prompt: the keyword arguments of the model's forward, and the modality of each token."""

    tensors: dict[str, Tensor]
    modality: Tensor  # [P] int8: TEXT, IMAGE or AUDIO
    alone: bool = False  # whether its media cannot stand beside those of other prompts

    @property
    def input_ids(self) -> Tensor:  # [1, P]
        return self.tensors["input_ids"]

    @property
    def length(self) -> int:
        return int(self.modality.numel())


@dataclass(frozen=True)
class PromptProcessor:
    """Turns prompts into model inputs, one at a time and never truncated."""

    family: Family
    tokenizer: Any
    template: str | None  # without one, a prompt is the plain text of its messages
    placeholders: Mapping[int, int]  # modality -> token id
    context: int | None  # positions of the model's context
    image_processor: Any = None
    feature_extractor: Any = None
    marks: re.Pattern[str] | None = None  # what the text of a prompt may not contain

    @classmethod
    def from_folder(
        cls, folder: Path, family: Family, config: Mapping[str, Any], special_tokens: str = REFUSE
    ) -> PromptProcessor:
        """Everything is read from the checkpoint's own files; `config` is its config.json.

        Text of prompts that contains `special_tokens` is refused, or kept as it is."""
        if family.by_processor:
            from onptq.models.own_processor import OwnProcessor

            opened: PromptProcessor = OwnProcessor.open(folder, family, config)
        else:
            opened = cls._open(folder, family, config)
        if special_tokens == KEEP:
            return opened
        return replace(opened, marks=marks_of(opened.tokenizer, opened.placeholders.values()))

    @classmethod
    def _open(cls, folder: Path, family: Family, config: Mapping[str, Any]) -> PromptProcessor:
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, WhisperFeatureExtractor

        tokenizer = _load(AutoTokenizer, folder, TOKENIZER_FILES)
        require_number(tokenizer, folder)
        return cls(
            family,
            tokenizer,
            read_template(folder, tokenizer),
            dict(_placeholder_ids(family, tokenizer, thinker_config(config))),
            context_length(config),
            _limited(_load(Qwen2VLImageProcessorPil, folder, SETTINGS_FILES), folder) if family.image else None,
            _load(WhisperFeatureExtractor, folder, SETTINGS_FILES) if family.audio else None,
        )

    def __call__(self, prompt: Prompt) -> ModelInputs:
        return self._assembled(prompt, self._read_media(prompt))

    def ahead(self, prompts: Sequence[Prompt], max_new: Sequence[int] | int = 0) -> Iterator[ModelInputs]:
        """The inputs of one prompt after another, while images and audio of the next ones are read in threads.

        A prompt that does not fit into the model's context with its `max_new` response tokens is refused."""
        limits = [max_new] * len(prompts) if isinstance(max_new, int) else max_new
        for prompt, limit, inputs in zip(prompts, limits, self._ahead(prompts), strict=True):
            self.check_length(prompt, inputs.length, limit)
            yield inputs

    def _ahead(self, prompts: Iterable[Prompt]) -> Iterator[ModelInputs]:
        with ThreadPoolExecutor(THREADS) as pool:
            waiting: deque[tuple[Prompt, Future[ReadMedia]]] = deque()
            for prompt in prompts:
                waiting.append((prompt, pool.submit(self._read_media, prompt)))
                if len(waiting) > THREADS:
                    first, future = waiting.popleft()
                    yield self._assembled(first, future.result())
            for prompt, future in waiting:
                yield self._assembled(prompt, future.result())

    def _read_media(self, prompt: Prompt) -> ReadMedia:
        return self._read_images(prompt), self._read_audios(prompt)

    def _assembled(self, prompt: Prompt, media: ReadMedia) -> ModelInputs:
        (images, image_counts), (audios, audio_counts) = media
        ids = self._expand(prompt, self._tokenize(prompt), {IMAGE: image_counts, AUDIO: audio_counts})
        modality = torch.full_like(ids, TEXT, dtype=torch.int8)
        for kind, placeholder in self.placeholders.items():
            modality[ids == placeholder] = kind
        tensors = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        if self.family.token_types:
            tensors["mm_token_type_ids"] = (modality == IMAGE).long()[None]
        return ModelInputs(tensors | images | audios, modality)

    def check_length(self, prompt: Prompt, length: int, max_new: int) -> None:
        """Refuse a prompt whose `length` tokens and `max_new` more do not fit into the model's context."""
        if self.context is not None and length + max_new > self.context:
            raise OnPTQError(
                f"{prompt} is {length} tokens long and its response may take {max_new}: together more than "
                f"the model's context of {self.context} (max_position_embeddings); expected a shorter prompt, smaller "
                "images or a shorter response"
            )

    def check(self, prompt: Prompt, max_new: int) -> None:
        """Refuse a prompt that the model cannot be given."""
        self.check_length(prompt, self(prompt).length, max_new)

    def _read_images(self, prompt: Prompt) -> Read:
        if not prompt.images:
            return {}, []
        if self.family.image is None:
            raise _unsupported(prompt, "images", self.family)
        patches = [self._patches(prompt, media) for media in prompt.images]
        grids = torch.cat([one["image_grid_thw"] for one in patches])  # [images, 3]
        counts = [self.family.image.count(grid, self.image_processor.merge_size) for grid in grids.tolist()]
        return {"pixel_values": torch.cat([one["pixel_values"] for one in patches]), "image_grid_thw": grids}, counts

    def _patches(self, prompt: Prompt, media: Media) -> Mapping[str, Tensor]:
        name = media_name(prompt, "image", media)
        image = decode_image(read_media(name, media), name)
        try:
            patches: Mapping[str, Tensor] = self.image_processor(images=[image], return_tensors="pt")
        except Exception as error:  # processors refuse sizes with errors of every kind
            raise OnPTQError(f"{name} cannot be cut into patches: {error}") from error
        return patches

    def _read_audios(self, prompt: Prompt) -> Read:
        if not prompt.audios:
            return {}, []
        if self.family.audio is None:
            raise _unsupported(prompt, "audio", self.family)
        waves = [self._waveform(prompt, media) for media in prompt.audios]
        # Padded as the model's processor pads, because the last frames look into the padding. Frames that the mask
        # leaves out never reach the tower, so they are dropped here: they would be most of a short clip's 15 MB.
        rate = self.feature_extractor.sampling_rate
        padding = "max_length" if self.family.audio.whole else "longest"
        features = self.feature_extractor(
            waves, sampling_rate=rate, padding=padding, return_attention_mask=True, return_tensors="pt"
        )
        mask = features["attention_mask"].long()  # [clips, frames]
        frames = mask.sum(-1).tolist()
        counts = [self.family.audio.count(length) for length in frames]
        for media, count in zip(prompt.audios, counts, strict=True):
            if count < 1:
                raise OnPTQError(f"{media_name(prompt, 'audio', media)} is too short: it gives no audio token")
        spectrograms = features["input_features"][..., : max(frames)]  # [clips, mel bins, frames]
        return {"input_features": spectrograms, "feature_attention_mask": mask[:, : max(frames)]}, counts

    def _waveform(self, prompt: Prompt, media: Media) -> Any:
        name, extractor = media_name(prompt, "audio", media), self.feature_extractor
        rate = extractor.sampling_rate
        return read_audio(read_media(name, media), name, rate, longest=extractor.n_samples / rate)

    def _tokenize(self, prompt: Prompt) -> list[int]:
        text = self._text(prompt)
        # A template writes the beginning-of-text token itself.
        ids: list[int] = self.tokenizer(text, add_special_tokens=self.template is None, verbose=False)["input_ids"]
        if not ids:
            raise OnPTQError(f"{prompt} is empty; expected at least one token")
        return ids

    def _text(self, prompt: Prompt) -> str:
        """The text of a prompt with a placeholder for every image and clip."""
        for message in prompt.messages:
            require_text(prompt, _joined(message), self.marks)
        text = plain_text(prompt) if self.template is None else self._render(prompt)
        check_text(prompt, text)
        return text

    def _render(self, prompt: Prompt) -> str:
        assert self.template is not None
        # The templates of text-only models take strings, and some drop a list of parts without a word.
        flat = self.family.modalities == {"text"}
        messages = [{**message, "content": _joined(message)} if flat else dict(message) for message in prompt.messages]
        if self.family.by_processor:  # templates that know parts alone iterate over the letters of a text
            messages = [{**message, "content": _parts(message)} for message in messages]
        try:
            return render(self.tokenizer, self.template, messages)
        except OnPTQError as error:
            raise OnPTQError(f"{prompt}: {error}") from error

    def _expand(self, prompt: Prompt, ids: list[int], counts: Mapping[int, list[int]]) -> Tensor:
        """Repeat each placeholder as often as its image or clip has tokens."""
        kinds = {placeholder: kind for kind, placeholder in self.placeholders.items()}
        for placeholder, kind in kinds.items():
            written, expected = ids.count(placeholder), len(counts[kind])
            if written != expected:
                token = self.tokenizer.convert_ids_to_tokens(placeholder)
                what = "images" if kind == IMAGE else "audio clips"
                own = sum(_joined(message).count(token) for message in prompt.messages)
                raise OnPTQError(
                    f"{prompt}: its text contains {token}, which stands for one of its {what}: expected text without it"
                    if own
                    else f"{prompt}: its text has {written} {token} placeholders for {expected} {what}; expected one for "
                    "each, from the chat template"
                )
        left = {kind: iter(each) for kind, each in counts.items()}
        expanded = [token for token in ids for _ in range(next(left[kinds[token]]) if token in kinds else 1)]
        return torch.tensor(expanded)


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions the language model takes: max_position_embeddings, or what a RoPE scaling extends it to."""
    text = text_config(config)
    limit = text.get("max_position_embeddings")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    try:
        extended = float(rope.get("original_max_position_embeddings", 0)) * float(rope.get("factor", 0))
        return None if limit is None else max(int(limit), int(extended))
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise OnPTQError(
            f"config.json: max_position_embeddings is {limit!r} and the RoPE scaling {rope!r}; expected numbers"
        ) from None


def require_files(folder: Path, files: Sequence[str]) -> list[str]:
    """Those of some files that a checkpoint has; refuse one that has none of them."""
    present = [name for name in files if (folder / name).is_file()]
    if not present:
        raise OnPTQError(f"{folder} has none of {', '.join(files)}; expected a checkpoint with all its files")
    return present


def _load(cls: Any, folder: Path, files: Sequence[str]) -> Any:
    present = require_files(folder, files)  # transformers would make an empty tokenizer without a word
    try:
        return cls.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # broken files raise errors of every kind, down to those of the tokenizers library
        raise OnPTQError(f"{folder}: {', '.join(present)} cannot be used: {error}") from error


def require_number(tokenizer: Any, folder: Path) -> None:
    """Refuse a tokenizer whose longest text is no number: transformers compares it with every length."""
    if not isinstance(tokenizer.model_max_length, int | float):
        raise OnPTQError(
            f"{folder / 'tokenizer_config.json'}: model_max_length is {tokenizer.model_max_length!r}; expected a number"
        )


def _limited(processor: Any, folder: Path) -> Any:
    """The image processor, unless it would enlarge every image beyond what an image may have."""
    least = getattr(processor.size, "shortest_edge", None) or 0  # pixels in all, for Qwen's processors
    if not isinstance(least, int) or least > MAX_PIXELS:
        raise OnPTQError(
            f"{folder}: {' or '.join(SETTINGS_FILES)} enlarges images to {least} pixels; expected at most {MAX_PIXELS:,}"
        )
    return processor


def _placeholder_ids(family: Family, tokenizer: Any, config: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Token ids by modality. Tokenizer and config.json must agree: the model looks for the id in its config."""
    for kind, name, placeholder in ((IMAGE, "image", family.image), (AUDIO, "audio", family.audio)):
        if placeholder is None:
            continue
        own = tokenizer.convert_tokens_to_ids(placeholder.token)
        configured = config.get(f"{name}_token_id", config.get(f"{name}_token_index", own))
        if own is None or own != configured:
            raise OnPTQError(
                f"the tokenizer has id {own} for {placeholder.token}, config.json's {name} token is {configured}; "
                f"expected the same, as in every {family.name} checkpoint"
            )
        yield kind, own


def check_text(prompt: Prompt, text: str) -> None:
    """Refuse a text that is too long for any model."""
    try:
        check_text_length(text)
    except OnPTQError as error:
        raise OnPTQError(f"{prompt}: {error}") from error


def plain_text(prompt: Prompt) -> str:
    """The text of a prompt for a model without a chat template."""
    if prompt.images or prompt.audios:
        raise OnPTQError(f"{prompt} has images or audio: they need a chat template, this model has none")
    return "\n".join(_joined(message) for message in prompt.messages)


def _joined(message: Mapping[str, Any]) -> str:
    return "".join(part.get("text", "") for part in _parts(message))


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def media_name(prompt: Prompt, what: str, media: Media) -> str:
    return f"{prompt}: {what} {media.path or media.sha256[:12]}"


def read_media(name: str, media: Media) -> bytes:
    try:
        return media.read()
    except OSError as error:
        raise OnPTQError(f"{name} cannot be read: {error.strerror or error}") from error


def _unsupported(prompt: Prompt, what: str, family: Family) -> OnPTQError:
    takes = ", ".join(sorted(family.modalities))
    return OnPTQError(f"{prompt} has {what}, but a {family.name} model takes only: {takes}")
