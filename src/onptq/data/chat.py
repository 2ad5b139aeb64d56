"""One record of a manifest as chat messages: plain text, OpenAI and Hugging Face messages, ShareGPT conversations."""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onptq.errors import OnPTQError

TEXTS = ("text", "prompt", "question")
BODIES = ("messages", "conversations", *TEXTS)
MEDIA = ("image", "audio")
FIELDS = ("id", *BODIES, "system", *MEDIA, "images", "audios")
ROLES = ("system", "user", "assistant")
SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
TOOLS = ("tool_calls", "tool_call_id", "function_call")
SOURCES = ("url", "path", "base64")  # where a part of Hugging Face's format names its file, besides `image` or `audio`
NESTED = {"image_url": ("image", "url"), "audio_url": ("audio", "url"), "input_audio": ("audio", "data")}  # OpenAI's
PARTS = ("text", *MEDIA, *NESTED)
LIKELY_TYPO = 0.85
_PLACEHOLDER = re.compile(r"\s*<(image|audio)>\s*")


@dataclass(frozen=True)
class Chat:
    messages: Sequence[Mapping[str, Any]]  # every content is a list of parts, see onptq.data.prompts.Prompt
    media: Mapping[str, Sequence[Any]]  # by kind, in order of appearance: a path, data URL, bytes, or {"bytes", "path"}
    answered: bool  # whether the conversation ended with the assistant, and was cut before that
    extra: Mapping[str, Any]  # columns that are no part of the format


def read_chat(record: Mapping[str, Any]) -> Chat:
    """The messages and media of a record, up to the last turn of the user."""
    extra = {name: value for name, value in record.items() if name not in FIELDS}
    if not any(name in record for name in BODIES):
        refuse_typos(extra, BODIES, "column", cutoff=0.6)
    missing = [name for kind in MEDIA if kind not in record and f"{kind}s" not in record for name in (kind, f"{kind}s")]
    refuse_typos(extra, missing, "column")
    attached = {kind: _attached(record, kind) for kind in MEDIA}
    body = _body(record)
    value = record[body]
    if body == "conversations":
        messages = _from_sharegpt(value, record.get("system"))
    elif body == "messages" or isinstance(value, list):
        messages = _from_messages(value, body, [kind for kind in MEDIA if attached[kind]])
    else:
        parts = [{"type": kind} for kind in MEDIA for _ in attached[kind]]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": check_text(value, body)}]}]
    turns = list(messages)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or turns[-1]["role"] != "user":
        last = (turns or messages)[-1]["role"]
        raise OnPTQError(f"the last message must be the user's, which the model answers; got {last!r}")
    named: dict[str, list[Any]] = {kind: [] for kind in MEDIA}  # None where a part names no file itself
    read = [
        {"role": message["role"], "content": [_read_part(part, named) for part in message["content"]]}
        for message in turns
    ]
    return Chat(read, _match_media(named, attached), len(turns) < len(messages), extra)


