"""Prompts of a server's request log: vLLM's own lines, and JSON that holds requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onptq.data.chat import read_chat
from onptq.data.collected import Collected, Excluded, LeftOut, collect
from onptq.data.manifest import MAX_LINE, Reader
from onptq.data.prompts import Prompt
from onptq.data.rendered import CUT_SHORT, WITHOUT_MEDIA, read_rendered
from onptq.errors import OnPTQError
from onptq.progress import QuietReporter, Reporter

EXPECTED = "expected lines of vLLM with `prompt:`, or JSON with `messages` or `prompt`"
WITHOUT_TEXT = "their text is not in the log (vLLM after 0.11.0 writes it with VLLM_LOGGING_LEVEL=DEBUG)"
REDACTED = "the proxy has left out their text"
REDACTIONS = ("redacted-by-litellm",)
MARKS = (b"messages", b"prompt", b"Received request")
DEPTH = 6  # of wrappings around a request
# Up to vLLM 0.11.0 `Received request ID: prompt: '...', params: ...`; later `Request ID details: prompt: '...', ...` at
# level DEBUG and then `Received request ID: params: ...`.
LOGGED = re.compile(r"(?:Received request|Request) (?P<id>\S+?)(?: details)?: prompt: ")
QUOTED = re.compile(r"(?:None|'([^'\\]*+(?:\\.[^'\\]*+)*+)'|\"([^\"\\]*+(?:\\.[^\"\\]*+)*+)\")(?=, \w+: )")
NOT_LOGGED = re.compile(r"Received request (?P<id>\S+?): params: ")
ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
NAMED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
NGINX_FIELD, NGINX_ESCAPE = re.compile(rb"\\x22(?:messages|prompt)\\x22"), re.compile(rb"\\x([0-9A-Fa-f]{2})")

Record = Mapping[str, Any]


def server_prompts(logs: Sequence[Path], reporter: Reporter | None = None) -> Collected:
    """The prompts of all requests that the logs hold whole."""
    entries: list[Prompt | LeftOut] = []
    lines = 0
    with (reporter or QuietReporter()).phase("Read logs", unit="lines") as bar:
        for log in logs:
            reader, seen = Reader(log, None), set[str]()
            for number, line in enumerate(_lines(log), 1):
                bar.advance()
                lines += 1
                entries += _read_line(reader, line, number, seen)
    read = f"{len(entries)} requests in {lines} lines of {', '.join(map(str, logs))}"
    return collect(read, entries, f"no prompt was found that can be used: {EXPECTED}")


def _lines(log: Path) -> Iterator[bytes]:
    if log.exists() and not log.is_file():
        raise OnPTQError(f"cannot read the log {log}: not a regular file")
    try:
        with log.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                if b"\0" in line or line.startswith(b"\x1f\x8b"):
                    raise OnPTQError(f"{log} line {number} is not text: expected a log, unpacked where it was packed")
                if len(line) == MAX_LINE:
                    raise OnPTQError(f"{log} line {number} is longer than {MAX_LINE / 2**20:g} MiB")
                yield line
    except OSError as error:
        raise OnPTQError(f"cannot read the log {log}: {error.strerror or error}") from None


def _read_line(reader: Reader, line: bytes, number: int, seen: set[str]) -> list[Prompt | LeftOut]:
    if not any(mark in line for mark in MARKS):
        return []
    place = f"line {number}"
    entries: list[Prompt | LeftOut] = []
    try:
        for record in requests_in(_decode(line), seen):
            if any(not _embedded(source) for sources in read_chat(record).media.values() for source in sources):
                raise Excluded(WITHOUT_MEDIA)
            prompt = reader.read(record, len(reader.places), place)
            entries.append(replace(prompt, id=f"{reader.manifest.stem}-{number}"))
    except OnPTQError as error:
        entries.append(LeftOut.because(error, f"{reader.manifest} {place}"))
    return entries


def _embedded(source: Any) -> bool:
    """Whether a file is in the log. Paths are not followed: whoever sent the request chose them."""
    return not isinstance(source, str) or source.startswith("data:")


def _decode(line: bytes) -> str:
    """The line as text; nginx writes quotes and all that is not ASCII as \\xNN."""
    if NGINX_FIELD.search(line) and not line.lstrip().startswith(b"{"):
        line = NGINX_ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), line)
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise OnPTQError(f"not UTF-8 text (byte {error.start + 1})") from None


def requests_in(line: str, seen: set[str], depth: int = 0) -> Iterator[Record]:
    """The records of the requests in a line. `seen` are the ids of those whose text was in an earlier one."""
    logged = LOGGED.search(line)
    brace = line.find("{")
    if logged and not 0 <= brace < logged.start():
        seen.add(logged["id"])
        yield read_rendered(_quoted(line, logged.end()))
    elif (bare := NOT_LOGGED.search(line)) and not 0 <= brace < bare.start():
        if bare["id"] not in seen:
            raise Excluded(WITHOUT_TEXT)
    else:
        for value in _objects(line, brace):
            yield from _requests(value, seen, depth)


def _quoted(line: str, start: int) -> str:
    quoted = QUOTED.match(line, start)
    if quoted is None:
        raise Excluded(CUT_SHORT)
    text = quoted[1] if quoted[1] is not None else quoted[2]
    if text is None:
        raise Excluded(WITHOUT_TEXT)
    return unescape(text)


def unescape(text: str) -> str:
    """What stands between the quotes of Python's repr() of a text, without its escapes.

    The line is a stranger's text, so that no parser of Python sees it: repr() writes seven kinds of escapes, each of them
    becomes the one character it stands for, and any other is an error. Nothing is evaluated.
    """

    def character(match: re.Match[str]) -> str:
        *digits, letter = match.groups()
        code = next((one for one in digits if one), None)
        if code is None and letter in NAMED:
            return NAMED[letter]
        if code is None or int(code, 16) > 0x10FFFF:
            raise OnPTQError(f"the prompt has an escape {match[0]!r} that no server writes")
        return chr(int(code, 16))

    return ESCAPE.sub(character, text)


def _objects(line: str, start: int) -> Iterator[dict[str, Any]]:
    """The JSON objects in a line."""
    decoder = json.JSONDecoder()
    for _ in range(32):  # a brace that begins nothing is passed over, but not thousands of them
        if start < 0:
            return
        try:
            value, end = decoder.raw_decode(line, start)
            yield value
        except (ValueError, RecursionError):
            end = start + 1
        start = line.find("{", end)


def _requests(value: dict[str, Any], seen: set[str], depth: int) -> Iterator[Record]:
    """The request that an object is, or else those of its first field that holds any."""
    messages = _json(value.get("messages"))
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        if any(one.get("content") in REDACTIONS for one in messages):
            raise Excluded(REDACTED)
        yield {"messages": messages}
    elif isinstance(value.get("prompt"), str):
        yield read_rendered(value["prompt"])
    elif depth < DEPTH:
        for inner in map(_json, value.values()):
            inside: list[Record] = []
            if isinstance(inner, dict):
                inside = list(_requests(inner, seen, depth + 1))
            elif isinstance(inner, str) and any(mark.decode() in inner for mark in MARKS):
                inside = list(requests_in(inner, seen, depth + 1))
            if inside:
                yield from inside
                return


def _json(value: Any) -> Any:
    """The value; where it is text that is a JSON object or list, what that holds."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
