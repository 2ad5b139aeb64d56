"""A server with an OpenAI-compatible interface (vLLM, llama.cpp, SGLang): greedy answers with their log-probabilities.

Only the given address is contacted: no redirect is followed, no proxy is used.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.page.text import one_line

CHAT, MODELS, VERSION_PATH = "/chat/completions", "/models", "/v1"
TOP_LOGPROBS = 10
TIMEOUT = 300.0  # seconds for one answer
ATTEMPTS = 4
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a server that is busy is asked again
BUSY = (429, 500, 502, 503, 504)
REFUSED = (400, 404, 422, 501)  # what servers say of options that they do not have
MOST_BYTES = 2**26  # of a reply
MESSAGE_LENGTH = 300
EXAMPLE = "http://localhost:8000/v1"
NO_PROBABILITY = -1000.0  # vLLM writes -9999 and llama.cpp the lowest number where there is none
AUDIO = ((b"RIFF", "wav"), (b"fLaC", "flac"), (b"OggS", "ogg"))


@dataclass(frozen=True)
class Token:
    """A token of an answer: its bytes, its log-probability, and the likeliest tokens in its place with theirs."""

    data: bytes
    top: Mapping[bytes, float]


@dataclass(frozen=True)
class Reply:
    """An answer; without `tokens` where the server gives no log-probabilities."""

    text: str
    finished: bool
    tokens: Sequence[Token] | None = None


class ChatServer:
    """A server that is asked at `url`: its root, its /v1, or its /v1/chat/completions."""

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout: float = TIMEOUT) -> None:
        self.url = url
        self._secure, self._host, self._port, self._base = _parsed(url)
        self._key, self._timeout = _header(key), timeout
        self._log_probabilities = True
        self._connections: set[http.client.HTTPConnection] = set()
        self._ended = False
        self.model = model if model is not None else self._only_model()

    def answer(self, prompt: Prompt, max_tokens: int) -> Reply:
        """The greedy answer to a prompt."""
        asked = {"model": self.model, "messages": chat_messages(prompt), "max_tokens": max_tokens}
        asked |= {"temperature": 0, "stream": False}
        further = {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if self._log_probabilities else {}
        status, content = self._ask("POST", CHAT, asked | further)
        if further and status in REFUSED and b"logprob" in content.lower():
            self._log_probabilities = False
            status, content = self._ask("POST", CHAT, asked)
        reply = self._content(status, content, CHAT)
        try:
            return read_reply(reply)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise OnPTQError(
                f"{self.url} answered {prompt} with something else than a chat completion ({type(error).__name__}: {error}): "
                f"{self._safe(json.dumps(reply))}"
            ) from None

    def end(self) -> None:
        """Wait for no reply any longer: those who do get an error at once."""
        self._ended = True
        for connection in tuple(self._connections):
            with suppress(OSError, AttributeError):  # it is not yet or no longer open
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _only_model(self) -> str:
        status, content = self._ask("GET", MODELS)
        reply = self._content(status, content, MODELS)
        listed = reply.get("data") if isinstance(reply, dict) else None
        names = [str(one["id"]) for one in listed or () if isinstance(one, dict) and "id" in one]
        if len(names) != 1:
            shown = one_line(", ".join(names), MESSAGE_LENGTH) or "none"
            raise OnPTQError(f"{self.url} lists {len(names)} models ({shown}); say which one is meant: --model NAME")
        return names[0]

    def _content(self, status: int, content: bytes, path: str) -> Any:
        """The JSON of a reply that says that all went well."""
        if status != http.client.OK:
            what = "redirects, which is not followed" if 300 <= status < 400 else f"answered {status}"
            raise OnPTQError(f"{self.url} {what} ({path}): {self._safe(_message(content)) or 'without a message'}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            text = self._safe(content.decode(errors="replace"))
            raise OnPTQError(f"{self.url} answered with no JSON ({path}): {text or 'nothing'}") from None

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """The status and the content of the reply; a busy server is asked again, after longer and longer waits."""
        wait = FIRST_WAIT
        for attempt in range(1, ATTEMPTS + 1):
            status, content, after = self._once(method, path, body)
            if status not in BUSY or attempt == ATTEMPTS or self._ended:
                break
            time.sleep(min(LONGEST_WAIT, max(wait, after)))
            wait *= 2
        return status, content

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes, float]:
        """Status, content, and the seconds that the server wants to be left alone."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        ends = time.monotonic() + self._timeout
        self._connections.add(connection)
        try:
            connection.connect()
            if self._ended:  # looked at once `end` can find the open socket
                raise OSError("another request failed")
            connection.request(method, self._base + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            content = bytearray()
            while part := response.read1(2**16):
                content += part
                if len(content) > MOST_BYTES:
                    raise OnPTQError(f"{self.url} answered with more than {MOST_BYTES / 2**20:g} MiB ({path})")
                if time.monotonic() > ends:
                    raise TimeoutError
            return response.status, bytes(content), _seconds(response.getheader("Retry-After"))
        except TimeoutError:
            raise OnPTQError(
                f"{self.url} did not answer within {self._timeout:g} s ({path}); give it more with --timeout"
            ) from None
        except http.client.HTTPException as error:
            said = self._safe(f"{type(error).__name__}: {error}")
            raise OnPTQError(f"{self.url} does not answer as a web server does ({path}): {said}") from None
        except (OSError, UnicodeError) as error:
            raise OnPTQError(f"cannot reach {self.url}: {getattr(error, 'strerror', None) or error}") from None
        finally:
            self._connections.discard(connection)
            connection.close()

    def _safe(self, text: str) -> str:
        """What a server said, in one short line, without the key."""
        return one_line(text.replace(self._key, "***") if self._key else text, MESSAGE_LENGTH)


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


def read_reply(reply: Mapping[str, Any]) -> Reply:
    """The first choice of a chat completion; what was said as reasoning comes before the answer."""
    choice = reply["choices"][0]
    message = choice["message"]
    said = [message.get("reasoning_content") or message.get("reasoning"), message["content"]]
    text = "\n\n".join(_text(part) for part in said if part is not None)
    listed = (choice.get("logprobs") or {}).get("content")
    tokens = [_token(one) for one in listed] if listed else None
    return Reply(text, choice.get("finish_reason") == "stop", tokens)


def _token(one: Mapping[str, Any]) -> Token:
    """Of tokens with the same text, as special ones may have, the likeliest is kept."""
    own, top = _bytes(one), dict[bytes, float]()
    for other in (*(one.get("top_logprobs") or ()), one):
        value = float(other["logprob"])
        if math.isfinite(value) and value > NO_PROBABILITY:
            top[_bytes(other)] = max(value, top.get(_bytes(other), value))
    return Token(own, top if own in top else {})


def _bytes(one: Mapping[str, Any]) -> bytes:
    given = one.get("bytes")
    return bytes(given) if given is not None else str(one["token"]).encode("utf-8", errors="replace")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def _parsed(url: str) -> tuple[bool, str, int | None, str]:
    """Whether it is https, host, port, and the path before /chat/completions."""
    expected = f"expected an address such as {EXAMPLE}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise OnPTQError(f"{url!r} is no address of a server ({error}); {expected}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OnPTQError(f"{url!r} is no address of a server; {expected}")
    if parts.username is not None or parts.password is not None:
        raise OnPTQError(
            f"the address of {parts.hostname} has a name or a password in it; give a key with --key-env NAME"
        )
    if parts.query or parts.fragment or any(not 32 < ord(letter) < 127 for letter in url):
        raise OnPTQError(f"{url!r} has more in it than host, port and path; {expected}")
    path = parts.path.rstrip("/").removesuffix(CHAT)
    return parts.scheme == "https", parts.hostname, port, path or VERSION_PATH


def _header(key: str | None) -> str | None:
    """The key, which is never shown, not even where it is wrong."""
    if key is not None and not (key and all(32 < ord(letter) < 127 for letter in key)):
        raise OnPTQError("the key of the servers is empty or has blanks or other characters that no key has")
    return key


def _message(content: bytes) -> str:
    """What the body of an error says."""
    text = content.decode(errors="replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)


def _seconds(after: str | None) -> float:
    return float(after) if after is not None and after.isascii() and after.isdigit() else 0.0


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
