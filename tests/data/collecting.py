"""Material of the tests that collect prompts: images, records, and the lines that servers log."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from test_manifest import picture

from onptq.data.prompts import Prompt

PARAMS = (
    "SamplingParams(n=1, presence_penalty=0.0, stop=['x'], max_tokens=100), prompt_token_ids: None, lora_request: None."
)


def draw(folder: Path, *names: str) -> Path:
    """A folder with a different image under each name."""
    for shade, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(shade, {".jpg": "JPEG", ".webp": "WEBP"}.get(path.suffix, "PNG")))
    return folder


def data_url(shade: int = 0) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture(shade)).decode()}"


def write_lines(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def user(*content: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": list(content) if len(content) > 1 or isinstance(content[0], dict) else content[0],
    }


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def said(prompt: Prompt) -> list[tuple[str, str]]:
    """Roles with their contents, media as <image> and <audio>."""
    return [
        (message["role"], "".join(part.get("text", f"<{part['type']}>") for part in message["content"]))
        for message in prompt.messages
    ]


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def old_line(text: str | None, name: str = "chatcmpl-1") -> str:
    """As vLLM 0.11.0 and earlier ones log a request."""
    return f"INFO 10-01 18:43:27 [logger.py:43] Received request {name}: prompt: {text!r}, params: {PARAMS}"


def new_lines(text: str | None, name: str) -> tuple[str, str]:
    """As later ones do at level DEBUG; at level INFO there is the second line alone."""
    head = "(APIServer pid=7) {} 02-13 11:33:33 [logger.py:49]"
    details = f"prompt: {text!r}, prompt_token_ids: None, prompt_embeds shape: None."
    return (
        f"{head.format('DEBUG')} Request {name} details: {details}",
        f"{head.format('INFO')} Received request {name}: params: {PARAMS}",
    )
