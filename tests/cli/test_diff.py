"""`onptq diff`: two checkpoints, methods and servers, from the command line to the page, and its exit code."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import onptq
from onptq.cli import app
from onptq.evaluate.candidates import folder_name
from onptq.recipe import Recipe

LENGTH = 6  # tokens of an answer


def call(*arguments: object) -> Any:
    return invoke("diff", *arguments)


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def checkpoint(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that OnPTQ made of the small model."""
    out = tmp_path_factory.mktemp("quantized") / "w3a8"
    recipe = Recipe.preset("light", {"scheme": "W3A8", "method": "rtn"})
    onptq.quantize(small, out, calibration=small / "prompts.jsonl", recipe=recipe)
    return out


@pytest.fixture(scope="module")
def compared(small: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("diff") / "out"
    home = checkpoint.with_name("w3a8-run")
    arguments = [
        small,
        f"mine={home}",
        "rtn:W3A8",
        "--manifest",
        small / "prompts.jsonl",
        "--set",
        "report.detail=full",
    ]
    return out, call(*arguments, "--max-tokens", LENGTH, "--out", out, "--device", "cpu")


def again(small: Path, checkpoint: Path, out: Path, *options: object) -> Any:
    """The same comparison, of which nothing is measured again."""
    arguments = [small, f"mine={checkpoint}", "--manifest", small / "prompts.jsonl"]
    return call(*arguments, "--max-tokens", LENGTH, "--out", out, "--device", "cpu", *options)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_and_the_page_last(compared: tuple[Path, Any]) -> None:
    out, done = compared
    assert done.exit_code == 0, done.output
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith(("mine: Of 6 answers", "mine: All 6 answers"))
    assert lines[-1] == f"Page: {out / 'page.html'}"
    assert (out / "page.html").read_bytes().startswith(b"<!doctype html")


def test_a_checkpoint_and_the_method_that_made_it_change_the_same_answers(compared: tuple[Path, Any]) -> None:
    out, _ = compared
    both = {one["name"]: one for one in json.loads((out / "differences.json").read_text())["candidates"]}
    mine, method = both["mine"], both["rtn:W3A8"]
    assert mine["answers"] == method["answers"] == 6
    assert mine["changed"] > 0
    assert mine["differences"] == method["differences"]


def test_every_state_is_kept_where_that_is_asked_for(compared: tuple[Path, Any]) -> None:
    out, _ = compared
    for name in json.loads((out / "differences.json").read_text())["candidates"]:
        home = out / "onptq/candidates" / folder_name(name["name"])
        states, details = (pq.read_table(home / f"{name}.parquet").num_rows for name in ("states", "details"))
        assert states == details > 6


def test_a_run_without_its_checkpoint_is_refused(compared: tuple[Path, Any], checkpoint: Path, tmp_path: Path) -> None:
    home = shutil.copytree(checkpoint.with_name("w3a8-run"), tmp_path / "gone-run")
    text = refused(checkpoint, home, "--out", tmp_path / "out")
    assert "gone-run holds a run, and" in text
    assert "expected the folder of a checkpoint" in text


def test_a_changed_answer_says_what_was_asked_and_where_it_parts(compared: tuple[Path, Any], small: Path) -> None:
    out, _ = compared
    asked = [json.loads(line) for line in (small / "prompts.jsonl").read_text().splitlines()]
    texts = json.dumps(asked)
    for one in json.loads((out / "differences.json").read_text())["candidates"][0]["differences"]:
        assert one["question"].split("[image] ")[-1] in texts
        assert one["dense"] != one["quantized"]
        assert one["dense_token"] != one["quantized_token"]
        assert 0 <= one["fork"] < LENGTH
        assert one["margin"] >= 0
    assert (out / "differences.md").read_text().startswith("# ")


def test_a_second_candidate_is_added_and_only_the_named_ones_are_printed(
    compared: tuple[Path, Any], small: Path, checkpoint: Path
) -> None:
    done = again(small, checkpoint, compared[0], "--top", 1)
    assert done.exit_code == 0, done.output
    assert "mine: " in done.stdout
    assert "RTN" not in done.stdout.splitlines()[0]
    assert "rtn" not in [line.partition(":")[0].lower() for line in done.stdout.splitlines()]


def test_markdown_and_json_are_alone_on_stdout(compared: tuple[Path, Any], small: Path, checkpoint: Path) -> None:
    text = again(small, checkpoint, compared[0], "--format", "markdown", "--top", 1).stdout
    assert text.startswith("# ")
    assert text.count("\n### ") <= 1
    assert "Page:" not in text
    content = json.loads(again(small, checkpoint, compared[0], "--format", "json").stdout)
    assert [one["name"] for one in content["candidates"]] == ["mine"]


def test_progress_and_differences_are_json_lines(compared: tuple[Path, Any], small: Path, checkpoint: Path) -> None:
    lines = [json.loads(line) for line in again(small, checkpoint, compared[0], "--json").stdout.splitlines()]
    assert lines[-1]["event"] == "result"
    assert lines[-1]["result"]["page"] == str(compared[0] / "page.html")
    assert lines[-1]["result"]["candidates"][0]["answers"] == 6


def test_quiet_prints_nothing(compared: tuple[Path, Any], small: Path, checkpoint: Path) -> None:
    done = again(small, checkpoint, compared[0], "--quiet")
    assert (done.exit_code, done.output) == (0, "")


@pytest.mark.slow
def test_the_exit_code_says_whether_too_many_answers_changed_clearly(
    compared: tuple[Path, Any], small: Path, checkpoint: Path
) -> None:
    lines = again(small, checkpoint, compared[0], "--json").stdout.splitlines()
    (mine,) = json.loads(lines[-1])["result"]["candidates"]
    percent = 100 * mine["clear"] / mine["answers"]
    assert percent > 0
    assert again(small, checkpoint, compared[0], "--quiet", "--fail-above", percent).exit_code == 0
    failed = again(small, checkpoint, compared[0], "--quiet", "--fail-above", percent - 1)
    assert failed.exit_code == 1
    assert "changed clearly, more than" in failed.output


def test_a_model_against_itself_changes_nothing(small: Path, tmp_path: Path) -> None:
    manifest = small / "prompts.jsonl"
    options = ("--manifest", manifest, "--max-tokens", 4, "--prompts", 2, "--device", "cpu", "--fail-above", 0)
    done = call(small, f"same={small}", *options, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("same: All 2 answers are worded as before.")


# --- mistakes ---------------------------------------------------------------------------------------------------------


def refused(*arguments: object) -> str:
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    text: str = done.output
    return " ".join(text.split())


def test_mistakes_are_said_before_anything_is_computed(small: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a", "image": "missing.png"}\n{"text": 7}\n')
    out = ("--out", tmp_path / "out")
    text = refused(small, f"q={small}", "--manifest", bad, *out)
    assert "missing.png" in text
    assert "line 2" in text
    assert "cannot read the manifest" in refused(small, f"q={small}", "--manifest", tmp_path / "no.jsonl", *out)
    assert "no folder here" in refused(small, tmp_path / "absent", "--manifest", bad, *out)
    assert "--format xml: expected one of table, markdown, json" in refused(small, small, "--format", "xml")
    assert "are for servers" in refused(small, small, "--model", "x", *out)
    assert "addresses alone, or checkpoints alone" in refused("http://127.0.0.1:9", small, "--manifest", bad)
    assert "addresses alone, or checkpoints alone" in refused(small, "q=http://127.0.0.1:9", "--manifest", bad)
    assert "expected --manifest" in refused("http://127.0.0.1:9", "q=http://127.0.0.1:9", *out)
    assert not (tmp_path / "out").exists()


def test_a_key_is_read_from_the_environment_alone(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    urls = ("http://127.0.0.1:9", "q=http://127.0.0.1:9")
    text = refused(*urls, "--manifest", small / "prompts.jsonl", "--key-env", "MY_KEY", "--out", tmp_path / "out")
    assert "--key-env MY_KEY: there is no such environment variable" in text


def test_the_folder_of_other_results_is_not_written_to(compared: tuple[Path, Any], small: Path) -> None:
    urls = ("http://127.0.0.1:9", "q=http://127.0.0.1:9")
    text = refused(*urls, "--manifest", small / "prompts.jsonl", "--out", compared[0])
    assert "choose another --out" in text


# --- servers ----------------------------------------------------------------------------------------------------------


class Answering(BaseHTTPRequestHandler):
    """A server whose answers end with a word of its own."""

    word = "red"

    def do_GET(self) -> None:
        self._send({"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        tokens = [
            {"token": text, "logprob": math.log(0.9), "top_logprobs": [{"token": text, "logprob": math.log(0.9)}]}
            for text in ("It is", f" {self.word}")
        ]
        message = {"role": "assistant", "content": f"It is {self.word}"}
        choice = {"message": message, "logprobs": {"content": tokens}, "finish_reason": "stop"}
        self._send({"choices": [choice]})

    def _send(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[str, str]]:
    handlers = [type("Handler", (Answering,), {"word": word}) for word in ("red", "blue")]
    running = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in handlers]
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True) for server in running]
    for thread in threads:
        thread.start()
    first, second = (f"http://127.0.0.1:{server.server_port}" for server in running)
    yield first, second
    for server, thread in zip(running, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("command", ["diff", "compare"])
def test_two_servers_end_with_the_same_page(
    command: str, servers: tuple[str, str], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-1")
    out = tmp_path / "out"
    options = ("--manifest", small / "prompts.jsonl", "--out", out, "--key-env", "MY_KEY")
    done = invoke(command, servers[0], f"q={servers[1]}", *options)
    assert done.exit_code == 0, done.output
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("q: Of 6 answers 6")
    assert lines[-1] == f"Page: {out / 'page.html'}"
    assert '" red" > " blue"' in done.stdout
    assert json.loads((out / "differences.json").read_text())["candidates"][0]["changed"] == 6
    receipt = json.loads((out / "receipt.json").read_text())
    assert (receipt["model"]["url"], receipt["model"]["model"]) == (servers[0], "model")
    assert receipt["prompts"]["count"] == 6
    [q] = receipt["candidates"]
    assert (q["name"], q["url"], q["answers"], q["changed"]) == ("q", servers[1], 6, 6)
    assert (q["positions"], q["top_1_agreement"], q["noise"]) == (12, 0.5, 0)
    assert 0 <= q["kl"]["median"] <= q["kl"]["max"]
    assert "sk-1" not in (out / "page.html").read_text() + (out / "differences.json").read_text()


def test_servers_are_not_compared_on_items(servers: tuple[str, str], small: Path, tmp_path: Path) -> None:
    manifest = ("--manifest", small / "prompts.jsonl", "--out", tmp_path / "out")
    done = invoke("compare", servers[0], f"q={servers[1]}", *manifest, "--tasks", "read")
    assert done.exit_code == 2
    assert "--tasks is for checkpoints" in done.output
    assert "are for servers" in invoke("compare", small, small, "--model", "x").output
    assert not (tmp_path / "out").exists()


def test_help_is_there_without_anything_heavy() -> None:
    source = (
        "import sys\nfrom onptq.cli import app\n"
        "try:\n    app(['diff', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'numpy', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert "--fail-above" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
