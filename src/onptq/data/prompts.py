"""One calibration prompt, as the manifest gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Media:
    """A picture or a sound: on disk (`path`), or embedded (`data`) when it was generated or came inside a parquet."""

    path: Path | None
    sha256: str
    data: bytes | None = None

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        assert self.path is not None
        return self.path.read_bytes()


@dataclass(frozen=True)
class Prompt:
    """Chat messages whose image and audio parts are filled, in order of appearance, from `images` and `audios`.

    Every content is a list of parts: {"type": "text", "text": ...}, {"type": "image"}, {"type": "audio"}.
    """

    ordinal: int  # place in the manifest, from 0: the identity every other file refers to
    id: str
    messages: Sequence[Mapping[str, Any]]
    images: tuple[Media, ...] = ()
    audios: tuple[Media, ...] = ()
