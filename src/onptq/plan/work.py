"""How much a recipe asks of a model: prompts, tokens, batches, rounds. Every assumption about data nobody has seen is here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from onptq.checkpoint.source import Source
from onptq.methods.layerwise import RESPONSE_TOKENS
from onptq.methods.signround import BATCH, STEPS, looks
from onptq.models.family import thinker_config
from onptq.models.processing import SETTINGS_FILES, context_length
from onptq.recipe import Recipe

IMAGE_TOKENS = 336  # a picture of about 512 x 512 pixels in patches of 28
AUDIO_TOKENS = 250  # ten seconds
TEXT_TOKENS = 64
# Near misses count from the first lost hundredth of a logit, so about half of the states that agree are candidates too.
CANDIDATES = 0.6


@dataclass(frozen=True)
class Work:
    prompts: int
    holdout: int
    prompt_tokens: int
    media_tokens: int  # of which come from a tower
    response_tokens: int
    batch_tokens: int
    recipe: Recipe

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def answered(self) -> int:
        """Tokens of a prompt and the dense model's own response, which the start is made of."""
        return self.prompt_tokens + RESPONSE_TOKENS

    @property
    def start_rounds(self) -> bool:
        """Whether the start learns how each weight is rounded, block by block."""
        return "signround" in self.recipe.init.split("+")

    @property
    def start_rows(self) -> int:
        """Prompts in one of its steps."""
        return min(self.prompts, BATCH)

    @property
    def start_batches(self) -> int:
        return ceil(self.prompts / BATCH)

    @property
    def start_steps(self) -> int:
        """Of each block."""
        return STEPS if self.recipe.init_steps is None else self.recipe.init_steps

    @property
    def start_looks(self) -> int:
        """How often each block's error over all prompts is taken: before the first step, and after some."""
        return 1 + len(looks(self.start_steps))

    @property
    def every(self) -> int:
        return self.prompts + self.holdout

    @property
    def rows(self) -> int:
        """Prompts in one batch of Follow, Compare and Branch."""
        return max(1, min(self.prompts, self.batch_tokens // self.length))

    @property
    def batches(self) -> int:
        return ceil(self.prompts / self.rows)

    @property
    def held_out_batches(self) -> int:
        return ceil(self.holdout / self.rows)

    @property
    def banks(self) -> int:
        """How often Follow, Compare and Branch run over the calibration prompts."""
        rounds = self.recipe.rounds
        return rounds if self.recipe.refresh else min(rounds, 1)

    @property
    def candidates(self) -> int:
        """States that Branch forks in one round."""
        if self.recipe.calibrate.gamma == 0:
            return 0
        return ceil(CANDIDATES * self.prompts * self.response_tokens)

    @property
    def critical(self) -> int:
        select = self.recipe.select
        most = self.candidates if select.rule != "all" else self.prompts * self.response_tokens
        return min(most, select.budget if select.per_prompt is None else select.per_prompt * self.prompts)

    @property
    def decisions(self) -> int:
        """States at which the objective reads logits."""
        calibrate = self.recipe.calibrate
        if calibrate.gamma and calibrate.response_over == "visited":
            return self.prompts * self.response_tokens
        return self.critical

    @property
    def micro_batch(self) -> int:
        calibrate = self.recipe.calibrate
        return min(calibrate.micro_batch, calibrate.batch, max(1, self.prompts))

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of one round."""
        calibrate = self.recipe.calibrate
        whole, rest = divmod(self.prompts, calibrate.batch)
        return calibrate.epochs * (whole * ceil(calibrate.batch / self.micro_batch) + ceil(rest / self.micro_batch))

    @property
    def judgements(self) -> int:
        """Forward passes over held-out prompts in one round, to choose the iterate."""
        calibrate = self.recipe.calibrate
        return (calibrate.evaluations + 1) * ceil(self.holdout / self.micro_batch) if calibrate.keep == "best" else 0


def work_of(recipe: Recipe, source: Source, prompt_tokens: int | None = None) -> Work:
    """`prompt_tokens` is the length of a prompt, its picture or sound included; without it a usual one is assumed."""
    family, config = source.family, source.config
    media = _picture_tokens(source.folder, config) if family.image else AUDIO_TOKENS if family.audio else 0
    length = media + TEXT_TOKENS if prompt_tokens is None else prompt_tokens
    response, context = recipe.follow.max_tokens, context_length(config)
    if prompt_tokens is None and context is not None:
        length = max(1, min(length, context - response))
    learns = recipe.method != "rtn"
    return Work(
        prompts=recipe.data.prompts if learns else 0,
        holdout=recipe.data.holdout if learns else 0,
        prompt_tokens=length,
        media_tokens=max(0, min(media, length - TEXT_TOKENS)),
        response_tokens=response,
        batch_tokens=recipe.compute.batch_tokens,
        recipe=recipe,
    )


def _picture_tokens(folder: Path, config: Mapping[str, Any]) -> int:
    """A usual picture, or the largest that the checkpoint's own processor lets through."""
    vision = thinker_config(config).get("vision_config") or {}
    side = int(vision.get("patch_size", 14)) * int(vision.get("spatial_merge_size", 2))
    for name in SETTINGS_FILES:
        settings = _read(folder / name)
        settings = settings.get("image_processor") or settings
        pixels = settings.get("max_pixels") or (settings.get("size") or {}).get("longest_edge")
        if pixels:
            return max(1, min(IMAGE_TOKENS, int(pixels) // side**2))
    return IMAGE_TOKENS


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run would refuse it; the plan only takes a hint from it
        return {}
    return content if isinstance(content, dict) else {}
