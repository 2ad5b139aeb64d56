"""Prompts with synthetic images and audio of about a given number of tokens."""

from __future__ import annotations

import hashlib
import io
import math
import wave

import numpy as np
from PIL import Image

from onptq.data.prompts import Media, Prompt
from onptq.models import FAMILIES
from onptq.zoo.configs import PATCHES

ASPECTS = (1.0, 1.25, 0.8, 1.5, 0.67)  # width over height, in turn
SIZES = (1.0, 0.85, 1.15)  # of the wanted number of tokens, in turn: batches of real prompts are uneven
CELL = 16  # pixels of a side of one block of noise
AUDIO_TOKENS_PER_SECOND, SAMPLING = 25, 16_000
QUESTION = (
    "Describe picture {number} in detail: what stands in the middle, which colors there are, and what is written."
)
HEARD = "What do you hear in recording {number}? Write down every word, and say who speaks."


def draw_prompts(family: str, count: int, media_tokens: int) -> list[Prompt]:
    """Prompts with an image each, the same for the same arguments. With audio, every second one has audio instead."""
    has_audio = "audio" in FAMILIES[family].modalities
    return [_prompt(family, ordinal, media_tokens, has_audio and ordinal % 2 == 1) for ordinal in range(count)]


def _prompt(family: str, ordinal: int, tokens: int, is_audio: bool) -> Prompt:
    wanted = tokens * SIZES[ordinal % len(SIZES)]
    data = _audio(ordinal, wanted) if is_audio else _image(ordinal, wanted, ASPECTS[ordinal % len(ASPECTS)], family)
    media = (Media(None, hashlib.sha256(data).hexdigest(), data),)
    text = (HEARD if is_audio else QUESTION).format(number=ordinal)
    content = [{"type": "audio" if is_audio else "image"}, {"type": "text", "text": text}]
    images, audios = ((), media) if is_audio else (media, ())
    return Prompt(ordinal, f"p{ordinal}", [{"role": "user", "content": content}], images, audios)


def _image(ordinal: int, tokens: float, aspect: float, family: str) -> bytes:
    side = 2 * PATCHES[family]  # pixels of one token: two patches each way
    columns, rows = (max(1, round(math.sqrt(tokens * ratio))) for ratio in (aspect, 1 / aspect))
    width, height = columns * side, rows * side
    noise = np.random.default_rng(ordinal).integers(0, 256, (height // CELL + 1, width // CELL + 1, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _audio(ordinal: int, tokens: float) -> bytes:
    samples = int(SAMPLING * tokens / AUDIO_TOKENS_PER_SECOND)
    noise = np.random.default_rng(ordinal).normal(0, 3000, samples).clip(-32768, 32767).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, SAMPLING, samples, "NONE", "not compressed"))
        file.writeframes(noise.tobytes())
    return out.getvalue()
