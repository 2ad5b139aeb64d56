"""Servers as models: real HTTP on loopback, answered as vLLM and llama.cpp answer; bounds by hand; every way to fail."""

from __future__ import annotations

import base64
import io
import json
import math
import socket
import threading
import time
import wave
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image
from web_server import Answering, FakeServer, Serve

from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.page.chat_server import ChatServer
from onptq.page.contract import Candidate, Page, Response, States
from onptq.page.endpoint_states import divergences
from onptq.page.endpoints import ASKED_TWICE, Endpoint, compare_endpoints, is_endpoint
from onptq.page.write import to_bytes
from onptq.serving import client
from onptq.serving.messages import chat_messages

Top = Mapping[str, float]  # probabilities
Step = tuple[str, Top]  # the token of an answer and the likeliest in its place
KEY = "sk-secret-123"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)


def vllm(steps: Mapping[str, Sequence[Step]], finish: str = "stop", end: str | None = "<|im_end|>") -> Answering:
    """As vLLM answers: bytes, no ids, the end of the answer as a token that the text has not."""

    def entry(token: str, probability: float) -> dict[str, Any]:
        return {"token": token, "logprob": math.log(probability), "bytes": list(token.encode())}

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "org/model", "object": "model"}]}
        said = list(steps[question_of(body)])
        listed = said + ([(end, {end: 0.9, " more": 0.1})] if end is not None and finish == "stop" else [])
        content = [
            entry(token, top[token]) | {"top_logprobs": [entry(*pair) for pair in top.items()]} for token, top in listed
        ]
        message = {"role": "assistant", "reasoning_content": None, "content": "".join(token for token, _ in said)}
        choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": finish}
        return 200, {"id": "x", "object": "chat.completion", "choices": [choice]}

    return answer


def llama(steps: Mapping[str, Sequence[Step]]) -> Answering:
    """As llama.cpp answers: ids beside tokens, and a token without text for the end."""
    plain = vllm(steps, end="")

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, reply = plain(path, body)
        for number, one in enumerate(reply.get("choices", [{}])[0].get("logprobs", {}).get("content", [])):
            one["id"] = 1000 + number
        return status, reply

    return answer


def without_log_probabilities(answering: Answering) -> Answering:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, reply = answering(path, body)
        for choice in reply.get("choices", []):
            choice["logprobs"] = None
        return status, reply

    return answer


def question_of(body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    text: str = content if isinstance(content, str) else next(part["text"] for part in content if "text" in part)
    return text


def prompt(text: str, ordinal: int = 0, **media: Any) -> Prompt:
    parts: list[dict[str, Any]] = [{"type": kind.removesuffix("s")} for kind in media]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return Prompt(ordinal, f"p{ordinal}", [message], **media)


def prompts(*texts: str) -> list[Prompt]:
    return [prompt(text, ordinal) for ordinal, text in enumerate(texts)]


def sure(token: str) -> Step:
    return token, {token: 0.99, " other": 0.01}


def only(page: Page) -> tuple[Candidate, list[Response]]:
    (candidate,) = page.candidates
    return candidate, [one for one in candidate.responses if one is not None]


def states_of(response: Response) -> States:
    assert response.states is not None
    return response.states


DENSE = {"a": [sure("It"), (" is", {" is": 0.8, " was": 0.15}), sure(" red")], "b": [sure("Yes")]}
QUANT = {"a": [sure("It"), (" was", {" was": 0.6, " is": 0.3}), sure(" blue"), sure("!")], "b": [sure("Yes")]}


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [vllm, llama])
def test_two_servers_are_compared_up_to_the_first_fork(serve: Serve, other: Callable[..., Answering]) -> None:
    dense, quantized = serve(vllm(DENSE)), serve(other(QUANT))
    page = compare_endpoints(dense.url, [f"q={quantized.url}"], prompts("a", "b"), max_tokens=8, origin="mine.jsonl")
    candidate, (first, second) = only(page)
    assert candidate.name == "q"
    assert candidate.verdict.startswith("Of 2 answers 1")
    assert (first.fork, first.change, second.fork, second.change) == (1, "content", None, "same")
    assert (page.prompts[0].dense.text, first.answer.text) == ("It is red", "It was blue!")
    states = states_of(first)
    assert len(states.reference) == 2  # the shared token and the fork
    assert [page.tokens[token] for token in (states.reference[1], states.competitor[1], states.quantized[1])] == [
        " is",
        " was",
        " was",
    ]
    assert states.kind == [0, 2]
    assert states.margin_dense[1] == pytest.approx(math.log(0.8 / 0.15))
    assert states.margin_quant[1] == pytest.approx(math.log(0.3 / 0.6))
    assert states.erosion[1] == pytest.approx(math.log(0.8 / 0.15) - math.log(0.3 / 0.6))
    assert states.risk[0] == 0 < states.risk[1]
    top = states.top[1]
    assert top is not None
    assert {page.tokens[token]: round(share, 6) for token, share in top.quantized} == {" was": 0.6, " is": 0.3}
    assert "".join(page.tokens[token] for token in first.answer.tokens or ()) == "It was blue!(end)"
    assert any("lower" in note or "at least as large" in note for note in page.notes)
    assert json.loads(to_bytes(page))["format"] == 1


