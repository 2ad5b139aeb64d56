"""One calibration prompt, as the manifest gives it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onptq.data.media import read_file

EMBEDDED = re.compile(r"(?P<task>.+)/(?:test|held-out|calibration)/\d+")  # ids of embedded prompts, e.g. choice/test/17


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

    @property
    def task(self) -> str:
        """The task that its manifest names, or that the id of an embedded prompt begins with; else empty."""
        named = self.extra.get("task")
        return named if isinstance(named, str) else task_of(self.id)

    @property
    def reference(self) -> str | None:
        """The right answer, where its manifest has one."""
        reference = self.extra.get("reference")
        return reference if isinstance(reference, str) else None

    @property
    def kinds(self) -> list[str]:
        """Which of text, image and audio it has."""
        text = any(part["type"] == "text" for message in self.messages for part in message["content"])
        return [kind for kind, there in (("text", text), ("image", self.images), ("audio", self.audios)) if there]

    @property
    def measure(self) -> str | None:
        """How its answers are graded, where it is an item of a comparison."""
        return self.extra.get("measure")

    def __str__(self) -> str:
        return f"prompt {self.id!r} ({self.place})" if self.place else f"prompt {self.id!r}"


def task_of(identity: str) -> str:
    """The task of an embedded prompt; empty where the id is another one's."""
    embedded = EMBEDDED.fullmatch(identity)
    return embedded["task"] if embedded else ""
