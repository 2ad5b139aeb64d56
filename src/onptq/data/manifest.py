"""Read a calibration manifest: JSONL or parquet, a prompt per line or row, every picture and sound checked up front."""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError

JSONL_SUFFIXES = (".jsonl", ".json-lines")
SUFFIXES = (*JSONL_SUFFIXES, ".parquet")
FIELDS = ("id", "text", "messages", "image", "images", "audio", "audios")
ROLES = ("system", "user", "assistant")
PARTS = ("text", "image", "audio")
MEDIA = ("image", "audio")
SHOWN_ERRORS = 10


class _Problem(Exception):
    """What is wrong with one line; the caller adds where."""


def load_manifest(
    path: str | Path, *, modalities: frozenset[str] | None = None, limit: int | None = None
) -> list[Prompt]:
    """Read and check every prompt, or the first `limit`; `modalities` are those the model can take (None: any)."""
    manifest = Path(path)
    shelf = _Shelf(manifest.parent)
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    problems: list[str] = []
    for ordinal, (place, raw) in enumerate(_records(manifest)):
        if ordinal == limit or len(problems) == SHOWN_ERRORS:
            break
        label = f"{manifest} {place}"
        try:
            record = _decode(raw)
            label += f" (id {record['id']!r})" if "id" in record else ""
            prompt = _read_prompt(record, ordinal, shelf, modalities)
            if prompt.id in places:
                raise _Problem(f"id {prompt.id!r} is already taken by {places[prompt.id]}: ids must be unique")
            places[prompt.id] = place
            prompts.append(prompt)
        except _Problem as problem:
            problems.append(f"{label}: {problem}")
    if problems:
        stopped = f"\n(stopped after {SHOWN_ERRORS} errors)" if len(problems) == SHOWN_ERRORS else ""
        raise OnPTQError("\n".join(problems) + stopped)
    if not prompts:
        raise OnPTQError(f"{manifest} has no prompts: expected at least one line or row with `text` or `messages`")
    return prompts