@pytest.mark.parametrize("end", [None, "", "</s>"])
def test_the_end_of_an_answer_is_the_same_token_whether_or_not_a_server_lists_it(serve: Serve, end: str | None) -> None:
    listing, silent = serve(vllm(DENSE)), serve(vllm(DENSE, end=end))
    _, responses = only(compare_endpoints(listing.url, [silent.url], prompts("a", "b"), max_tokens=8))
    assert [one.fork for one in responses] == [None, None]
    assert all(one.change == "same" for one in responses)


def test_an_answer_that_is_cut_off_leaves_one_that_ends(serve: Serve) -> None:
    whole, cut = serve(vllm(DENSE)), serve(vllm(DENSE, finish="length"))
    _, (first, _) = only(compare_endpoints(whole.url, [cut.url], prompts("a", "b"), max_tokens=3))
    assert first.fork == 3
    assert first.answer.finished is False


def test_an_endpoint_without_log_probabilities_is_compared_as_text_which_the_page_says(serve: Serve) -> None:
    dense, quantized = serve(vllm(DENSE)), serve(without_log_probabilities(vllm(QUANT)))
    page = compare_endpoints(dense.url, [quantized.url], prompts("a", "b"), max_tokens=8)
    candidate, (first, second) = only(page)
    assert (first.fork, second.fork) == (1, None)
    assert first.states is None
    assert [page.tokens[token] for token in first.answer.tokens or ()] == ["It", " was", " blue!", "(end)"]
    assert "text alone" in candidate.verdict
    assert [note for note in page.notes if "text alone" in note] == [
        f"{quantized.url} gives no log-probabilities: answers are compared as text alone, word by word."
    ]
    assert not any("at least as large" in note for note in page.notes)


