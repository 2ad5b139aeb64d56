"""The facts that OnPTQ needs of a model family. Decoder, blocks and linears are recognized by structure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT, IMAGE, AUDIO = 0, 1, 2  # modality of a prompt token


def merged_patches(grid: Sequence[int], merge_size: int) -> int:
    """Tokens of an image cut into (time, height, width) patches, of which merge_size x merge_size become one token."""
    return math.prod(grid) // merge_size**2


@dataclass(frozen=True)
class ImagePlaceholder:
    """The token that the chat template writes once per image, and its number of tokens."""

    token: str
    count: Callable[[Sequence[int], int], int] = merged_patches  # (grid, merge_size) -> tokens


@dataclass(frozen=True)
class AudioPlaceholder:
    """The token that the chat template writes once per audio clip, and its number of tokens."""

    token: str
    count: Callable[[int], int]  # mel frames -> tokens
    whole: bool = True  # whether the spectrogram is that of the extractor's whole length, silence behind the clip


@dataclass(frozen=True)
class Family:
    """One family of checkpoints: which class loads them, what is never quantized, and how media become tokens."""

    name: str
    model_types: tuple[str, ...]  # values of config.json's model_type
    model_class: str  # the transformers class that holds the language model and its towers
    image: ImagePlaceholder | None = None
    audio: AudioPlaceholder | None = None
    token_types: bool = False  # whether the model computes positions from mm_token_type_ids (silently wrong without)
    towers: tuple[str, ...] = ()  # regexes of module names, on disk and at run time, that are never quantized
    other_models: tuple[str, ...] = ()  # on-disk prefixes of other models in the same checkpoint, copied as they are
    linears: tuple[str, ...] = ()  # of its decoder, by name relative to it; empty: the usual seven of every layer
    followers: tuple[str, ...] = ()  # matrices beside them that stay 16-bit, by name within a layer
    sparse: bool = False  # whether layers hold experts: config.json says how many, and so which linears there are
    derived: bool = False  # whether it was found by structure rather than registered
    by_processor: tuple[str, ...] = ()  # media that the checkpoint's own AutoProcessor prepares: image, audio

    @property
    def modalities(self) -> frozenset[str]:
        present = {"text": True, "image": self.image is not None, "audio": self.audio is not None}
        return frozenset(name for name, has in present.items() if has or name in self.by_processor)

    @property
    def has_experts(self) -> bool:
        return any(".experts." in name for name in self.linears)

    @property
    def ignore(self) -> tuple[str, ...]:
        """compressed-tensors `ignore` patterns. Regexes, because exact names differ between disk and run time."""
        beside = tuple(rf".*layers\.\d+\.{re.escape(name)}(?:\..*)?$" for name in self.followers)
        return (*(f"re:{pattern}" for pattern in (r".*lm_head", *self.towers, *beside)), *self.other_patterns)

    @property
    def other_patterns(self) -> tuple[str, ...]:
        """The `ignore` pattern of each of the other models."""
        return tuple(f"re:^{re.escape(prefix)}.*" for prefix in self.other_models)


def thinker_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes language model and towers: all of it, except in a full Omni checkpoint."""
    inner: Mapping[str, Any] = config.get("thinker_config") or config
    return inner


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model: nested, or flat in old and text-only files."""
    outer = thinker_config(config)
    inner: Mapping[str, Any] = outer.get("text_config") or outer
    return inner
