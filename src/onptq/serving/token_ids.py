"""Responses of vLLM as exact token ids, to prompts that the server must have read as the same ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.serving.client import CHAT, COMPLETIONS, Client
from onptq.serving.messages import chat_messages

AT_ONCE = 64  # requests
SHOWN = 4  # ids of either side where prompts differ


@dataclass(frozen=True)
class Question:
    """A prompt, the ids it was encoded as, and how its response is drawn."""

    number: int  # of the response
    prompt: Prompt
    ids: Sequence[int]
    drawn: Mapping[str, Any]  # temperature and the like, as the request takes them


@dataclass(frozen=True)
class Response:
    """The ids of one response, the end-of-sequence token included where there is one."""

    number: int
    tokens: tuple[int, ...]
    finished: bool


# A server has defaults of its own for everything that is not said.
PLAIN = {
    "n": 1,
    "stream": False,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_token_ids": True,
}
GREEDY = {"temperature": 0.0}


@dataclass(frozen=True)
class Writer:
    """A model behind a server, which writes at most `max_tokens` up to one of the tokens `eos`."""

    client: Client
    model: str
    max_tokens: int
    eos: frozenset[int]

    def write(self, question: Question) -> Response:
        """One response. Prompts with media go by the chat, all others by their ids."""
        # With `ignore_eos` the tokens that end a response are those given here, not what the server takes them to be.
        ends = {"stop_token_ids": sorted(self.eos), "ignore_eos": True}
        body = {"model": self.model, "max_tokens": self.max_tokens, **PLAIN, **ends, **question.drawn}
        if question.prompt.images or question.prompt.audios:
            reply = self.client.post(CHAT, body | {"messages": chat_messages(question.prompt)})
        else:
            reply = self.client.post(COMPLETIONS, body | {"prompt": list(question.ids)})
        read, tokens, reason = self._read(question, reply)
        if read != list(question.ids):
            raise OnPTQError(
                f"{question.prompt}: {self.client.url} read other tokens than onptq: {difference(read, question.ids)}. "
                "Its chat template or its processor is not the checkpoint's, so its responses are to other prompts"
            )
        return self._cut(question, tokens, reason)

    def write_all(
        self, questions: Sequence[Question], advance: Callable[[int], None] = lambda responses: None
    ) -> list[Response]:
        """The responses in the order of the questions. The first error ends it: no further request is sent."""
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            waiting = [pool.submit(self.write, question) for question in questions]
            for done in as_completed(waiting):
                done.result()
                advance(1)
            return [future.result() for future in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self.client.end()
            raise
        finally:
            pool.shutdown()

    def _read(self, question: Question, reply: Any) -> tuple[list[int], list[int], str]:
        """The ids of prompt and response, and why it ended."""
        try:
            choice = reply["choices"][0]
            ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")  # completions and chat
            tokens, reason = choice.get("token_ids"), choice["finish_reason"]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._unexpected(
                question, f"something else than a completion ({type(error).__name__}: {error})"
            ) from None
        for each in (ids, tokens):
            if not isinstance(each, list) or not all(type(one) is int for one in each):
                raise self._unexpected(
                    question, "no token ids; expected a vLLM that knows return_token_ids, as 0.32 does"
                )
        return ids, tokens, str(reason)

    def _cut(self, question: Question, tokens: Sequence[int], reason: str) -> Response:
        end = next((t for t, token in enumerate(tokens, start=1) if token in self.eos), None)
        whole = end is not None or len(tokens) == self.max_tokens
        if not whole or len(tokens) > self.max_tokens or end not in (None, len(tokens)):
            raise self._unexpected(
                question,
                f"{len(tokens)} tokens that ended by {reason!r}; expected {self.max_tokens}, or fewer of which the last one "
                f"alone ends a response ({', '.join(map(str, sorted(self.eos)))})",
            )
        return Response(question.number, tuple(tokens), end is not None)

    def _unexpected(self, question: Question, what: str) -> OnPTQError:
        return OnPTQError(f"{self.client.url} answered {question.prompt} with {what}")


def difference(read: Iterable[int], expected: Iterable[int]) -> str:
    """Where two prompts part, in words; runs of one token, such as the placeholders of an image, are counted."""
    theirs, ours = ([(token, len(list(run))) for token, run in groupby(ids)] for ids in (read, expected))
    place = 0
    for (their, their_count), (our, our_count) in zip(theirs, ours, strict=False):
        if their == our and their_count != our_count:
            return f"from place {place} on token {our} stands {their_count} times there and {our_count} times here"
        if their != our:
            break
        place += our_count
    there, here = (
        [token for token, count in runs for _ in range(count)][place : place + SHOWN] for runs in (theirs, ours)
    )
    return f"from place {place} on {there or 'nothing'} there and {here or 'nothing'} here"
