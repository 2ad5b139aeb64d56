"""`onptq report` and `onptq view`: the page from the files alone, several results side by side, and no other."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import urllib.error
import urllib.request
from http.server import HTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

import onptq
from onptq.bank import read_trajectories
from onptq.cli import app, view
from onptq.errors import OnPTQError

COMMON = ("--tasks", "none", "--prompts", "4", "--set", "follow.max_tokens=4")


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def data_of(page: Path) -> dict[str, Any]:
    packed = max(re.findall(r"[A-Za-z0-9+/=]{200,}", page.read_text(encoding="utf-8")), key=_is_gzip)
    content: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return content


def _is_gzip(text: str) -> bool:
    return text.startswith("H4sI")


def compare(small: Path, out: Path, *arguments: object) -> Any:
    return call("compare", small, "--out", out, "--manifest", small / "prompts.jsonl", *COMMON, *arguments)


@pytest.fixture(scope="module")
def compared(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "first"
    done = compare(small, out, "rtn:W3A8", "rtn:W4A8")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-2:] == [f"Report: {out / 'report.md'}", f"Page: {out / 'page.html'}"]
    return out


@pytest.fixture(scope="module")
def quantized(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "rounded"
    manifest = ("--calibration", small / "prompts.jsonl", "--set", "follow.max_tokens=4", "--set", "data.prompts=3")
    done = call("quantize", small, "--out", out, "--method", "rtn", *manifest, "--set", "data.holdout=2", "--no-verify")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"Page: {out.with_name('rounded-run') / 'page.html'}"
    return out


def test_a_page_is_built_again_from_the_files_alone(compared: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(compared, tmp_path / "copy")
    (copy / "page.html").unlink()
    for weights in copy.rglob("*.safetensors"):
        weights.unlink()
    done = call("report", copy)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [f"Page: {copy / 'page.html'}"]
    assert (copy / "page.html").read_bytes() == (compared / "page.html").read_bytes()
    assert [one["name"] for one in data_of(copy / "page.html")["candidates"]] == ["rtn:W3A8", "rtn:W4A8"]
    for name in ("differences.md", "differences.json"):
        assert (copy / name).read_bytes() == (compared / name).read_bytes()
    receipt = json.loads((copy / "receipt.json").read_text())
    assert [one["name"] for one in receipt["candidates"]] == ["rtn:W3A8", "rtn:W4A8"]


def test_the_page_goes_where_it_is_wanted(compared: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere" / "mine.html"
    assert call("report", compared, "--out", out, "--quiet").stdout == ""
    assert out.read_bytes() == (compared / "page.html").read_bytes()
    assert {file.name for file in out.parent.iterdir()} == {
        "mine.html",
        "mine-receipt.json",
        "mine-differences.md",
        "mine-differences.json",
    }
    [line] = call("report", compared, "--out", out, "--json").stdout.splitlines()
    assert json.loads(line)["result"]["page"] == str(out) if "result" in json.loads(line) else str(out) in line


@pytest.mark.slow
def test_results_on_the_same_prompts_are_shown_side_by_side(compared: Path, small: Path, tmp_path: Path) -> None:
    second, out = tmp_path / "second", tmp_path / "both.html"
    assert compare(small, second, "rtn:W4A8", "rtn:W8A8").exit_code == 0
    done = call("report", compared, second, "--out", out)
    assert done.exit_code == 0, done.output
    both = data_of(out)
    assert [one["name"] for one in both["candidates"]] == ["rtn:W3A8", "first: rtn:W4A8", "rtn:W8A8"]
    assert all(len(one["responses"]) == len(both["prompts"]) == 4 for one in both["candidates"])


def test_a_page_of_several_does_not_replace_another_one(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.html").write_text("mine")
    done = call("report", compared, shutil.copytree(compared, tmp_path / "copy"))
    assert done.exit_code == 2
    assert "expected --out FILE" in done.stderr
    assert (tmp_path / "page.html").read_text() == "mine"


@pytest.mark.slow
def test_results_on_other_prompts_are_refused(compared: Path, quantized: Path, small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert compare(small, other, "rtn:W4A8", "--prompts", 3).exit_code == 0
    done = call("report", compared, other, "--out", tmp_path / "page.html")
    assert done.exit_code == 2
    assert "differ in the prompts; expected results on the same prompts" in done.stderr
    mixed = call("report", compared, quantized, "--out", tmp_path / "page.html")
    assert mixed.exit_code == 2
    assert "what they hold: a comparison and a run alone" in mixed.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_run_alone_has_a_page(quantized: Path) -> None:
    page = data_of(quantized.with_name("rounded-run") / "page.html")
    assert [one["name"] for one in page["candidates"]] == ["result"]
    assert [one["dense"]["text"] != "" for one in page["prompts"]].count(True) == 2
    assert page["candidates"][0]["verdict"].startswith(("Of 2 answers ", "All 2 answers "))


def test_every_run_and_comparison_delivers_its_changed_answers(quantized: Path, compared: Path) -> None:
    for home in (quantized.with_name("rounded-run"), compared):
        page, found = data_of(home / "page.html"), json.loads((home / "differences.json").read_text())
        assert [one["name"] for one in found["candidates"]] == [one["name"] for one in page["candidates"]]
        for one, other in zip(found["candidates"], page["candidates"], strict=True):
            answered = [response for response in other["responses"] if response is not None]
            assert (one["answers"], one["verdict"]) == (len(answered), other["verdict"])
            assert one["changed"] == sum(response["change"] != "same" for response in answered)
        assert (home / "differences.md").read_text().startswith("# ")


def test_a_run_keeps_both_models_answers_to_held_out_prompts(quantized: Path) -> None:
    home = quantized.with_name("rounded-run")
    dense = {one.prompt: one for one in read_trajectories(home / "final/dense_trajectories.parquet")}
    own = {one.prompt: one for one in read_trajectories(home / "final/holdout_trajectories.parquet")}
    rows = pq.read_table(home / "prompts.parquet").to_pylist()
    data = data_of(home / "page.html")
    [result] = [one for one in data["candidates"] if one["name"] == "result"]
    assert dense.keys() == own.keys() == {row["ordinal"] for row in rows if row["role"] == "holdout"}
    for place, row in enumerate(rows):
        shown, response = data["prompts"][place]["dense"], result["responses"][place]
        if row["role"] != "holdout":
            assert (shown["text"], response) == ("", None)
            continue
        mine, theirs = own[row["ordinal"]].tokens, dense[row["ordinal"]].tokens
        assert tuple(shown["tokens"]) == theirs
        parted = [at for at, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other]
        assert response["fork"] == (
            parted[0] if parted else None if len(mine) == len(theirs) else min(map(len, (mine, theirs)))
        )


@pytest.mark.parametrize("level", ["off", "light", "full"])
def test_a_run_keeps_as_much_of_its_held_out_states_as_is_asked_for(level: str, small: Path, tmp_path: Path) -> None:
    out, home = tmp_path / "out", tmp_path / "out-run"
    manifest = ("--calibration", small / "prompts.jsonl", "--set", "follow.max_tokens=6", "--set", "data.prompts=3")
    options = ("--scheme", "W2A8", "--method", "rtn", "--set", "data.holdout=3", "--set", f"report.detail={level}")
    done = call("quantize", small, "--out", out, *manifest, *options, "--no-verify")
    assert done.exit_code == 0, done.output
    [result] = [one for one in data_of(home / "page.html")["candidates"] if one["name"] == "result"]
    states = [one["states"] for one in result["responses"] if one is not None]
    shown = [
        (kind, top, future)
        for one in states
        for kind, top, future in zip(one["kind"], one["top"], one["futures"], strict=True)
    ]
    mismatches = [(top, future) for kind, top, future in shown if kind == 2]
    assert mismatches
    if level == "off":
        assert not (home / "final/details.parquet").exists()
        assert all(top is None and future is None for _, top, future in shown)
        return
    assert all(len(top["dense"]) == len(top["quantized"]) == 10 for top, _ in mismatches)
    assert all(top["dense"][0][0] != top["quantized"][0][0] for top, _ in mismatches)
    assert all(future["continued_by"] == "D" for _, future in mismatches)
    for one in states:
        for kind, top, reference, consequence in zip(
            one["kind"], one["top"], one["reference"], one["consequence"], strict=True
        ):
            assert (top is None) == (kind == 0 and level == "light")
            assert top is None or top["dense"][0][0] == reference
            assert kind != 2 or consequence is not None


def test_a_run_that_answered_none_of_its_prompts_has_a_page(small: Path, tmp_path: Path) -> None:
    manifest = ("--calibration", small / "prompts.jsonl", "--set", "data.prompts=3", "--set", "data.holdout=0")
    out = tmp_path / "smooth"
    done = call("quantize", small, "--out", out, "--method", "smoothquant", *manifest, "--no-verify")
    assert done.exit_code == 0, done.output
    [candidate] = data_of(out.with_name("smooth-run") / "page.html")["candidates"]
    assert candidate["responses"] == [None, None, None]


def test_what_the_page_shows_does_not_make_another_run(quantized: Path, small: Path) -> None:
    manifest = ("--calibration", small / "prompts.jsonl", "--set", "follow.max_tokens=4", "--set", "data.prompts=3")
    same = (
        "quantize",
        small,
        "--out",
        quantized,
        "--method",
        "rtn",
        *manifest,
        "--set",
        "data.holdout=2",
        "--no-verify",
    )
    done = call(*same, "--set", "report.detail=off")
    assert done.exit_code == 0, done.output
    assert "is a finished run" in done.output


@pytest.mark.parametrize("folder", ["absent", "empty"])
def test_a_folder_without_results_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("report", "view"):
        done = call(command, tmp_path / folder)
        assert done.exit_code == 2
        assert str(tmp_path / folder) in done.stderr
        assert "expected" in done.stderr


def test_results_without_a_page_document_are_kept_and_it_is_said(
    compared: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onptq.page.write.ASSET", "absent.html")
    done = compare(small, tmp_path / "out", "rtn:W4A8")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1].startswith("Report: ")
    assert "no page was written" in done.output
    assert call("report", compared, "--out", tmp_path / "page.html").exit_code == 2


def test_view_opens_the_page_and_builds_it_first(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def browser(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr("webbrowser.open", browser)
    copy = shutil.copytree(compared, tmp_path / "copy")
    (copy / "page.html").unlink()
    done = call("view", copy)
    assert done.exit_code == 0, done.output
    assert opened == [(copy / "page.html").resolve().as_uri()]
    assert done.stdout.strip() == opened[0]
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    without = call("view", copy)
    assert without.exit_code == 2
    assert "--serve" in without.stderr


def test_view_serves_the_page_alone_on_the_loopback_address(compared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls: Queue[str] = Queue()
    servers: list[HTTPServer] = []

    class Server(HTTPServer):
        def serve_forever(self, poll_interval: float = 0.01) -> None:
            servers.append(self)
            super().serve_forever(poll_interval)

    monkeypatch.setattr(view, "HTTPServer", Server)
    monkeypatch.setattr(view.typer, "echo", urls.put)
    serving = Thread(target=view.view, args=(compared, True, 0))
    serving.start()
    try:
        url = urls.get(timeout=20)
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert answer.read() == (compared / "page.html").read_bytes()
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        for path in ("report.json", "../first/report.json", "onptq/recipe.yaml"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(url + path, timeout=20)
    finally:
        servers[0].shutdown()
        serving.join(20)


def test_every_picture_of_the_page_is_written(compared: Path, tmp_path: Path) -> None:
    done = call("report", compared, "--pictures", tmp_path / "pictures")
    assert done.exit_code == 0, done.output
    names = {file.name for file in (tmp_path / "pictures").iterdir()}
    data = data_of(compared / "page.html")
    assert len(names) == len(data["plots"]) + sum(len(one["plots"]) for one in data["candidates"])
    assert {"size-damage.svg", "kl-percentiles.svg"} <= names
    assert f"Pictures: {len(names)} in {tmp_path / 'pictures'}" in done.stdout
    assert all((tmp_path / "pictures" / name).read_text().startswith("<svg") for name in names)
    of_readme = Path(__file__).parents[2] / "docs/assets/kl-percentiles.svg"
    for file in (tmp_path / "pictures/kl-percentiles.svg", of_readme):
        assert {"KL of a state, nats", "p50", "p95", "p99"} <= set(re.findall(r">([^<>]+)</text>", file.read_text()))


@pytest.mark.parametrize("texts", ["numbers", "answers", "prompts"])
def test_the_data_set_holds_as_much_text_as_was_asked_for(texts: str, compared: Path, tmp_path: Path) -> None:
    done = call("report", compared, "--dataset", tmp_path / "set", "--texts", texts)
    assert done.exit_code == 0, done.output
    files = {file.name: file for file in (tmp_path / "set").iterdir()}
    assert sorted(files) == ["README.md", "responses.parquet", "states.parquet"]
    states, responses = (pq.read_table(files[name]).to_pylist() for name in ("states.parquet", "responses.parquet"))
    data = data_of(compared / "page.html")
    answers = {one["name"]: one["responses"] for one in data["candidates"]}
    assert len(states) == sum(len(one["states"]["kind"]) for of in answers.values() for one in of)
    assert len(responses) == sum(map(len, answers.values()))
    first = states[0]
    shown = answers[first["candidate"]][first["prompt"]]["states"]
    assert first["kl"] == pytest.approx(shown["kl"][first["t"]], rel=1e-3)
    assert first["kind"] == ("agree", "near_miss", "mismatch")[shown["kind"][first["t"]]]
    assert ("quantized" in first, "answer" in responses[0]) == (texts != "numbers", texts != "numbers")
    assert ("question" in responses[0]) == (texts == "prompts")
    if texts == "prompts":
        asked = data["prompts"][responses[0]["prompt"]]["turns"]
        assert asked[-1]["parts"][-1]["text"] in responses[0]["question"]
        assert responses[0]["answer"] == answers[responses[0]["candidate"]][0]["answer"]["text"]
    card = files["README.md"].read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert [one["data_files"] for one in front["configs"]] == ["states.parquet", "responses.parquet"]
    assert all(f"| `{column}` |" in card for column in (*first, *responses[0]))


def test_a_data_set_needs_a_new_folder_and_a_known_level(compared: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = call("report", compared, "--dataset", tmp_path)
    assert done.exit_code == 2
    assert "is not empty" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    done = call("report", compared, "--dataset", tmp_path / "set", "--texts", "answer")
    assert done.exit_code == 2
    assert "did you mean answers" in done.stderr
    assert not (tmp_path / "set").exists()


def test_an_unknown_level_of_detail_is_refused_before_any_work(small: Path, tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match=r"detail 'lite' \(did you mean light\?\): expected one of off, light, full"):
        onptq.quantize(small, tmp_path / "out", detail="lite")
    assert not (tmp_path / "out").exists()
