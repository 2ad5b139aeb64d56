"""The prompts and items of a comparison, kept beside its results: without them nobody knows what was answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onptq.data.prompts import Media, Prompt
from onptq.evaluate.tasks import Item

MEDIA = pa.list_(pa.struct([("path", pa.string()), ("sha256", pa.string()), ("bytes", pa.binary())]))


@dataclass(frozen=True)
class Asked:
    """A prompt or an item, as it is on disk. `measure` is how an item is graded."""

    id: str
    task: str
    messages: Sequence[Mapping[str, Any]]
    images: Sequence[Media]
    audios: Sequence[Media]
    reference: str | None = None
    ordinal: int = 0
    measure: str | None = None

    @property
    def kinds(self) -> list[str]:
        """Which of text, image and audio it has."""
        text = any(part["type"] == "text" for message in self.messages for part in message["content"])
        return [kind for kind, there in (("text", text), ("image", self.images), ("audio", self.audios)) if there]

    @classmethod
    def of_prompt(cls, prompt: Prompt) -> Asked:
        """With the task and the reference answer of its manifest, or with the task that its id begins with."""
        media = prompt.images, prompt.audios
        return cls(prompt.id, prompt.task, prompt.messages, *media, prompt.reference, prompt.ordinal)

    @classmethod
    def of_item(cls, item: Item) -> Asked:
        prompt = item.prompt
        media = prompt.images, prompt.audios
        return cls(item.id, item.task, prompt.messages, *media, item.reference, prompt.ordinal, item.measure)


def write_asked(asked: Sequence[Asked], path: Path) -> None:
    """Write one row per prompt or item, in their order."""
    columns = {
        "ordinal": pa.array([one.ordinal for one in asked], pa.int32()),
        "id": pa.array([one.id for one in asked], pa.string()),
        "task": pa.array([one.task for one in asked], pa.string()),
        "messages": pa.array([_messages(one) for one in asked], pa.string()),
        "images": pa.array([[_media(media) for media in one.images] for one in asked], MEDIA),
        "audios": pa.array([[_media(media) for media in one.audios] for one in asked], MEDIA),
        "reference": pa.array([one.reference for one in asked], pa.string()),
        "measure": pa.array([one.measure for one in asked], pa.string()),
    }
    pq.write_table(pa.table(columns), path)


def read_asked(path: Path) -> list[Asked]:
    return [
        Asked(
            row["id"],
            row["task"],
            json.loads(row["messages"]),
            [_read_media(media) for media in row["images"]],
            [_read_media(media) for media in row["audios"]],
            row["reference"],
            row["ordinal"],
            row["measure"],
        )
        for row in pq.read_table(path).to_pylist()
    ]


def _messages(one: Asked) -> str:
    return json.dumps([dict(message) for message in one.messages])


def _media(media: Media) -> dict[str, Any]:
    path = None if media.path is None else str(media.path.absolute())
    return {"path": path, "sha256": media.sha256, "bytes": media.data}


def _read_media(row: Mapping[str, Any]) -> Media:
    return Media(None if row["path"] is None else Path(row["path"]), row["sha256"], row["bytes"])
