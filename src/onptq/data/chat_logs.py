"""Prompts of chat logs: what manifests hold too, and files of batch requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onptq.data.chat import BODIES, Chat, check_text, kind_of, read_chat
from onptq.data.collected import REMOTE, Collected, Excluded, LeftOut, collect
from onptq.data.manifest import SUFFIXES, Reader, decode_record, records
from onptq.data.media import read_file
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.progress import QuietReporter, Reporter

EXPECTED = "expected records with `messages`, `conversations`, `text` or `prompt`, or batch requests with a `body`"


def chat_prompts(files: Sequence[Path], every_turn: bool = False, reporter: Reporter | None = None) -> Collected:
    """The conversations of all files, up to the user's last turn; with `every_turn` up to each of them."""
    entries: list[Prompt | LeftOut] = []
    count = 0
    with (reporter or QuietReporter()).phase("Read chats", unit="chats") as bar:
        for file in files:
            reader = Reader(file, None)
            for number, (place, raw) in enumerate(_records(file), 1):
                bar.advance()
                count += 1
                try:
                    prompt = _read(reader, raw, f"{file.stem}-{number}", place)
                    entries += turns(prompt) if every_turn else [prompt]
                except OnPTQError as error:
                    entries.append(LeftOut.because(error, f"{file} {place}"))
    read = f"{count} records of {', '.join(map(str, files))}"
    return collect(read, entries, f"no prompt was found that can be used: {EXPECTED}")


def turns(prompt: Prompt) -> Iterator[Prompt]:
    """The prompt up to each turn of the user that was answered, and up to the last."""
    ends = [
        end
        for end, message in enumerate(prompt.messages, 1)
        if message["role"] == "user" and (end == len(prompt.messages) or prompt.messages[end]["role"] == "assistant")
    ]
    for turn, end in enumerate(ends, 1):
        kinds = [part["type"] for message in prompt.messages[:end] for part in message["content"]]
        yield Prompt(
            prompt.ordinal,
            prompt.id if len(ends) == 1 else f"{prompt.id}/{turn}",
            prompt.messages[:end],
            prompt.images[: kinds.count("image")],
            prompt.audios[: kinds.count("audio")],
            prompt.place,
            prompt.extra,
        )


def addresses(chat: Chat) -> list[str]:
    """The media of a chat that would have to be downloaded."""
    sources = [source for sources in chat.media.values() for source in sources if isinstance(source, str)]
    return [one for one in sources if not one.startswith(("file:///", "data:")) and "://" in one]


def _read(reader: Reader, raw: bytes | dict[str, Any], name: str, place: str) -> Prompt:
    """The prompt of a record. Its id is not for the reader to check: several files may have the same one."""
    record = decode_record(raw)
    given = record.pop("id", record.get("custom_id"))
    chat = _body(record)
    if addresses(read_chat(chat)):
        raise Excluded(REMOTE)
    prompt = reader.read(chat, len(reader.places), place)
    return replace(prompt, id=check_text(str(given), "id") if isinstance(given, str | int) else name)


def _body(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record, or the body of a request, of which all that is not the prompt are settings."""
    body = record.get("body")
    if isinstance(body, dict) and not any(name in record for name in BODIES):
        return {name: body[name] for name in BODIES if name in body}
    return record


def _records(file: Path) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """The records of a file with their places: those of a manifest, or a list of them in one JSON file."""
    if file.suffix.lower() != ".json":
        if file.suffix.lower() not in SUFFIXES:
            suffixes = ", ".join((*SUFFIXES, ".json"))
            raise OnPTQError(f"{file}: chats are in files that end in {suffixes}; got {file.suffix or 'no suffix'}")
        yield from records(file)
        return
    try:
        content = json.loads(read_file(file).decode("utf-8-sig"))
    except OSError as error:
        raise OnPTQError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise OnPTQError(f"{file} is not usable JSON ({str(error)[:80]}); {EXPECTED}") from None
    if not isinstance(content, list):
        raise OnPTQError(f"{file} holds {kind_of(content)}: expected a list of records, or a .jsonl file")
    for number, record in enumerate(content, 1):
        yield f"record {number}", record if isinstance(record, dict) else json.dumps(record).encode()
