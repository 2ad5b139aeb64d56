"""Prompts as large as real ones: synthetic pictures, and sounds for a model that hears, of about so many tokens each."""

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
CELL = 16  # pixels of one block of noise: neither flat nor white
AUDIO_TOKENS_PER_SECOND, SAMPLING = 25, 16_000
QUESTION = (
    "Describe picture {number} in detail: what stands in the middle, which colors there are, and what is written."
)
LISTENED = "What do you hear in recording {number}? Write down every word, and say who speaks."


def draw_prompts(family: str, count: int, media_tokens: int) -> list[Prompt]:
    """Pictures; where the family hears, every second prompt has a sound instead. The same for the same arguments."""
    hears = "audio" in FAMILIES[family].modalities
    return [_prompt(family, ordinal, media_tokens, hears and ordinal % 2 == 1) for ordinal in range(count)]


def _prompt(family: str, ordinal: int, tokens: int, sound: bool) -> Prompt:
    wanted = tokens * SIZES[ordinal % len(SIZES)]
    data = _sound(ordinal, wanted) if sound else _picture(ordinal, wanted, ASPECTS[ordinal % len(ASPECTS)], family)
    media = (Media(None, hashlib.sha256(data).hexdigest(), data),)
    text = (LISTENED if sound else QUESTION).format(number=ordinal)
    content = [{"type": "audio" if sound else "image"}, {"type": "text", "text": text}]
    images, audios = ((), media) if sound else (media, ())
    return Prompt(ordinal, f"p{ordinal}", [{"role": "user", "content": content}], images, audios)


def _picture(ordinal: int, tokens: float, aspect: float, family: str) -> bytes:
    side = 2 * PATCHES[family]  # pixels of one token: two patches each way
    columns, rows = (max(1, round(math.sqrt(tokens * ratio))) for ratio in (aspect, 1 / aspect))
    width, height = columns * side, rows * side
    noise = np.random.default_rng(ordinal).integers(0, 256, (height // CELL + 1, width // CELL + 1, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _sound(ordinal: int, tokens: float) -> bytes:
    samples = int(SAMPLING * tokens / AUDIO_TOKENS_PER_SECOND)
    noise = np.random.default_rng(ordinal).normal(0, 3000, samples).clip(-32768, 32767).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, SAMPLING, samples, "NONE", "not compressed"))
        file.writeframes(noise.tobytes())
    return out.getvalue()