def manifest_digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256 over ids, messages and media contents, in order; where the files lie does not count."""
    digest = hashlib.sha256()
    for prompt in prompts:
        media = [[item.sha256 for item in items] for items in (prompt.images, prompt.audios)]
        messages = [dict(message) for message in prompt.messages]
        digest.update(json.dumps([prompt.id, messages, media], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def split(
    manifest: Sequence[Prompt], /, *, prompts: int, holdout: int, share: float
) -> tuple[list[Prompt], list[Prompt]]:
    """Calibration prompts, then held-out ones: spare prompts first, else at most `share` of the manifest."""
    count = len(manifest)
    spare = count - min(count, prompts)
    held = min(holdout, max(spare, math.floor(share * count)))
    calibration = min(prompts, count - held)
    return list(manifest[:calibration]), list(manifest[calibration : calibration + held])


def _records(manifest: Path) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    suffix = manifest.suffix.lower()
    if suffix not in SUFFIXES:
        raise OnPTQError(f"{manifest}: a manifest ends in {', '.join(SUFFIXES)}; got {suffix or 'no suffix'}")
    try:
        yield from _jsonl_lines(manifest) if suffix in JSONL_SUFFIXES else _parquet_rows(manifest)
    except OSError as error:
        raise OnPTQError(f"cannot read the manifest {manifest}: {error.strerror or error}") from error


def _jsonl_lines(manifest: Path) -> Iterator[tuple[str, bytes]]:
    with manifest.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield f"line {number}", text


def _parquet_rows(manifest: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with manifest.open("rb") as file:
        try:
            table = pq.ParquetFile(file)
            number = 0
            for batch in table.iter_batches(batch_size=64):  # small: rows may embed whole pictures
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
        except pa.ArrowInvalid as error:
            raise OnPTQError(f"{manifest} is not a readable parquet file: {error}") from error


def _decode(raw: bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(raw, dict):
        return _without_nulls(raw)
    expected = 'expected one JSON object per line, e.g. {"id": "a", "text": "What is this?", "image": "a.png"}'
    try:
        record = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise _Problem(f"not UTF-8 text (byte {error.start + 1}); {expected}") from None
    except json.JSONDecodeError as error:
        raise _Problem(f"not valid JSON ({error.msg} at column {error.colno}); {expected}") from None
    if not isinstance(record, dict):
        raise _Problem(f"{_kind(record)}; {expected}")
    return _without_nulls(record)


def _without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """A parquet row has every column; a null is a field that was not given."""

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(item) for item in value]
        return _without_nulls(value) if isinstance(value, dict) else value

    return {name: clean(value) for name, value in record.items() if value is not None}


def _read_prompt(record: Mapping[str, Any], ordinal: int, shelf: _Shelf, modalities: frozenset[str] | None) -> Prompt:
    _refuse_unknown(record, FIELDS, "field")
    if ("text" in record) == ("messages" in record):
        raise _Problem("expected exactly one of `text` and `messages`, got " + ("both" if "text" in record else "none"))
    attached = {kind: _attached(record, kind) for kind in MEDIA}
    if "text" in record:
        parts = [{"type": kind} for kind in MEDIA for _ in attached[kind]]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": record["text"]}]}]
    else:
        messages = record["messages"]
    messages, sources = _read_messages(messages, attached)
    for kind, items in sources.items():
        if items and modalities is not None and kind not in modalities:
            raise _Problem(f"has {kind}, but this model takes only {', '.join(sorted(modalities))}")
    return Prompt(
        ordinal=ordinal,
        id=_read_id(record, ordinal),
        messages=messages,
        images=tuple(shelf.fetch("image", source) for source in sources["image"]),
        audios=tuple(shelf.fetch("audio", source) for source in sources["audio"]),
    )


def _read_id(record: Mapping[str, Any], ordinal: int) -> str:
    value = record.get("id", ordinal)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _Problem(f"`id` must be text or a whole number, got {_kind(value)}")
    return str(value)


def _attached(record: Mapping[str, Any], kind: str) -> list[Any]:
    """The media of the line itself: `image` or `images`, one or a list."""
    if kind in record and f"{kind}s" in record:
        raise _Problem(f"expected one of `{kind}` and `{kind}s`, got both")
    value = record.get(kind, record.get(f"{kind}s", []))
    return value if isinstance(value, list) else [value]


def _read_messages(
    messages: Any, attached: Mapping[str, list[Any]]
) -> tuple[list[dict[str, Any]], Mapping[str, list[Any]]]:
    """Messages whose contents are lists of parts, and the media those parts stand for, in order of appearance."""
    if not isinstance(messages, list) or not messages:
        raise _Problem(f"`messages` must be a list of at least one message, got {_kind(messages)}")
    result: list[dict[str, Any]] = []
    placeholders: dict[str, list[Any]] = {kind: [] for kind in MEDIA}  # None where the part names no file itself
    for message in messages:
        if not isinstance(message, dict):
            raise _Problem(f"a message must have `role` and `content`, got {_kind(message)}")
        _refuse_unknown(message, ("role", "content"), "message field")
        if message.get("role") not in ROLES:
            raise _Problem(f"`role` must be one of {', '.join(ROLES)}; got {message.get('role')!r}")
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not parts:
            raise _Problem(f"`content` must be text or a list of parts, got {_kind(content)}")
        result.append({"role": message["role"], "content": [_read_part(part, placeholders) for part in parts]})
    if result[-1]["role"] != "user":
        raise _Problem(f"the last message must be the user's, which the model answers; got {result[-1]['role']!r}")
    return result, _match_media(placeholders, attached)


def _read_part(part: Any, placeholders: Mapping[str, list[Any]]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in PARTS:
        shown = f"type {kind!r}" if isinstance(part, dict) else _kind(part)
        raise _Problem(f"a content part must be a mapping with a type of {', '.join(PARTS)}; got {shown}")
    _refuse_unknown(part, ("type", kind), f"field of a part of type {kind}")
    if kind in MEDIA:
        placeholders[kind].append(part.get(kind))
        return {"type": kind}
    text = part.get("text")
    if not isinstance(text, str):
        raise _Problem(f"`text` must be text, got {_kind(text)}")
    if not text.strip():
        raise _Problem("`text` must not be empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Problem(f"text is not valid Unicode: {text!r}") from None
    return {"type": "text", "text": text}


def _match_media(placeholders: Mapping[str, list[Any]], attached: Mapping[str, list[Any]]) -> Mapping[str, list[Any]]:
    if not any(source is not None for sources in placeholders.values() for source in sources):
        for kind in MEDIA:
            if len(placeholders[kind]) != len(attached[kind]):
                raise _Problem(
                    f"{len(placeholders[kind])} {kind} parts in the messages, {len(attached[kind])} {kind} files"
                )
        return attached
    if any(attached.values()):
        raise _Problem("media are named both in the messages' parts and beside them: expected one of the two")
    for kind, sources in placeholders.items():
        if None in sources:
            raise _Problem(f"{kind} part {sources.index(None) + 1} names no file, though other parts do")
    return placeholders


class _Shelf:
    """Fetches, checks and hashes media; a file that several prompts share is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fetched: dict[tuple[str, Path], Media] = {}

    def fetch(self, kind: str, source: Any) -> Media:
        name, data = _locate(kind, source)
        if data is not None:
            return _check(kind, "embedded in the manifest", data, Media(None, _sha256(data), data))
        path = self._folder / name
        if (kind, path) not in self._fetched:
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                raise _Problem(f"{kind} {name!r} not found (looked for {path.absolute()})") from None
            except OSError as error:
                raise _Problem(f"{kind} {name!r} cannot be read: {error.strerror or error}") from None
            self._fetched[kind, path] = _check(kind, repr(name), data, Media(path.absolute(), _sha256(data)))
        return self._fetched[kind, path]


def _locate(kind: str, source: Any) -> tuple[str, bytes | None]:
    """A path, or the bytes themselves: alone, or as {"bytes": ..., "path": ...}."""
    if isinstance(source, dict) and source.keys() <= {"bytes", "path"}:
        source = source.get("bytes", source.get("path"))
    if isinstance(source, bytes):
        return "", source
    if not isinstance(source, str) or not source or "\0" in source:
        raise _Problem(f"{kind} must be a path, or bytes in a parquet; got {_kind(source)}")
    if "://" in source:
        raise _Problem(f"{kind} {source!r} is an address: expected a file, nothing is downloaded")
    return source, None


def _check(kind: str, name: str, data: bytes, media: Media) -> Media:
    if not data:
        raise _Problem(f"{kind} {name} is empty")
    if kind == "image":
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()  # `verify` alone does not notice a truncated JPEG
        except Exception as error:  # Pillow's decoders let through whatever they stumble over
            raise _Problem(f"image {name} cannot be decoded: {error}") from None
    return media


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _refuse_unknown(record: Mapping[str, Any], valid: Sequence[str], what: str) -> None:
    for name in record:
        if name not in valid:
            close = difflib.get_close_matches(str(name), valid, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise _Problem(f"unknown {what} {name!r}{hint}; valid: {', '.join(valid)}")


def _kind(value: Any) -> str:
    names = {
        type(None): "nothing",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        bytes: "bytes",
    }
    names |= {list: "a list" if value else "an empty list", dict: "a mapping"}
    return names.get(type(value), type(value).__name__)
