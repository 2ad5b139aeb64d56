"""Generated prompts in every modality that a family takes."""

from __future__ import annotations

import hashlib
import io
import math
import struct
import wave

from onptq.data.prompts import Media, Prompt

SIDE = 112  # pixels
RATE, SECONDS = 16000, 1.0


def probe_prompt(modalities: frozenset[str], ordinal: int = 0) -> Prompt:
    """One question about a drawn image and a tone, as far as the family takes them."""
    images = (_embedded(_image()),) if "image" in modalities else ()
    audios = (_embedded(_tone()),) if "audio" in modalities else ()
    parts = [{"type": "image"} for _ in images] + [{"type": "audio"} for _ in audios]
    content = [*parts, {"type": "text", "text": "Describe this in one sentence."}]
    return Prompt(ordinal, "probe", [{"role": "user", "content": content}], images, audios)


def _embedded(data: bytes) -> Media:
    return Media(None, hashlib.sha256(data).hexdigest(), data)


def _image() -> bytes:
    from PIL import Image, ImageDraw

    image = Image.radial_gradient("L").resize((SIDE, SIDE)).convert("RGB")
    draw = ImageDraw.Draw(image)
    draw.rectangle((12, 20, 52, 60), fill=(200, 40, 40))
    draw.ellipse((56, 50, 104, 98), fill=(40, 80, 200))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _tone() -> bytes:
    samples = [round(8000 * math.sin(2 * math.pi * 440 * n / RATE)) for n in range(round(RATE * SECONDS))]
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return out.getvalue()
