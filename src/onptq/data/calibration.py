"""The prompts of one run: which calibrate, which are held out, and the record of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onptq.data.manifest import load_manifest, split
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.recipe import DataConfig


@dataclass(frozen=True)
class Prompts:
    calibration: Sequence[Prompt]
    holdout: Sequence[Prompt]

    @property
    def every(self) -> list[Prompt]:
        return [*self.calibration, *self.holdout]


def gather_prompts(
    calibration: str | Path | Sequence[Prompt] | None,
    holdout: str | Path | Sequence[Prompt] | None,
    cfg: DataConfig,
    modalities: frozenset[str],
) -> Prompts:
    """Which prompts calibrate and which are held out; ordinals are unique over both."""
    if calibration is None:
        return Prompts((), ())
    given = _numbered(calibration, 0, modalities)
    if not given:
        raise OnPTQError("there are no calibration prompts; expected at least one")
    if holdout is None:
        return Prompts(*split(given, prompts=cfg.prompts, holdout=cfg.holdout, share=cfg.holdout_share))
    return Prompts(given[: cfg.prompts], _numbered(holdout, len(given), modalities))


def _numbered(source: str | Path | Sequence[Prompt], first: int, modalities: frozenset[str]) -> list[Prompt]:
    prompts = load_manifest(source, modalities=modalities) if isinstance(source, str | Path) else source
    return [replace(prompt, ordinal=first + index) for index, prompt in enumerate(prompts)]


def write_prompts(prompts: Prompts, input_ids: Sequence[Sequence[int]], path: Path) -> None:
    """`prompts.parquet`: exactly what went into the model, media by path and hash, or embedded where they have no path."""
    media = pa.list_(pa.struct([("path", pa.string()), ("sha256", pa.string()), ("bytes", pa.binary())]))
    roles = ["calibration"] * len(prompts.calibration) + ["holdout"] * len(prompts.holdout)
    columns = {
        "ordinal": pa.array([prompt.ordinal for prompt in prompts.every], pa.int32()),
        "id": pa.array([prompt.id for prompt in prompts.every], pa.string()),
        "role": pa.array(roles, pa.string()),
        "input_ids": pa.array(list(input_ids), pa.list_(pa.int32())),
        "images": pa.array([[_media_row(one) for one in prompt.images] for prompt in prompts.every], media),
        "audios": pa.array([[_media_row(one) for one in prompt.audios] for prompt in prompts.every], media),
    }
    pq.write_table(pa.table(columns), path)


def _media_row(media: Media) -> dict[str, Any]:
    return {"path": None if media.path is None else str(media.path), "sha256": media.sha256, "bytes": media.data}
