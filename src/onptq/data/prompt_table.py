"""Prompts as columns of parquet, as runs and comparisons have them beside their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onptq.data.prompts import Media, Prompt

MEDIA = pa.list_(pa.struct([("path", pa.string()), ("sha256", pa.string()), ("bytes", pa.binary())]))


def prompt_columns(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """One row per prompt: its messages, its media by path and hash, or embedded, its task and its reference answer."""
    return {
        "ordinal": pa.array([one.ordinal for one in prompts], pa.int32()),
        "id": pa.array([one.id for one in prompts], pa.string()),
        "task": pa.array([one.task for one in prompts], pa.string()),
        "messages": pa.array([json.dumps([dict(message) for message in one.messages]) for one in prompts], pa.string()),
        "images": pa.array([list(map(_media_row, one.images)) for one in prompts], MEDIA),
        "audios": pa.array([list(map(_media_row, one.audios)) for one in prompts], MEDIA),
        "reference": pa.array([one.reference for one in prompts], pa.string()),
    }


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write prompts, and of items how they are graded."""
    measures = pa.array([one.measure for one in prompts], pa.string())
    pq.write_table(pa.table(prompt_columns(prompts) | {"measure": measures}), path)


def read_prompts(path: Path) -> list[Prompt]:
    return [prompt_of(row) for row in pq.read_table(path).to_pylist()]


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """The prompt in a row of such a table."""
    extra = {name: row[name] for name in ("task", "reference", "measure") if row.get(name) is not None}
    messages = json.loads(row["messages"])
    return Prompt(row["ordinal"], row["id"], messages, media_of(row, "images"), media_of(row, "audios"), extra=extra)


def media_of(row: Mapping[str, Any], kind: str) -> tuple[Media, ...]:
    """The `images` or `audios` of a row."""
    return tuple(
        Media(None if one["path"] is None else Path(one["path"]), one["sha256"], one["bytes"])
        for one in row.get(kind) or ()
    )


def _media_row(media: Media) -> dict[str, Any]:
    path = None if media.path is None else str(media.path.absolute())
    return {"path": path, "sha256": media.sha256, "bytes": media.data}
