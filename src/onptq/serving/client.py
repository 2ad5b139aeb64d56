"""A client of servers with an OpenAI-compatible interface (vLLM, llama.cpp, SGLang).

Only the given address is contacted: no redirect is followed, no proxy is used.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from onptq.errors import OnPTQError, printable

CHAT, COMPLETIONS, MODELS, VERSION_PATH = "/chat/completions", "/completions", "/models", "/v1"
ATTEMPTS = 4
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a busy server gets a request again
BUSY = (429, 500, 502, 503, 504)
MOST_BYTES = 2**26  # of a reply
MESSAGE_LENGTH = 300
EXAMPLE = "http://localhost:8000/v1"


class Client:
    """A server at `url`: its root, its /v1, or its /v1/chat/completions. Threads may share a client."""

    def __init__(
        self, url: str, *, key: str | None = None, timeout: float, advice: str = "", version: str = VERSION_PATH
    ) -> None:
        """`advice` is added to the error of a server that does not answer within `timeout` seconds; `version` is the path
        that all others follow, where the address has none."""
        self.url = url
        self._secure, self._host, self._port, path = parsed(url)
        self._base = path or version
        self._key, self._timeout, self._advice = _header(key), timeout, advice
        self._connections: set[http.client.HTTPConnection] = set()
        self._ended = False

    @property
    def port(self) -> int | None:
        return self._port

    def models(self) -> Sequence[Mapping[str, Any]]:
        """The models that the server lists, each with an `id`."""
        status, content = self.ask("GET", MODELS)
        reply = self.content(status, content, MODELS)
        listed = reply.get("data") if isinstance(reply, dict) else None
        return [one for one in listed or () if isinstance(one, dict) and "id" in one]

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON reply to a JSON request."""
        return self.content(*self.ask("POST", path, body), path)

    def end(self) -> None:
        """Wait for no reply any longer: those who do get an error at once."""
        self._ended = True
        for connection in tuple(self._connections):
            with suppress(OSError, AttributeError):  # it is not yet or no longer open
                connection.sock.shutdown(socket.SHUT_RDWR)

    def content(self, status: int, content: bytes, path: str) -> Any:
        """The JSON of a reply that says that all went well."""
        if status != http.client.OK:
            what = "redirects, which is not followed" if 300 <= status < 400 else f"answered {status}"
            raise OnPTQError(f"{self.url} {what} ({path}): {self.safe(_message(content)) or 'without a message'}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            text = self.safe(content.decode(errors="replace"))
            raise OnPTQError(f"{self.url} answered with no JSON ({path}): {text or 'nothing'}") from None

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """The status and the content of the reply; a busy server gets the request again, after longer and longer waits."""
        wait = FIRST_WAIT
        for attempt in range(1, ATTEMPTS + 1):
            status, content, after = self.once(method, path, body)
            if status not in BUSY or attempt == ATTEMPTS or self._ended:
                break
            time.sleep(min(LONGEST_WAIT, max(wait, after)))
            wait *= 2
        return status, content

    def once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes, float]:
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
            advice = f"; {self._advice}" if self._advice else ""
            raise OnPTQError(f"{self.url} did not answer within {self._timeout:g} s ({path}){advice}") from None
        except http.client.HTTPException as error:
            said = self.safe(f"{type(error).__name__}: {error}")
            raise OnPTQError(f"{self.url} does not answer as a web server does ({path}): {said}") from None
        except (OSError, UnicodeError) as error:
            raise OnPTQError(f"cannot reach {self.url}: {getattr(error, 'strerror', None) or error}") from None
        finally:
            self._connections.discard(connection)
            connection.close()

    def safe(self, text: str) -> str:
        """What a server said, in one short line, without the key."""
        return shortened(text.replace(self._key, "***") if self._key else text)


def shortened(text: str) -> str:
    """The text in one line of at most `MESSAGE_LENGTH` characters that all can be printed."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= MESSAGE_LENGTH else line[: MESSAGE_LENGTH - 1].rstrip() + "…"


def parsed(url: str) -> tuple[bool, str, int | None, str]:
    """Whether it is https, host, port, and the path before /chat/completions; empty where there is none."""
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
            f"the address of {parts.hostname} has a name or a password in it; give a key with --key-env NAME (onptq diff) or "
            "in VLLM_API_KEY (onptq quantize)"
        )
    if parts.query or parts.fragment or any(not 32 < ord(letter) < 127 for letter in url):
        raise OnPTQError(f"{url!r} has more in it than host, port and path; {expected}")
    path = parts.path.rstrip("/").removesuffix(CHAT)
    return parts.scheme == "https", parts.hostname, port, path


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
