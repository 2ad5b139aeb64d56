"""Prompts of request logs: what vLLM and proxies write, what is left out, and that a log runs nothing."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from collecting import (
    PARAMS,
    assistant,
    chatml,
    data_url,
    image_url,
    new_lines,
    old_line,
    said,
    text_part,
    user,
    write_lines,
)
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment

from onptq.data.collected import REPEATED, UNUSABLE, Collected
from onptq.data.rendered import CUT_SHORT, UNKNOWN_TEMPLATE, WITH_TOOLS, WITHOUT_MEDIA, read_rendered
from onptq.data.server_logs import REDACTED, WITHOUT_TEXT, server_prompts, unescape
from onptq.errors import OnPTQError
from onptq.zoo.tokens import CHATML, LLAMA_CHAT

HI = chatml(("system", "Be brief."), ("user", "Hi"))
HI_SAID = [("system", "Be brief."), ("user", "Hi")]


def collected(folder: Path, *lines: object) -> Collected:
    return server_prompts([write_lines(folder / "server.log", *lines)])


def read(folder: Path, *lines: object) -> list[list[tuple[str, str]]]:
    return [said(prompt) for prompt in collected(folder, *lines).prompts]


# --- vLLM -----------------------------------------------------------------------------------------------------------


def test_lines_of_old_and_new_vllm_give_the_chat_again(tmp_path: Path) -> None:
    longer = chatml(("user", "Hi"), ("assistant", "Hello."), ("user", 'What\'s "this"?\n\\ 好 \x07'))
    lines = [
        'INFO:     10.80.23.18:51408 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        old_line(HI),
        *new_lines(longer, "chatcmpl-2"),
        f"INFO 10-01 18:43:27 logger.py:36] {old_line('How to make pizza', 'cmpl-3-0').split('] ', 1)[1]}",
        "INFO 11-12 10:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 0.8 tokens/s, Running: 0 reqs",
    ]
    assert read(tmp_path, *lines) == [
        HI_SAID,
        [("user", "Hi"), ("assistant", "Hello."), ("user", 'What\'s "this"?\n\\ 好 \x07')],
        [("user", "How to make pizza")],
    ]
    assert not collected(tmp_path, *lines).left_out


def test_requests_that_are_not_whole_in_the_log_are_counted_by_their_reason(tmp_path: Path) -> None:
    image = chatml(("user", "<|vision_start|><|image_pad|><|vision_end|>What is this?"))
    result = collected(
        tmp_path,
        old_line(HI),
        old_line(HI, "chatcmpl-2"),
        old_line(None, "chatcmpl-3"),
        new_lines(HI, "chatcmpl-4")[1],
        *new_lines(None, "chatcmpl-5"),
        old_line(image),
        old_line(HI[:30]),
        old_line(HI.removesuffix("assistant\n")),
        old_line("[INST] Hi [/INST]"),
        old_line("<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
        old_line(chatml(("system", "# Tools\n<tools>\n{}\n</tools>"), ("user", "Hi"))),
        old_line(chatml(("developer", "Hi"))),
        old_line(chatml()),
    )
    assert [said(prompt) for prompt in result.prompts] == [HI_SAID]
    assert Counter(one.reason for one in result.left_out) == {
        REPEATED: 1,
        WITHOUT_TEXT: 3,
        WITHOUT_MEDIA: 1,
        CUT_SHORT: 2,
        UNKNOWN_TEMPLATE: 3,
        WITH_TOOLS: 1,
        UNUSABLE: 1,
    }
    assert result.read.startswith("13 requests in 14 lines of ")


@pytest.mark.parametrize("template", [CHATML, LLAMA_CHAT])
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>[]｜"), min_size=1), min_size=1),
    st.booleans(),
)
def test_what_a_template_rendered_is_read_back_as_it_renders_again(
    template: str, texts: list[str], system: bool
) -> None:
    roles = [*(["system"] if system else []), *(["user", "assistant"] * len(texts))]
    spoken = [text.strip() for text in texts if text.strip()] or ["Hi"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, spoken, strict=False)]
    if messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": "And now?"})
    rendering = Environment().from_string(template)
    text = rendering.render(messages=messages, add_generation_prompt=True, bos_token="<|begin_of_text|>")
    again = read_rendered(text)["messages"]
    assert rendering.render(messages=again, add_generation_prompt=True, bos_token="<|begin_of_text|>") == text
    assert [one for one in again if one["role"] != "system"] == [one for one in messages if one["role"] != "system"]


def test_dates_that_the_template_of_llama_writes_itself_are_taken_away() -> None:
    head = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    turn = "<|start_header_id|>{}<|end_header_id|>\n\n{}".format
    end = f"<|eot_id|>{turn('user', 'Hi')}<|eot_id|>{turn('assistant', '')}"
    hi = {"role": "user", "content": "Hi"}
    for system, expected in (("", [hi]), ("Be brief.", [{"role": "system", "content": "Be brief."}, hi])):
        assert read_rendered(f"{head}Today Date: 26 Jul 2024\n\n{system}{end}") == {"messages": expected}


# --- JSON -----------------------------------------------------------------------------------------------------------

MESSAGES = {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, user("Hi")], "stream": True}


def nginx(body: str) -> str:
    """The body as nginx escapes it in a line of its access log."""
    plain = {*range(32, 127)} - set(b'"\\')
    escaped = "".join(chr(byte) if byte in plain else f"\\x{byte:02X}" for byte in body.encode())
    return f'1.2.3.4 - - [10/Oct/2025:13:55:36 +0000] "POST /v1/chat/completions HTTP/1.1" 200 17 "{escaped}"'


@pytest.mark.parametrize(
    "line",
    [
        MESSAGES,
        {"id": "x", "call_type": "acompletion", **MESSAGES, "response": {"choices": [{"message": assistant("Hello")}]}},
        {**MESSAGES, "messages": json.dumps(MESSAGES["messages"])},
        {"time": 1, "request": MESSAGES},
        {"time": 1, "request": {"url": "/v1", "body": MESSAGES}, "response": {"status": 200}},
        {"request_body": json.dumps(MESSAGES), "status": "200"},
        {"log": f"{old_line(HI)}\n", "stream": "stdout"},
        {"log": f"POST /v1 {json.dumps(MESSAGES)}\n", "stream": "stderr"},
        {"prompt": HI, "request_id": "cmpl-1"},
        f"2025-10-10 13:55:36 INFO proxy: request {json.dumps(MESSAGES)} took 3 s",
        nginx(json.dumps(MESSAGES)),
        nginx(json.dumps(MESSAGES, indent=1)),
    ],
    ids=lambda line: str(line)[:40],
)
def test_requests_in_json_are_found_however_they_are_wrapped(tmp_path: Path, line: object) -> None:
    assert read(tmp_path, line) == [HI_SAID]


def test_text_that_is_not_ascii_survives_nginx(tmp_path: Path) -> None:
    text = 'Où est-ce ? 好 "x" \\ \\x22 \n'
    assert read(tmp_path, nginx(json.dumps({"messages": [user(text)]}, ensure_ascii=False))) == [[("user", text)]]


def test_images_count_where_they_are_in_the_log_and_no_path_of_a_request_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onptq.data import manifest

    monkeypatch.setattr(manifest, "read_file", lambda path: pytest.fail(f"{path} was opened"))
    urls = (data_url(), "https://example.org/a.png", "file:///etc/hostname", "a.png", "data:image/png;base64,AAAA")
    result = collected(tmp_path, *({"messages": [user(image_url(url), text_part("What?"))]} for url in urls))
    assert [said(prompt) for prompt in result.prompts] == [[("user", "<image>What?")]]
    assert Counter(one.reason for one in result.left_out) == {WITHOUT_MEDIA: 3, UNUSABLE: 1}


def test_other_lines_are_passed_over_and_unusable_requests_explained(tmp_path: Path) -> None:
    hidden = {"messages": [user("redacted-by-litellm")]}
    deep: Any = MESSAGES
    for _ in range(20):
        deep = {"inner": deep}
    noise = ["{" * 5000 + " prompt", {"usage": {"prompt_tokens": 3}}, {"messages": []}, {"prompt": 3}, "messages", deep]
    tools = {"messages": [user("x"), {"role": "tool", "content": "4"}]}
    result = collected(tmp_path, *noise, "[" * 100_000 + ' "messages"', MESSAGES, hidden, tools)
    assert [said(prompt) for prompt in result.prompts] == [HI_SAID]
    assert Counter(one.reason for one in result.left_out) == {REDACTED: 1, UNUSABLE: 1}
    assert f"{tmp_path / 'server.log'} line 10: `role` must be one of" in "\n".join(result.describe_left_out())


def test_several_logs_are_one_source_and_ids_name_their_lines(tmp_path: Path) -> None:
    logs = [write_lines(tmp_path / name, {"messages": [user(name)]}, MESSAGES) for name in ("a.log", "b.log")]
    assert [prompt.id for prompt in server_prompts(logs).prompts] == ["a-1", "a-2", "b-1"]


# --- what a log cannot do -------------------------------------------------------------------------------------------


@given(st.text())
def test_unescape_is_the_inverse_of_repr(text: str) -> None:
    assert unescape(repr(text)[1:-1]) == text


@pytest.mark.parametrize("text", [r"\N{DIGIT ONE}", r"\0", r"\q", r"\U00110000", r"\x4", r"\u12"])
def test_escapes_that_repr_does_not_write_are_refused(text: str) -> None:
    with pytest.raises(OnPTQError, match="an escape"):
        unescape(text)


@pytest.mark.parametrize(
    "value", ["__import__('os').mkdir('made')", "f'{1+1}'", "'a' + 'b'", "b'bytes'", "'no end", "(" * 100_000]
)
def test_what_is_no_quoted_text_is_not_read_and_not_run(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = f"INFO Received request x: prompt: {value}, params: {PARAMS}"
    result = collected(tmp_path, MESSAGES, line)
    assert [said(prompt) for prompt in result.prompts] == [HI_SAID]
    assert [one.reason for one in result.left_out] == [CUT_SHORT]
    assert not (tmp_path / "made").exists()


def test_long_lines_without_an_end_are_read_in_linear_time(tmp_path: Path) -> None:
    lines = ["Received request x: prompt: '" + "\\n" * 10**6, "Request " * 10**5, "prompt" + "{" * 10**6]
    start = time.perf_counter()
    collected(tmp_path, MESSAGES, *lines)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot read the log"),
        (b"", "expected lines of vLLM with `prompt:`, or JSON with `messages` or `prompt`"),
        (b"INFO: nothing here\n", "read 0 requests in 1 lines of "),
        (b"text\n\0\1\2", "line 2 is not text: expected a log, unpacked where it was packed"),
        (b"\x1f\x8bprompt", "line 1 is not text"),
        (b'{"messages": "\xff"}\n', "line 1: not UTF-8 text (byte 15)"),
        (f"{new_lines('x', 'y')[1]}\n".encode(), "1  their text is not in the log (vLLM after 0.11.0 writes it with"),
    ],
)
def test_logs_without_prompts_are_refused(tmp_path: Path, content: bytes | None, expected: str) -> None:
    log = tmp_path / "server.log"
    if content is not None:
        log.write_bytes(content)
    with pytest.raises(OnPTQError) as caught:
        server_prompts([log])
    assert expected in str(caught.value)
    assert str(log) in str(caught.value)


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match="not a regular file"):
        server_prompts([tmp_path])
