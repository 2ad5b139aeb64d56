"""Calibration manifests: JSONL or parquet, a prompt per line or row, every image decoded and every file hashed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from onptq.data.chat import MEDIA, check_text, decode_base64, kind_of, read_chat
from onptq.data.media import MAX_BYTES, check_image, read_file
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.files import lies_inside

JSONL_SUFFIXES = (".jsonl", ".json-lines")
SUFFIXES = (*JSONL_SUFFIXES, ".parquet")
SHOWN_ERRORS = 10
MAX_LINE = 2 * MAX_BYTES
MAX_GROUP = 2**31  # bytes of a row group of a parquet, embedded media included
MEDIA_ROOT = "ONPTQ_MEDIA_ROOT"  # further folders that media may lie in, beside the manifest's own
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,")


def load_manifest(
    path: str | Path,
    *,
    modalities: frozenset[str] | None = None,
    limit: int | None = None,
    usable: Callable[[Prompt], object] | None = None,
    bad: list[str] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Prompt]:
    """Read and check every prompt, or the first `limit`; `modalities` are those the model can take (None: any).

    A bad prompt, or one that `usable` raises an OnPTQError for, is an error. With a list `bad` it is left out instead,
    and its error is appended there. `note` is called with ignored columns and with answers that ended a conversation.
    """
    manifest = Path(path)
    reader = Reader(manifest, modalities)
    prompts: list[Prompt] = []
    problems: list[str] = []
    for ordinal, (place, raw) in enumerate(records(manifest)):
        if limit is not None and len(prompts) + (0 if bad is not None else len(problems)) >= limit:
            break
        if bad is None and len(problems) == SHOWN_ERRORS:
            break
        label = f"{manifest} {place}"
        try:
            record = decode_record(raw)
            label += f" (id {record['id']!r})" if "id" in record else ""
            prompt = reader.read(record, ordinal, place)
            if usable is not None:
                usable(prompt)
            prompts.append(prompt)
        except OnPTQError as problem:
            problems.append(f"{label}: {problem}")
    stopped = f"\n(stopped after {SHOWN_ERRORS} errors)" if len(problems) >= SHOWN_ERRORS else ""
    shown = "\n".join(problems[:SHOWN_ERRORS]) + stopped
    if problems and bad is None:
        raise OnPTQError(shown)
    if not prompts:
        why = f":\n{shown}" if problems else ": expected at least one line or row with `text` or `messages`"
        raise OnPTQError(f"{manifest} has no {'usable ' if problems else ''}prompts{why}")
    if bad is not None:
        bad += problems
    for text in reader.notes(len(prompts)):
        note(f"{manifest}: {text}")
    return prompts


def manifest_digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256 over ids, messages and media contents, in order; where the files lie does not count."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, *_content(prompt)], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def repeated(prompts: Iterable[Prompt], others: Iterable[Prompt]) -> list[Prompt]:
    """Those of `prompts` whose messages and media are also those of one of `others`."""
    contents = {_text(prompt) for prompt in others}
    return [prompt for prompt in prompts if _text(prompt) in contents]


def without_repeats(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts, of those with the same messages and media only the first."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(_text(prompt), prompt)
    return list(first.values())


def _text(prompt: Prompt) -> str:
    return json.dumps(_content(prompt), sort_keys=True)


def _content(prompt: Prompt) -> list[Any]:
    media = [[item.sha256 for item in items] for items in (prompt.images, prompt.audios)]
    return [[dict(message) for message in prompt.messages], media]


def records(manifest: Path) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    suffix = manifest.suffix.lower()
    if suffix not in SUFFIXES:
        raise OnPTQError(f"{manifest}: a manifest ends in {', '.join(SUFFIXES)}; got {suffix or 'no suffix'}")
    if manifest.exists() and not (manifest.is_file() or manifest.is_dir()):
        raise OnPTQError(f"cannot read the manifest {manifest}: not a regular file")
    try:
        yield from _jsonl_lines(manifest) if suffix in JSONL_SUFFIXES else _parquet_rows(manifest)
    except OSError as error:
        raise OnPTQError(f"cannot read the manifest {manifest}: {error.strerror or error}") from error


def _jsonl_lines(manifest: Path) -> Iterator[tuple[str, bytes]]:
    with manifest.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
            if len(line) == MAX_LINE:
                raise OnPTQError(f"{manifest} line {number} is longer than {MAX_LINE / 2**20:g} MiB")
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
            _check_groups(manifest, table.metadata)
            for batch in table.iter_batches(batch_size=64):  # small: rows may embed whole images
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
        except (pa.ArrowException, UnicodeError) as error:
            raise OnPTQError(f"{manifest} is not a readable parquet file: {error}") from error


def _check_groups(manifest: Path, metadata: Any) -> None:
    """Refuse groups of rows that would fill the memory: a reader takes a whole one at a time."""
    for index in range(metadata.num_row_groups):
        size = metadata.row_group(index).total_byte_size
        if size > MAX_GROUP:
            raise OnPTQError(
                f"{manifest}: row group {index + 1} takes {size / 2**30:.1f} GiB; expected at most {MAX_GROUP / 2**30:g} GiB: "
                "write it with smaller ones (row_group_size) or name media by their paths"
            )


def decode_record(raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """The record without nulls: a parquet row has every column, and a null is a field that was not given."""
    if isinstance(raw, dict):
        return _without_nulls(raw)
    expected = 'expected one JSON object per line, e.g. {"id": "a", "text": "What is this?", "image": "a.png"}'
    try:
        record = json.loads(raw.decode())
        if isinstance(record, dict):
            return _without_nulls(record)
    except UnicodeDecodeError as error:
        raise OnPTQError(f"not UTF-8 text (byte {error.start + 1}); {expected}") from None
    except json.JSONDecodeError as error:
        raise OnPTQError(f"not valid JSON ({error.msg} at column {error.colno}); {expected}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise OnPTQError(f"not usable JSON ({str(error)[:80]}); {expected}") from None
    raise OnPTQError(f"{kind_of(record)}; {expected}")


def _without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(item) for item in value]
        return _without_nulls(value) if isinstance(value, dict) else value

    return {name: clean(value) for name, value in record.items() if value is not None}


@dataclass
class Reader:
    """A reader of records. A file that several of them name is read once.

    Files have to lie in the manifest's folder, in one of `roots`, or in a folder of MEDIA_ROOT."""

    manifest: Path
    modalities: frozenset[str] | None
    roots: tuple[Path, ...] = ()
    places: dict[str, str] = field(default_factory=dict)  # id -> where it was
    files: dict[tuple[str, Path], Media] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    answered: int = 0

    def read(self, record: Mapping[str, Any], ordinal: int, place: str) -> Prompt:
        chat, name = read_chat(record), _read_id(record, ordinal)
        for kind, sources in chat.media.items():
            if sources and self.modalities is not None and kind not in self.modalities:
                raise OnPTQError(f"has {kind}, but this model takes only {', '.join(sorted(self.modalities))}")
        media = {kind: tuple(self._fetch(kind, source) for source in chat.media[kind]) for kind in MEDIA}
        if name in self.places:
            raise OnPTQError(f"id {name!r} is already taken by {self.places[name]}: ids must be unique")
        self.places[name] = place
        self.answered += chat.answered
        self.ignored.update(chat.extra.keys())
        where = f"{self.manifest.name} {place}"
        return Prompt(ordinal, name, chat.messages, media["image"], media["audio"], where, chat.extra)

    def notes(self, prompts: int) -> Iterator[str]:
        if self.ignored:
            yield f"columns that are not used: {', '.join(map(repr, sorted(self.ignored)))}"
        if self.answered:
            yield (
                f"{self.answered} of {prompts} conversations end with the assistant: cut after the user's last turn, "
                "which the model answers itself"
            )

    def _fetch(self, kind: str, source: Any) -> Media:
        name, data = _locate(kind, source)
        if data is not None:
            return check_media(kind, "embedded in the manifest", data, Media(None, _sha256(data), data))
        path = self.manifest.parent / name
        if not any(lies_inside(root, path) for root in (self.manifest.parent, *self.roots, *allowed_roots())):
            raise OnPTQError(
                f"{kind} {name!r} lies outside the manifest's folder; where it is to be read, set "
                f"{MEDIA_ROOT}={shlex.quote(str(path.resolve().parent))} (several folders are divided by {os.pathsep!r})"
            )
        if (kind, path) not in self.files:
            try:
                data = read_file(path)
            except FileNotFoundError:
                raise OnPTQError(f"{kind} {name!r} not found (looked for {str(path.absolute())!r})") from None
            except OSError as error:
                raise OnPTQError(f"{kind} {name!r} cannot be read: {error.strerror or error}") from None
            self.files[kind, path] = check_media(kind, repr(name), data, Media(path.absolute(), _sha256(data)))
        return self.files[kind, path]


