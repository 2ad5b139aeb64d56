"""Prompts as a manifest that reads back as the same prompts."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from onptq.data.chat import MEDIA, check_text
from onptq.data.manifest import JSONL_SUFFIXES, allowed_roots
from onptq.data.media import check_image
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.files import atomically, lies_inside, to_json

STRATUM = "task"  # the one column beside the prompt that has a meaning for a run


def check_target(path: Path, overwrite: bool) -> None:
    """Raise where a manifest cannot or should not be written to the path."""
    if path.suffix.lower() not in JSONL_SUFFIXES:
        raise OnPTQError(f"--out {path}: expected a file that ends in {' or '.join(JSONL_SUFFIXES)}")
    if path.is_dir():
        raise OnPTQError(f"--out {path}: is a folder, expected a file")
    if path.exists() and not overwrite:
        raise OnPTQError(f"{path} exists: expected another --out, or --overwrite to replace it")


def heldout_path(path: Path) -> Path:
    """Where the held-out prompts of a manifest are written."""
    return path.with_name(f"{path.stem}-heldout{path.suffix}")


def write_manifest(prompts: Iterable[Prompt], path: Path) -> None:
    """Write a prompt per line. Media that are files are named by their paths, all others are embedded."""
    folder = Path(os.path.realpath(path.parent))
    with atomically(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for prompt in prompts:
            file.write(to_json(_record(prompt, folder)) + "\n")


def media_outside(prompts: Iterable[Prompt], path: Path) -> Path | None:
    """The folder of the media that a reader of the manifest would refuse, which lie neither beside it nor in a folder that is
    allowed; None where there are none."""
    roots = (path.parent, *allowed_roots())
    files = {one.path for prompt in prompts for one in (*prompt.images, *prompt.audios) if one.path is not None}
    outside = [str(file.resolve().parent) for file in files if not any(lies_inside(root, file) for root in roots)]
    return Path(os.path.commonpath(outside)) if outside else None


def _record(prompt: Prompt, folder: Path) -> dict[str, Any]:
    sources = {
        "image": [_source("image", one, folder) for one in prompt.images],
        "audio": [_source("audio", one, folder) for one in prompt.audios],
    }
    task = {name: value for name, value in prompt.extra.items() if name == STRATUM and str(value).isprintable()}
    if (text := _plain_text(prompt)) is not None:
        media = {kind if len(given) == 1 else f"{kind}s": given for kind, given in sources.items() if given}
        return {"id": prompt.id, "text": text, **{name: _one(given) for name, given in media.items()}, **task}
    queues = {kind: iter(given) for kind, given in sources.items()}
    messages = [
        {"role": message["role"], "content": [_part(part, queues) for part in message["content"]]}
        for message in prompt.messages
    ]
    return {"id": prompt.id, "messages": messages, **task}


def _one(given: list[str]) -> str | list[str]:
    return given[0] if len(given) == 1 else given


def _plain_text(prompt: Prompt) -> str | None:
    """The text, where the prompt is one turn of the user with images, then audio, then this text."""
    media = [{"type": kind} for kind, items in zip(MEDIA, (prompt.images, prompt.audios), strict=True) for _ in items]
    if len(prompt.messages) != 1 or prompt.messages[0]["role"] != "user":
        return None
    *others, last = prompt.messages[0]["content"]
    return last["text"] if others == media and last["type"] == "text" else None


def _part(part: dict[str, Any], queues: dict[str, Iterator[str]]) -> dict[str, Any]:
    kind = part["type"]
    return dict(part) if kind == "text" else {"type": kind, kind: next(queues[kind])}


def _source(kind: str, media: Media, folder: Path) -> str:
    """The path from the folder, absolute where nothing but the root is common; or the bytes as a data URL."""
    if media.path is None:
        data = media.read()
        return f"data:{_mime_type(kind, data)};base64,{base64.b64encode(data).decode()}"
    file = os.path.join(os.path.realpath(media.path.parent), media.path.name)
    shared = os.path.splitdrive(file)[0] == os.path.splitdrive(folder)[0] and os.path.commonpath((file, folder))
    relative = shared and shared != os.path.dirname(shared)
    name = os.path.relpath(file, folder) if relative else file
    return check_text(f".{os.sep}{name}" if name.startswith("data:") else name, kind)


def _mime_type(kind: str, data: bytes) -> str:
    from PIL import Image

    if kind == "image":
        return Image.MIME.get(check_image(data), "image/png")
    return "audio/wav" if data.startswith(b"RIFF") else "application/octet-stream"