def check_text(value: Any, name: str = "text") -> str:
    """The value, where it is text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise OnPTQError(f"`{name}` must be text, got {kind_of(value)}")
    if not value.strip():
        raise OnPTQError(f"`{name}` must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise OnPTQError(f"`{name}` is not valid Unicode: {value[:80]!r}") from None
    return value


def kind_of(value: Any) -> str:
    """The kind of a JSON value, in the words of an error."""
    names = {type(None): "nothing", bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {bytes: "bytes", list: "a list" if value else "an empty list", dict: "a mapping"}
    return names.get(type(value), type(value).__name__)


def refuse_typos(names: Iterable[str], valid: Sequence[str], what: str, cutoff: float = LIKELY_TYPO) -> None:
    """Raise where a name is so close to a valid one that ignoring it would hide a mistake."""
    for name in names:
        if close := difflib.get_close_matches(str(name), valid, n=1, cutoff=cutoff):
            raise OnPTQError(f"unknown {what} {name!r} (did you mean {close[0]}?); valid: {', '.join(valid)}")


def _body(record: Mapping[str, Any]) -> str:
    """The column that holds the prompt. `prompt` and `question` count only where no other one is there."""
    present = [name for name in BODIES if name in record]
    named = [name for name in present if name not in TEXTS[1:]] or present
    if len(named) != 1:
        expected = ", ".join(f"`{name}`" for name in BODIES)
        raise OnPTQError(f"expected exactly one of {expected}; got {' and '.join(named) if named else 'none'}")
    return named[0]


def _attached(record: Mapping[str, Any], kind: str) -> list[Any]:
    """The media of the record itself: `image` or `images`, one or a list."""
    if kind in record and f"{kind}s" in record:
        raise OnPTQError(f"expected one of `{kind}` and `{kind}s`, got both")
    value = record.get(kind, record.get(f"{kind}s", []))
    return value if isinstance(value, list) else [value]


def _from_messages(messages: Any, name: str, attached: Sequence[str]) -> list[dict[str, Any]]:
    """Messages with lists of parts. `<image>` in plain text stands for an image where images are `attached`."""
    if not isinstance(messages, list) or not messages:
        raise OnPTQError(f"`{name}` must be a list of at least one message, got {kind_of(messages)}")
    return [_check_message(message, attached) for message in messages]


def _check_message(message: Any, attached: Sequence[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise OnPTQError(f"a message must have `role` and `content`, got {kind_of(message)}")
    if tools := [name for name in TOOLS if name in message]:
        raise OnPTQError(f"a message has `{tools[0]}`: conversations with tools are not supported")
    refuse_typos(message, [name for name in ("role", "content") if name not in message], "field of a message")
    if message.get("role") not in ROLES:
        raise OnPTQError(f"`role` must be one of {', '.join(ROLES)}; got {message.get('role')!r}")
    content = message.get("content")
    if isinstance(content, str):
        content = _split_placeholders(content, attached)
    if not isinstance(content, list) or not content:
        raise OnPTQError(f"`content` must be text or a list of parts, got {kind_of(content)}")
    return {"role": message["role"], "content": content}


def _from_sharegpt(turns: Any, system: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise OnPTQError(f"`conversations` must be a list of at least one turn, got {kind_of(turns)}")
    messages = [] if system in (None, "") else [_check_message({"role": "system", "content": system}, ())]
    for turn in turns:
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(_check_message(turn, MEDIA))  # some write them with role and content
            continue
        if not isinstance(turn["from"], str) or turn["from"] not in SHAREGPT:
            raise OnPTQError(f"`from` must be one of {', '.join(SHAREGPT)}; got {turn['from']!r}")
        text = check_text(turn.get("value"), "value")
        messages.append({"role": SHAREGPT[turn["from"]], "content": _split_placeholders(text, MEDIA)})
    return messages


def _split_placeholders(text: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The text as parts. `<image>` and `<audio>`, of these kinds, become parts of their own, without space around."""
    parts: list[dict[str, Any]] = []
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        if match[1] in kinds:
            parts += [{"type": "text", "text": text[end : match.start()]}] if text[end : match.start()] else []
            parts.append({"type": match[1]})
            end = match.end()
    return parts + ([{"type": "text", "text": text[end:]}] if text[end:] or not parts else [])


def _read_part(part: Any, named: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The part as a prompt has it; the file of a media part is appended to `named`."""
    form = part.get("type") if isinstance(part, dict) else None
    if form not in PARTS:
        shown = f"type {form!r}" if isinstance(part, dict) else kind_of(part)
        raise OnPTQError(f"a content part must be a mapping with a type of {', '.join(PARTS)}; got {shown}")
    valid = (form, *SOURCES) if form in MEDIA else (form,)
    for name in part:
        if name not in ("type", *valid):
            refuse_typos([name], valid, "field of a part")
            raise OnPTQError(f"unknown field {name!r} of a part of type {form}; valid: {', '.join(valid)}")
    if form == "text":
        return {"type": "text", "text": check_text(part.get("text"))}
    kind, key = NESTED.get(form, (form, ""))
    given = [(name, part[name]) for name in valid if name in part]
    if len(given) > 1:
        raise OnPTQError(f"a part of type {form} names its file twice: {given[0][0]} and {given[1][0]}; expected one")
    if form in NESTED:
        name, source = given[0] if given else (form, None)
        source = source.get(key) if isinstance(source, dict) else source
        if source is None:
            raise OnPTQError(f"a part of type {form} must have `{form}` with `{key}`")
        name = "base64" if key == "data" else name
    else:
        name, source = given[0] if given else (form, None)
    named[kind].append(decode_base64(source, kind) if name == "base64" else source)
    return {"type": kind}


def decode_base64(text: Any, kind: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise OnPTQError(f"{kind} is not valid base64: {error}") from None


def _match_media(named: Mapping[str, list[Any]], attached: Mapping[str, list[Any]]) -> Mapping[str, list[Any]]:
    """The media of the parts: those they name, or else those beside the messages, in order."""
    if not any(source is not None for sources in named.values() for source in sources):
        for kind in MEDIA:
            if len(named[kind]) != len(attached[kind]):
                raise OnPTQError(f"{len(named[kind])} {kind} parts in the messages, {len(attached[kind])} {kind} files")
        return attached
    if any(attached.values()):
        raise OnPTQError("media are named both in the messages' parts and beside them: expected one of the two")
    for kind, sources in named.items():
        if None in sources:
            raise OnPTQError(f"{kind} part {sources.index(None) + 1} names no file, though other parts do")
    return named
