"""The prompts of one run: which calibrate, which are held out, and the record of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from onptq.data.manifest import SHOWN_ERRORS, load_manifest, repeated
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError

ON_BAD_PROMPT = ("fail", "skip")


class Sizes(Protocol):
    """How many prompts a run takes: the `data` section of a recipe."""

    @property
    def prompts(self) -> int: ...
    @property
    def holdout(self) -> int: ...
    @property
    def holdout_share(self) -> float: ...


@dataclass(frozen=True)
class Prompts:
    calibration: Sequence[Prompt]
    holdout: Sequence[Prompt]
    given: int = 0  # prompts to choose from
    skipped: Sequence[str] = field(default=(), compare=False)  # why each bad one was left out

    @property
    def every(self) -> list[Prompt]:
        return [*self.calibration, *self.holdout]

    def describe(self) -> str:
        """One line: how many calibrate, how many are held out, of how many, with which media."""
        kinds = Counter(_kinds(prompt) for prompt in self.every)
        shown = ", ".join(f"{count} with {kind}" if kind else f"{count} text only" for kind, count in kinds.items())
        counts = f"{len(self.calibration)} prompts calibrate and {len(self.holdout)} are held out, of {self.given}"
        return f"{counts} ({shown})" if shown else counts

    def warnings(self) -> list[str]:
        """What a user should know of these prompts before they trust a figure."""
        texts = []
        if self.skipped:
            texts.append(describe_skipped(self.skipped))
        if both := repeated(self.holdout, self.calibration):
            texts.append(
                f"{len(both)} of {len(self.holdout)} held-out prompts are calibration prompts too, e.g. {both[0]}: "
                "held-out figures look better than they are"
            )
        return texts


def describe_skipped(bad: Sequence[str]) -> str:
    """How many prompts are skipped, and of the first ones which and why."""
    shown = "".join(f"\n  {why}" for why in bad[:SHOWN_ERRORS])
    return f"{len(bad)} bad prompts are skipped:{shown}" + ("\n  ..." if len(bad) > SHOWN_ERRORS else "")


def _kinds(prompt: Prompt) -> str:
    return " and ".join(kind for kind, media in (("image", prompt.images), ("audio", prompt.audios)) if media)


def check_on_bad_prompt(choice: str) -> None:
    if choice not in ON_BAD_PROMPT:
        raise OnPTQError(f"--on-bad-prompt {choice}: expected one of {', '.join(ON_BAD_PROMPT)}")


def gather_prompts(
    calibration: str | Path | Sequence[Prompt] | None,
    holdout: str | Path | Sequence[Prompt] | None,
    sizes: Sizes,
    modalities: frozenset[str],
    *,
    usable: Callable[[Prompt], object] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Prompts:
    """Which prompts calibrate and which are held out; ordinals are unique over both.

    A bad prompt is an error, unless `usable` is given, which raises where a model cannot take a prompt: then bad prompts
    are skipped.
    """
    if calibration is None:
        return Prompts((), ())
    bad: list[str] | None = None if usable is None else []

    def read(source: str | Path | Sequence[Prompt], first: int) -> list[Prompt]:
        if isinstance(source, str | Path):
            source = load_manifest(source, modalities=modalities, usable=usable, bad=bad, note=note)
        elif usable is not None and bad is not None:
            source = _keep_usable(source, usable, bad)
        return [replace(prompt, ordinal=first + index) for index, prompt in enumerate(source)]

    candidates = read(calibration, 0)
    if not candidates:
        raise OnPTQError(
            "\n".join(("there are no calibration prompts; expected at least one", *(bad or ())[:SHOWN_ERRORS]))
        )
    if holdout is None:
        chosen, held = split(candidates, prompts=sizes.prompts, holdout=sizes.holdout, share=sizes.holdout_share)
        return Prompts(chosen, held, len(candidates), tuple(bad or ()))
    held = read(holdout, len(candidates))
    return Prompts(candidates[: sizes.prompts], held, len(candidates) + len(held), tuple(bad or ()))


def _keep_usable(prompts: Sequence[Prompt], usable: Callable[[Prompt], object], bad: list[str]) -> list[Prompt]:
    """The prompts that `usable` does not refuse; why the others are refused is appended to `bad`."""
    usable_prompts: list[Prompt] = []
    for prompt in prompts:
        try:
            usable(prompt)
            usable_prompts.append(prompt)
        except OnPTQError as error:
            bad.append(str(error))
    return usable_prompts


def split(
    manifest: Sequence[Prompt], /, *, prompts: int, holdout: int, share: float
) -> tuple[list[Prompt], list[Prompt]]:
    """Calibration prompts, then held-out ones: spare prompts first, else at most `share` of the manifest."""
    count = len(manifest)
    spare = count - min(count, prompts)
    held = min(holdout, max(spare, math.floor(share * count)))
    calibration = min(prompts, count - held)
    return list(manifest[:calibration]), list(manifest[calibration : calibration + held])


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
