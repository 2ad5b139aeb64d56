"""A prompt as the messages of a chat request."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import Any

from onptq.data.prompts import Prompt

AUDIO = ((b"RIFF", "wav"), (b"fLaC", "flac"), (b"OggS", "ogg"))


def chat_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """The messages of a prompt with its images as data URLs and its audio as `input_audio`; text alone as plain text."""
    images, audios = iter(prompt.images), iter(prompt.audios)
    messages = []
    for message in prompt.messages:
        parts: list[dict[str, Any]] = []
        for part in message["content"]:
            if part["type"] == "image":
                parts.append({"type": "image_url", "image_url": {"url": _image(next(images).read())}})
            elif part["type"] == "audio":
                data = next(audios).read()
                parts.append({"type": "input_audio", "input_audio": {"data": _base64(data), "format": _audio(data)}})
            else:
                parts.append({"type": "text", "text": part["text"]})
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        messages.append({"role": message["role"], "content": parts[0]["text"] if alone else parts})
    return messages


def _image(data: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        media_type = Image.MIME.get(image.format or "", "image/png")
    return f"data:{media_type};base64,{_base64(data)}"


def _audio(data: bytes) -> str:
    known: Iterable[str] = (name for head, name in AUDIO if data.startswith(head))
    return next(iter(known), "mp3")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
