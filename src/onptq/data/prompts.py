"""One calibration prompt, as the manifest gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onptq.data.media import read_file


@dataclass(frozen=True)
class Media:
    """An image or audio clip: a file (`path`), or bytes (`data`) that were generated or came inside a manifest."""

    path: Path | None
    sha256: str
    data: bytes | None = None

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        assert self.path is not None
        return read_file(self.path)


@dataclass(frozen=True)
class Prompt:
    """Chat messages whose image and audio parts are filled, in order of appearance, from `images` and `audios`.

    Every content is a list of parts: {"type": "text", "text": ...}, {"type": "image"}, {"type": "audio"}.
    """

    ordinal: int  # place among the prompts, from 0: the identity every other file refers to
    id: str
    messages: Sequence[Mapping[str, Any]]
    images: tuple[Media, ...] = ()
    audios: tuple[Media, ...] = ()
    place: str = field(default="", compare=False)  # "prompts.jsonl line 7"; empty where it came from no manifest
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)  # columns that no model sees

    def __str__(self) -> str:
        return f"prompt {self.id!r} ({self.place})" if self.place else f"prompt {self.id!r}"