def allowed_roots() -> list[Path]:
    """The folders of MEDIA_ROOT."""
    return [Path(root) for root in os.environ.get(MEDIA_ROOT, "").split(os.pathsep) if root]


def _read_id(record: Mapping[str, Any], ordinal: int) -> str:
    value = record.get("id", ordinal)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise OnPTQError(f"`id` must be text or a whole number, got {kind_of(value)}")
    return check_text(str(value), "id")


def _locate(kind: str, source: Any) -> tuple[str, bytes | None]:
    """A path, or the bytes themselves: alone, as a data URL, or as {"bytes": ..., "path": ...}."""
    if isinstance(source, dict) and source.keys() <= {"bytes", "path"}:
        source = source.get("bytes", source.get("path"))
    if isinstance(source, bytes):
        return "", source
    if not isinstance(source, str) or not source or "\0" in source:
        raise OnPTQError(f"{kind} must be a path, a data URL, or bytes in a parquet; got {kind_of(source)}")
    if source.startswith("data:"):
        header = _DATA_URL.match(source)
        if header is None:
            raise OnPTQError(f"{kind} {source[:40]!r}... is no data URL of the form data:{kind}/TYPE;base64,DATA")
        return "", decode_base64(source[header.end() :], kind)
    source = check_text(unquote(source.removeprefix("file://")) if source.startswith("file:///") else source, kind)
    if "://" in source:
        raise OnPTQError(f"{kind} {source!r} is an address: expected a file or a data URL, nothing is downloaded")
    return source, None


def check_media(kind: str, name: str, data: bytes, media: Media) -> Media:
    if not data:
        raise OnPTQError(f"{kind} {name} is empty")
    if len(data) > MAX_BYTES:
        raise OnPTQError(f"{kind} {name} is larger than {MAX_BYTES / 2**20:g} MiB")
    if kind == "image":
        try:
            check_image(data)  # Pillow's `verify` alone does not notice a truncated JPEG
        except Exception as error:  # Pillow's decoders let through whatever they stumble over
            raise OnPTQError(f"image {name} cannot be decoded: {error}") from None
    return media


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