def test_a_server_that_refuses_log_probabilities_is_asked_without(serve: Serve) -> None:
    plain = without_log_probabilities(vllm(DENSE))

    def refusing(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if "logprobs" in body:
            return 400, {"error": {"message": "logprobs are not supported by this server"}}
        return plain(path, body)

    server = serve(refusing)
    candidate, responses = only(compare_endpoints(server.url, [f"q={server.url}"], prompts("a", "b"), max_tokens=8))
    assert [one.change for one in responses] == ["same", "same"]
    assert "text alone" in candidate.verdict


def test_servers_that_cut_a_text_into_other_tokens_say_the_same(serve: Serve) -> None:
    parts = {"a": [sure("It"), sure(" "), sure("is red")], "b": [sure("Yes")]}
    dense, quantized = serve(vllm(DENSE)), serve(vllm(parts))
    _, (first, _) = only(compare_endpoints(dense.url, [quantized.url], prompts("a", "b"), max_tokens=8))
    assert (first.fork, first.change) == (None, "same")


def test_parts_of_a_character_are_shown_as_bytes(serve: Serve) -> None:
    smile = "🙂".encode()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        entries = [
            {"token": "\ufffd", "logprob": -0.1, "bytes": list(part), "top_logprobs": []}
            for part in (smile[:2], smile[2:])
        ]
        choice = {"message": {"content": "🙂"}, "logprobs": {"content": entries}, "finish_reason": "length"}
        return 200, {"choices": [choice], "data": [{"id": "m"}]}

    server = serve(answer)
    page = compare_endpoints(server.url, [f"q={server.url}"], prompts("a"), max_tokens=8)
    _, (first,) = only(page)
    assert [page.tokens[token] for token in first.answer.tokens or ()] == ["\\xf0\\x9f", "\\x99\\x82"]


def test_several_quantized_endpoints_are_candidates_of_one_page(serve: Serve) -> None:
    dense, one, other = serve(vllm(DENSE)), serve(vllm(QUANT)), serve(llama(DENSE))
    page = compare_endpoints(dense.url, [f"one={one.url}", f"other={other.url}"], prompts("a", "b"), max_tokens=8)
    assert [candidate.name for candidate in page.candidates] == ["one", "other"]
    assert [candidate.figures["reworded"].value for candidate in page.candidates] == [50.0, 0.0]


def test_the_noise_floor_is_how_often_a_server_answers_the_same_prompt_in_other_words(serve: Serve) -> None:
    many = {f"q{number}": [sure(f"said {number}")] for number in range(40)}
    steady, seen = vllm(many), list[str]()

    def wavering(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return steady(path, body)
        name = question_of(body)
        seen.append(name)
        again = name in ("q0", "q39") and seen.count(name) > 1
        return vllm({name: [sure("else")]} if again else many)(path, body)

    page = compare_endpoints(serve(steady).url, [serve(wavering).url], prompts(*many), max_tokens=8)
    candidate, _ = only(page)
    assert candidate.figures["reworded"].value == 0
    assert candidate.figures["noise_responses"].value == pytest.approx(100 * 2 / ASKED_TWICE)
    assert page.measures["reworded"].noise == "noise_responses"
    assert any(f"{ASKED_TWICE} of the prompts" in note for note in page.notes)


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_prompt_is_sent_with_its_image_and_audio_greedily_with_log_probabilities(serve: Serve) -> None:
    server = serve(vllm({"Look": [sure("ok")]}))
    picture, sound = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(picture, "JPEG")
    with wave.open(sound, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"\0\0" * 8)
    media = [Media(None, "0", one.getvalue()) for one in (picture, sound)]
    asked = prompt("Look", images=(media[0],), audios=(media[1],))
    compare_endpoints(server.url, [f"q={server.url}"], [asked], max_tokens=5, key=KEY)
    assert {path for path, _, _ in server.asked} == {"/v1/models", "/v1/chat/completions"}
    _, body, headers = server.asked[-1]
    assert {name: body[name] for name in ("model", "temperature", "logprobs", "top_logprobs", "max_tokens")} == {
        "model": "org/model",
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 10,
        "max_tokens": 5,
    }
    image, audio, text = body["messages"][0]["content"]
    head, _, data = image["image_url"]["url"].partition(",")
    assert (head, base64.b64decode(data)) == ("data:image/jpeg;base64", picture.getvalue())
    assert audio["input_audio"]["format"] == "wav"
    assert base64.b64decode(audio["input_audio"]["data"]) == sound.getvalue()
    assert text == {"type": "text", "text": "Look"}
    assert headers["Authorization"] == f"Bearer {KEY}"


def test_text_alone_is_sent_as_plain_text() -> None:
    assert chat_messages(prompt("Hi")) == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_a_server_is_named_by_its_root_its_version_or_its_chat(serve: Serve, end: str) -> None:
    server = serve(vllm(DENSE))
    ChatServer(server.url.removesuffix("/v1") + end).answer(prompt("b"), 4)
    assert [path for path, _, _ in server.asked] == ["/v1/models", "/v1/chat/completions"]


def test_no_proxy_is_asked(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, server = serve(vllm(DENSE)), serve(vllm(DENSE))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    ChatServer(server.url).answer(prompt("b"), 4)
    assert proxy.asked == []


def test_no_more_than_a_few_requests_are_under_way_at_a_time(serve: Serve) -> None:
    inner, lock, now, most = vllm({"a": [sure("x")]}), threading.Lock(), [0], [0]

    def counting(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return inner(path, body)

    server = serve(counting)
    compare_endpoints(server.url, [f"q={server.url}"], prompts(*["a"] * 16), max_tokens=2)
    assert 1 < most[0] <= 8


def test_an_address_is_told_from_a_folder_and_named_after_its_place() -> None:
    assert is_endpoint("http://a:1/v1")
    assert is_endpoint("q=https://a")
    assert not is_endpoint("folder")
    assert not is_endpoint("rtn:W4A8@init=rtn")
    assert Endpoint.parse("http://a:1/v1").name == "a:1"
    assert Endpoint.parse("q=https://a/v1?x=1").name == "q"


# --- errors -----------------------------------------------------------------------------------------------------------


def failing(serve: Serve, status: int, content: Any) -> FakeServer:
    inner = vllm(DENSE)
    return serve(lambda path, body: inner(path, body) if path == "/v1/models" else (status, content))


def asked_in_vain(server: FakeServer | str, **options: Any) -> str:
    url = server if isinstance(server, str) else server.url
    with pytest.raises(OnPTQError) as raised:
        compare_endpoints(url, [f"q={url}"], prompts("a", "b"), max_tokens=4, **options)
    return str(raised.value)


def test_nobody_there_is_said_with_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert asked_in_vain(url) == f"cannot reach {url}: Connection refused"


def test_an_error_names_the_address_the_status_and_the_message(serve: Serve) -> None:
    server = failing(
        serve, 400, {"error": {"message": "This model's maximum context length is 5\x1b[31m", "code": 400}}
    )
    text = asked_in_vain(server)
    assert text.startswith(f"{server.url} answered 400")
    assert "maximum context length is 5" in text
    assert "\x1b" not in text


def test_a_key_is_never_in_an_error(serve: Serve) -> None:
    server = failing(serve, 401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})
    text = asked_in_vain(server, key=KEY)
    assert "answered 401" in text
    assert KEY not in text
    for bad in ("", "a b", "a\r\nHost: b"):
        text = asked_in_vain(server, key=bad)
        assert "key" in text
        assert not bad or bad not in text


def test_a_busy_server_is_asked_again(serve: Serve) -> None:
    inner, count = vllm(DENSE), [0]

    def busy(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        count[0] += path != "/v1/models"
        return (503, b"loading") if path != "/v1/models" and count[0] <= 2 else inner(path, body)

    server = serve(busy)
    assert ChatServer(server.url).answer(prompt("b"), 4).text == "Yes"
    assert count[0] == 3


def test_a_server_that_stays_busy_ends_it(serve: Serve) -> None:
    server = failing(serve, 429, b"too many")
    text = asked_in_vain(server)
    assert "answered 429" in text
    assert "too many" in text


def completion(**logprob: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": "x"}, "logprobs": {"content": [{"token": "x", **logprob}]}}]}


@pytest.mark.parametrize("content", [b"<html>hello</html>", b"", b"{", b"[" * 5000, b"[]", b"{}", b"null"])
def test_what_is_no_json_object_is_said_to_be_none(serve: Serve, content: bytes) -> None:
    server = failing(serve, 200, content)
    text = asked_in_vain(server)
    assert server.url in text
    assert "no JSON" in text or "something else than a chat completion" in text


@pytest.mark.parametrize(
    "content",
    [{"choices": []}, {"choices": [{"message": {}}]}, completion(), completion(logprob=0, bytes=[999])],
)
def test_what_is_no_chat_completion_is_said_to_be_none(serve: Serve, content: dict[str, Any]) -> None:
    server = failing(serve, 200, content)
    text = asked_in_vain(server)
    assert server.url in text
    assert "something else than a chat completion" in text


def test_numbers_that_are_not_finite_do_no_harm(serve: Serve) -> None:
    token = {"token": "x", "logprob": float("nan"), "top_logprobs": [{"token": "y", "logprob": float("-inf")}]}
    choice = {"message": {"content": "x"}, "logprobs": {"content": [token]}, "finish_reason": "stop"}
    server = failing(serve, 200, {"choices": [choice]})
    page = compare_endpoints(server.url, [f"q={server.url}"], prompts("a"), max_tokens=4)
    _, (first,) = only(page)
    assert (first.change, first.states) == ("same", None)


@pytest.mark.parametrize("nothing", [-9999.0, -3.4e38])
def test_a_token_whose_probability_a_server_does_not_know_ends_the_states(serve: Serve, nothing: float) -> None:
    tokens = [
        {"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]},
        {"token": "b", "logprob": nothing, "top_logprobs": []},
    ]
    choice = {"message": {"content": "ab"}, "logprobs": {"content": tokens}, "finish_reason": "length"}
    server = failing(serve, 200, {"choices": [choice]})
    _, (first,) = only(compare_endpoints(server.url, [f"q={server.url}"], prompts("a"), max_tokens=4))
    assert len(states_of(first).js) == 1


def test_a_slow_server_is_not_waited_for_longer_than_was_said(serve: Serve) -> None:
    inner = vllm(DENSE)

    def slow(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/v1/models":
            time.sleep(2)
        return inner(path, body)

    began = time.monotonic()
    text = asked_in_vain(serve(slow), timeout=0.2)
    assert "did not answer within 0.2 s" in text
    assert "--timeout" in text
    assert time.monotonic() - began < 1.5


def test_a_server_that_drips_is_not_waited_for_either() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            try:
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.02)
            except OSError:
                pass

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert "did not answer within 0.3 s" in asked_in_vain(url, timeout=0.3)
    listener.close()
    thread.join(2)


def test_the_first_error_ends_all_that_is_under_way(serve: Serve) -> None:
    inner, slow = vllm(DENSE), threading.Event()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return inner(path, body)
        if question_of(body) == "a":
            time.sleep(0.1)
            return 400, b"not this one"
        slow.wait(5)
        return inner(path, body)

    server = serve(answer)
    began = time.monotonic()
    with pytest.raises(OnPTQError, match="not this one"):
        compare_endpoints(server.url, [f"q={server.url}"], prompts("a", *["b"] * 30), max_tokens=4)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    for thread in left:
        thread.join(2)
    assert time.monotonic() - began < 3
    assert not any(thread.is_alive() for thread in left)
    slow.set()
    assert len(server.asked) < 15


def test_a_redirect_is_not_followed(serve: Serve) -> None:
    assert "redirects, which is not followed" in asked_in_vain(failing(serve, 302, b""))


@pytest.mark.parametrize("models", [[], ["a", "b"]])
def test_which_of_several_models_is_meant_must_be_said(serve: Serve, models: list[str]) -> None:
    inner = vllm(DENSE)
    server = serve(
        lambda path, body: (
            (200, {"data": [{"id": name} for name in models]}) if path == "/v1/models" else inner(path, body)
        )
    )
    assert "--model NAME" in asked_in_vain(server)
    page = compare_endpoints(server.url, [f"q={server.url}"], prompts("b"), max_tokens=4, model="b")
    assert page.dense.endswith("(b)")
    assert server.asked[-1][1]["model"] == "b"


@pytest.mark.parametrize(
    "url",
    ["http://", "http://a:x", "http://u:hunter2@a/v1", "http://a/v1?x=1", "http://a b", "http://[::1", "http://é"],
)
def test_what_is_no_address_is_refused_before_anything_is_asked(url: str) -> None:
    text = asked_in_vain(url)
    assert "expected" in text or "--key-env" in text
    assert "hunter2" not in text


def test_the_same_server_twice_needs_names() -> None:
    with pytest.raises(OnPTQError, match="NAME=URL"):
        compare_endpoints("http://a", ["http://a/v1"], prompts("a"), max_tokens=4)


# --- bounds by hand ---------------------------------------------------------------------------------------------------


def test_divergences_over_the_tokens_that_servers_name_are_lower_bounds() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        p, q = (generator.dirichlet(np.full(30, 0.3)) for _ in range(2))
        named = [
            {bytes([token]): math.log(each[token]) for token in np.argsort(-each)[:10].tolist() if each[token] > 0}
            for each in (p, q)
        ]
        middle = (p + q) / 2
        kl = float((p * np.log(p / q)).sum())
        js = float((p * np.log(p / middle)).sum() + (q * np.log(q / middle)).sum()) / 2
        found_js, found_kl = divergences(*named)
        assert 0 <= found_js <= js + 1e-5
        assert 0 <= found_kl <= kl + 1e-4


def test_parts_of_characters_that_a_server_cannot_tell_apart_are_not_taken_for_the_same() -> None:
    broken = "\ufffd".encode()
    p, q = ({broken: math.log(0.6), b"a": math.log(share)} for share in (0.4, 0.1))
    assert divergences(p, q) == divergences({b"a": math.log(0.4)}, {b"a": math.log(0.1)})


def test_divergences_of_two_tokens_by_hand() -> None:
    p, q = ({b"a": math.log(share), b"b": math.log(1 - share)} for share in (0.5, 0.9))
    js, kl = divergences(p, q)
    assert kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), abs=1e-4)
    assert js == pytest.approx(
        (0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3) + 0.9 * math.log(0.9 / 0.7) + 0.1 * math.log(0.1 / 0.3))
        / 2,
        abs=1e-4,
    )
    left = 1 - math.exp(-0.1)
    js, kl = divergences({b"a": -0.1}, {b"b": -0.1})
    assert kl == pytest.approx((1 - 2 * left) * math.log((1 - left) / left), abs=1e-4), (
        "each has no more of the other's"
    )
    assert 0.3 < js < math.log(2)
