"""Greedy answers with their log-probabilities of a server with an OpenAI-compatible interface (vLLM, llama.cpp, SGLang)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.serving.client import CHAT, Client, shortened
from onptq.serving.messages import chat_messages

TOP_LOGPROBS = 10
TIMEOUT = 300.0  # seconds for one answer
REFUSED = (400, 404, 422, 501)  # what servers say of options that they do not have
NO_PROBABILITY = -1000.0  # vLLM writes -9999 and llama.cpp the lowest number where there is none


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


class ChatServer(Client):
    """A server at `url`: its root, its /v1, or its /v1/chat/completions."""

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout: float = TIMEOUT) -> None:
        super().__init__(url, key=key, timeout=timeout, advice="give it more with --timeout")
        self._log_probabilities = True
        self.model = model if model is not None else self._only_model()

    def answer(self, prompt: Prompt, max_tokens: int) -> Reply:
        """The greedy answer to a prompt."""
        request = {"model": self.model, "messages": chat_messages(prompt), "max_tokens": max_tokens}
        request |= {"temperature": 0, "stream": False}
        further = {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if self._log_probabilities else {}
        status, content = self.ask("POST", CHAT, request | further)
        if further and status in REFUSED and b"logprob" in content.lower():
            self._log_probabilities = False
            status, content = self.ask("POST", CHAT, request)
        reply = self.content(status, content, CHAT)
        try:
            return read_reply(reply)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise OnPTQError(
                f"{self.url} answered {prompt} with something else than a chat completion ({type(error).__name__}: {error}): "
                f"{self.safe(json.dumps(reply))}"
            ) from None

    def _only_model(self) -> str:
        names = [str(one["id"]) for one in self.models()]
        if len(names) != 1:
            shown = shortened(", ".join(names)) or "none"
            raise OnPTQError(f"{self.url} lists {len(names)} models ({shown}); say which one is meant: --model NAME")
        return names[0]


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
    """The token with its competitors; of several with the same text, as special ones may have, the likeliest."""
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
