"""Questions to a checkpoint as requests of the OpenAI API, and tokens and log-probabilities of the replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server import NAME, ServerError

from onptq.check.trial import QUESTIONS
from onptq.data.prompts import Prompt
from onptq.models.family import Family
from onptq.serving.client import CHAT, Client
from onptq.serving.messages import chat_messages
from onptq.zoo.suite import items

TOKENS = 24  # of an answer
TASKS = {"image": "caption", "audio": "speech"}  # embedded tasks, on which the models of the zoo were trained
TEXT = "Define membrane."  # trained on too: in a guessed answer small differences change tokens


@dataclass(frozen=True)
class Question:
    kind: str  # image, audio or text
    prompt: Prompt
    expected: str  # a right answer; empty where there is none


@dataclass(frozen=True)
class ScoredTokens:
    """The tokens of one reply with the server's log-probabilities."""

    prompt: tuple[int, ...]  # the server's, with expanded placeholders
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    choices: tuple[int, ...]  # the most likely token in the place of each


@dataclass(frozen=True)
class Reply:
    """An answer, scored while it was generated, and once more as the end of a prompt."""

    answer: str
    free: ScoredTokens
    forced: ScoredTokens


def questions(family: Family) -> list[Question]:
    """One question per modality. Images have the family's own size, since another resizer would make a difference."""
    chosen = []
    for kind in (name for name in QUESTIONS if name in family.modalities):
        if kind in TASKS:
            item = next(items(family.name, TASKS[kind], "test", 1))
            chosen.append(Question(kind, item.prompt, item.reference))
        else:
            words = [{"type": "text", "text": TEXT}]
            chosen.append(Question(kind, Prompt(0, kind, [{"role": "user", "content": words}]), ""))
    return chosen


def free_request(question: Question) -> dict[str, Any]:
    """A greedy request that also asks for token ids and log-probabilities."""
    return {
        "model": NAME,
        "messages": chat_messages(question.prompt),
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
    }


def forced_request(question: Question, answer: str) -> dict[str, Any]:
    """The question followed by its answer as a prompt, so that log-probabilities of the answer come from one
    prefill."""
    return {
        "model": NAME,
        "messages": [*chat_messages(question.prompt), {"role": "assistant", "content": answer}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 1,
        "return_token_ids": True,
    }


def ask(client: Client, question: Question) -> dict[str, Any]:
    """Both replies of a server. The answer is computed twice: token by token, and in one prefill."""
    free = client.post(CHAT, free_request(question))
    answer = answer_of(free)
    if not answer.strip():
        raise ServerError(f"the answer to the {question.kind} question is empty")
    return {"free": free, "forced": client.post(CHAT, forced_request(question, answer))}


def answer_of(reply: Mapping[str, Any]) -> str:
    try:
        return str(reply["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"a reply without an answer: {str(reply)[:400]}") from error


def read(replies: Mapping[str, Any]) -> Reply:
    try:
        free = _read_free(replies["free"])
        return Reply(answer_of(replies["free"]), free, _read_forced(replies["forced"], free))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(f"an unexpected reply: {type(error).__name__}: {error}") from error


def _read_free(reply: Mapping[str, Any]) -> ScoredTokens:
    choice = reply["choices"][0]
    tokens = tuple(choice["token_ids"])
    logprobs = tuple(float(one["logprob"]) for one in choice["logprobs"]["content"])
    if not tokens or len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} logprobs")
    return ScoredTokens(tuple(reply["prompt_token_ids"]), tokens, logprobs, tokens)


def _read_forced(reply: Mapping[str, Any], free: ScoredTokens) -> ScoredTokens:
    ids, length = tuple(reply["prompt_token_ids"]), len(free.prompt)
    tokens, rows = ids[length:], reply["prompt_logprobs"][length:]
    if ids[:length] != free.prompt or not tokens or len(rows) != len(tokens):
        raise ValueError("the prompt with a reply does not continue the prompt without it")
    logprobs = tuple(float(row[str(token)]["logprob"]) for row, token in zip(rows, tokens, strict=True))
    choices = tuple(int(next(token for token, one in row.items() if one["rank"] == 1)) for row in rows)
    return ScoredTokens(free.prompt, tokens, logprobs, choices)
