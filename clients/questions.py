"""What is asked of a checkpoint, as requests of the OpenAI API, and what its replies say token by token."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server import NAME, Server, ServerError

from onptq.check.trial import QUESTIONS
from onptq.data.prompts import Media, Prompt
from onptq.models.family import Family
from onptq.zoo.suite import items

CHAT = "/v1/chat/completions"
TOKENS = 24  # of an answer
TASKS = {"image": "caption", "audio": "speech"}  # embedded ones, which the models of the zoo have learned
WORDS = "Define membrane."  # learned too: a guessed answer says more about the model than about who computes it


@dataclass(frozen=True)
class Question:
    kind: str  # image, audio or text
    prompt: Prompt
    expected: str  # a right answer; empty where there is none


@dataclass(frozen=True)
class Heard:
    """Tokens of one reply and what the server thought of each."""

    prompt: tuple[int, ...]  # as the server rendered and expanded it
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    choices: tuple[int, ...]  # the most likely token in the place of each


@dataclass(frozen=True)
class Reply:
    """An answer, heard token by token as it was given, and once more as the end of a prompt."""

    answer: str
    free: Heard
    forced: Heard


def questions(family: Family) -> list[Question]:
    """One per modality. Pictures have the family's own size: two resizers would count as a difference."""
    asked = []
    for kind in (name for name in QUESTIONS if name in family.modalities):
        if kind in TASKS:
            item = next(items(family.name, TASKS[kind], "test", 1))
            asked.append(Question(kind, item.prompt, item.reference))
        else:
            words = [{"type": "text", "text": WORDS}]
            asked.append(Question(kind, Prompt(0, kind, [{"role": "user", "content": words}]), ""))
    return asked


def messages(prompt: Prompt) -> list[dict[str, Any]]:
    """The prompt's messages with its pictures and sounds inside, as the API takes them."""
    media = {"image": iter(prompt.images), "audio": iter(prompt.audios)}
    return [{**message, "content": [_part(part, media) for part in message["content"]]} for message in prompt.messages]


def _part(part: Mapping[str, Any], media: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_encoded(next(media['image']))}"}}
    if part["type"] == "audio":
        return {"type": "input_audio", "input_audio": {"data": _encoded(next(media["audio"])), "format": "wav"}}
    return dict(part)


def _encoded(media: Media) -> str:
    return base64.b64encode(media.read()).decode()


def free_request(question: Question) -> dict[str, Any]:
    """An ordinary greedy request that also wants to see token ids and logprobs."""
    return {
        "model": NAME,
        "messages": messages(question.prompt),
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
    }


def forced_request(question: Question, answer: str) -> dict[str, Any]:
    """The question with its answer in the model's mouth: the logprobs of the prompt are then those of the answer, too."""
    return {
        "model": NAME,
        "messages": [*messages(question.prompt), {"role": "assistant", "content": answer}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 1,
        "return_token_ids": True,
    }


def ask(server: Server, question: Question) -> dict[str, Any]:
    """Both replies as the server gives them. The answer is computed twice: token by token, and in one pass."""
    free = server.post(CHAT, free_request(question))
    answer = said(free)
    if not answer.strip():
        raise ServerError(f"the answer to the {question.kind} question is empty")
    return {"free": free, "forced": server.post(CHAT, forced_request(question, answer))}


def said(reply: Mapping[str, Any]) -> str:
    try:
        return str(reply["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"a reply without an answer: {str(reply)[:400]}") from error


def read(replies: Mapping[str, Any]) -> Reply:
    try:
        free = _read_free(replies["free"])
        return Reply(said(replies["free"]), free, _read_forced(replies["forced"], free))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(f"a reply that is not as expected: {type(error).__name__}: {error}") from error


def _read_free(reply: Mapping[str, Any]) -> Heard:
    choice = reply["choices"][0]
    tokens = tuple(choice["token_ids"])
    logprobs = tuple(float(one["logprob"]) for one in choice["logprobs"]["content"])
    if not tokens or len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} logprobs")
    return Heard(tuple(reply["prompt_token_ids"]), tokens, logprobs, tokens)


def _read_forced(reply: Mapping[str, Any], free: Heard) -> Heard:
    ids, length = tuple(reply["prompt_token_ids"]), len(free.prompt)
    tokens, rows = ids[length:], reply["prompt_logprobs"][length:]
    if ids[:length] != free.prompt or not tokens or len(rows) != len(tokens):
        raise ValueError("the prompt with a reply does not continue the prompt without it")
    logprobs = tuple(float(row[str(token)]["logprob"]) for row, token in zip(rows, tokens, strict=True))
    choices = tuple(int(next(token for token, one in row.items() if one["rank"] == 1)) for row in rows)
    return Heard(free.prompt, tokens, logprobs, choices)
