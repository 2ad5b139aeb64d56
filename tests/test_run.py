from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import save_file

from onptq.errors import OnPTQError
from onptq.files import atomically, to_json
from onptq.progress import JsonReporter, LoggedReporter, QuietReporter, RichReporter
from onptq.recipe import Recipe
from onptq.run import Codec, Run, check_place, run_home

IDENTITY: dict[str, Any] = {
    "recipe": Recipe().model_dump(),
    "model": {"source": "/models/a", "sha256": "m" * 64},
    "prompts": {"source": "a.jsonl", "sha256": "p" * 64, "count": 128},
    "versions": {"onptq": "0.1.0", "torch": "2.13.0"},
    "seeds": [0],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    identity = copy.deepcopy(IDENTITY)
    *sections, leaf = path.split(".")
    node = identity
    for section in sections:
        node = node[section]
    node[leaf] = value
    return identity


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@contextmanager
def child(source: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process running `source` that has printed its first line."""
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_new_run_records_what_it_is(tmp_path: Path) -> None:
    with Run.open(tmp_path / "deep" / "run", IDENTITY) as run:
        assert yaml.safe_load(run.file("recipe.yaml").read_text()) == {"contract": 2} | IDENTITY
        assert run.file("recipe.yaml") == tmp_path / "deep" / "run" / "onptq" / "recipe.yaml"
        assert not run.finished


def test_the_same_identity_continues_and_keeps_what_is_there(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.write_json({"a": 1}, "rounds", "0", "x.json")
    before = run.file("recipe.yaml").read_bytes()
    with Run.open(tmp_path, changed("model.source", "/models/moved")) as run:
        assert run.has("rounds", "0", "x.json")
        assert run.read_json("rounds", "0", "x.json") == {"a": 1}
        assert run.file("recipe.yaml").read_bytes() == before
        assert [event["resumed"] for event in run.events()] == [False, True]


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("recipe.branch.horizon", 8, "recipe.branch.horizon: 4 -> 8"),
        ("recipe.scheme", "W8A8", "recipe.scheme: 'W4A8' -> 'W8A8'"),
        ("model.sha256", "n" * 64, "model.sha256: '" + "m" * 64),
        ("prompts.sha256", "q" * 64, "prompts.sha256: '" + "p" * 64),
        ("prompts.count", 127, "prompts.count: 128 -> 127"),
        ("prompts", None, "prompts.count: 128 -> (absent)"),
    ],
)
def test_another_identity_is_refused_with_the_difference_and_nothing_is_touched(
    tmp_path: Path, path: str, value: Any, shown: str
) -> None:
    Run.open(tmp_path, IDENTITY).close()
    before = snapshot(tmp_path)
    with pytest.raises(OnPTQError) as caught:
        Run.open(tmp_path, changed(path, value))
    assert shown in str(caught.value)
    assert "--out" in str(caught.value)
    assert snapshot(tmp_path) == before


def test_every_difference_is_listed(tmp_path: Path) -> None:
    Run.open(tmp_path, IDENTITY).close()
    identity = changed("recipe.rounds", 3) | {"model": {"source": "", "sha256": "z"}}
    with pytest.raises(OnPTQError, match=r"(?s)recipe\.rounds: 1 -> 3.*model\.sha256"):
        Run.open(tmp_path, identity)


def test_other_versions_only_warn(tmp_path: Path) -> None:
    Run.open(tmp_path, IDENTITY).close()
    warnings: list[str] = []
    with Run.open(tmp_path, changed("versions.torch", "2.14.0"), warn=warnings.append) as run:
        assert len(warnings) == 1
        assert "torch: '2.13.0' -> '2.14.0'" in warnings[0]
        assert [event["text"] for event in run.events() if event["event"] == "warning"] == warnings


def test_a_folder_with_something_else_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OnPTQError, match="not empty and not a run"):
        Run.open(tmp_path, IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_named_onptq_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "onptq").mkdir()
    (tmp_path / "onptq" / "notes.txt").write_text("mine")
    with pytest.raises(OnPTQError, match="not empty and not a run"):
        Run.open(tmp_path, IDENTITY)


def test_a_run_killed_in_its_first_moment_can_begin_again(tmp_path: Path) -> None:
    (tmp_path / "onptq").mkdir()
    (tmp_path / "onptq" / ".lock").touch()
    (tmp_path / "onptq" / ".onptq-tmp-1-recipe.yaml").write_text("recip")
    with Run.open(tmp_path, IDENTITY) as run:
        assert yaml.safe_load(run.file("recipe.yaml").read_text()) == {"contract": 2} | IDENTITY
        assert sorted(path.name for path in run.file().iterdir()) == [".lock", "SHA256SUMS", "log.jsonl", "recipe.yaml"]


@pytest.mark.parametrize("text", ["- a", "a: [", "\x00"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    Run.open(tmp_path, IDENTITY).close()
    (tmp_path / "onptq" / "recipe.yaml").write_text(text)
    with pytest.raises(OnPTQError, match=r"cannot read .*recipe\.yaml"):
        Run.open(tmp_path, IDENTITY)


def test_a_run_of_a_later_contract_is_refused(tmp_path: Path) -> None:
    Run.open(tmp_path, IDENTITY).close()
    record = tmp_path / "onptq" / "recipe.yaml"
    record.write_text(record.read_text().replace("contract: 2", "contract: 3"))
    with pytest.raises(OnPTQError, match=r"contract 3.*reads 1 to 2: update onptq"):
        Run.open(tmp_path, IDENTITY)


def test_a_quantizations_files_lie_beside_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model-W4A8"
    assert run_home(out) == tmp_path / "model-W4A8-run"
    assert run_home("model-W4A8/") == Path("model-W4A8-run")
    with Run.open(out, IDENTITY, home=run_home(out)) as run:
        assert run.file("recipe.yaml") == tmp_path / "model-W4A8-run" / "recipe.yaml"
        assert not out.exists()
        with pytest.raises(OnPTQError, match="in use"):
            check_place(out, run_home(out))
    out.mkdir()
    monkeypatch.chdir(out)
    assert run_home(".") == tmp_path / "model-W4A8-run"


@pytest.mark.parametrize("occupied", ["out", "out-run"])
def test_neither_folder_of_a_new_run_may_hold_anything(tmp_path: Path, occupied: str) -> None:
    out = tmp_path / "out"
    (tmp_path / occupied).mkdir()
    (tmp_path / occupied / "thesis.tex").write_text("years of work")
    with pytest.raises(OnPTQError, match=f"{occupied} is not empty and not a run"):
        Run.open(out, IDENTITY, home=run_home(out))
    with pytest.raises(OnPTQError, match=f"{occupied} is not empty and not a run"):
        check_place(out, run_home(out))
    assert [path.name for path in tmp_path.iterdir()] == [occupied]


def test_a_place_that_cannot_hold_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OnPTQError, match="file is a file; expected a folder"):
            Run.open(path, IDENTITY)
        with pytest.raises(OnPTQError, match="file is a file; expected a folder"):
            check_place(path)
    assert (tmp_path / "file").read_text() == "x"


def test_a_place_is_checked_without_creating_anything(tmp_path: Path) -> None:
    check_place(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []
    with Run.open(tmp_path, IDENTITY), pytest.raises(OnPTQError, match="in use"):
        check_place(tmp_path)
    before = snapshot(tmp_path)
    check_place(tmp_path)
    assert snapshot(tmp_path) == before
    Run.open(tmp_path, IDENTITY).close()
    (tmp_path / "onptq" / "recipe.yaml").unlink()
    with pytest.raises(OnPTQError, match="not empty and not a run"):
        check_place(tmp_path)


def test_an_unwritable_parent_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "locked"
    parent.mkdir(mode=0o500)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # root may write anywhere
    try:
        with pytest.raises(OnPTQError, match="Permission denied"):
            Run.open(parent / "run", IDENTITY)
    finally:
        if root:
            os.seteuid(0)
    assert list(parent.iterdir()) == []


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def write_half(path: Path) -> None:
        path.write_text("seco")
        raise ZeroDivisionError

    with Run.open(tmp_path, IDENTITY) as run:
        with run.writing("rounds", "0", "a.txt") as temporary:
            temporary.write_text("first")
            assert temporary.parent == run.file("rounds", "0")
            assert temporary.suffix == ".txt"
            assert not run.has("rounds", "0", "a.txt")
        assert run.file("rounds", "0", "a.txt").read_text() == "first"
        with pytest.raises(ZeroDivisionError), run.writing("rounds", "0", "a.txt") as temporary:
            write_half(temporary)
        assert run.file("rounds", "0", "a.txt").read_text() == "first"
        assert [path.name for path in run.file("rounds", "0").iterdir()] == ["a.txt"]


@pytest.fixture
def small_disk(tmpfs: Callable[[str], Path]) -> Path:
    return tmpfs("256k")


NOISE = np.random.default_rng(0).integers(0, 255, 1 << 20, dtype=np.uint8)


def write_noise(path: Path) -> None:
    path.write_bytes(NOISE.tobytes())


def test_what_is_written_behind_comes_before_what_is_written_next(tmp_path: Path) -> None:
    slow = Event()

    def write(path: Path) -> None:
        slow.wait(60)
        path.write_text("first")

    with Run.open(tmp_path, IDENTITY) as run:
        run.write_json([1], "halfway")
        run.write_behind(write, "first", instead_of=run.file("halfway"))
        assert run.has("halfway")
        assert not run.has("first")
        slow.set()
        with run.writing("second") as temporary:
            assert run.file("first").read_text() == "first"
            assert not run.has("halfway")
            temporary.write_text("second")
        slow.clear()
        run.write_behind(write, "third")
        slow.set()
    assert run.file("third").read_text() == "first"


@pytest.mark.parametrize("where", ["at the next file", "at the end"])
def test_what_goes_wrong_behind_is_told_and_leaves_what_it_was_to_replace(small_disk: Path, where: str) -> None:
    def use(run: Run) -> None:
        run.write_json([1], "halfway")
        run.write_behind(write_noise, "state", instead_of=run.file("halfway"))
        if where == "at the next file":
            run.write_json([2], "next")

    run = Run.open(small_disk / "run", IDENTITY)
    with pytest.raises(OnPTQError, match=r"cannot write .*state.*No space left"), run:
        use(run)
    assert run.has("halfway")
    assert not run.has("state")
    assert not run.has("next")
    Run.open(small_disk / "run", IDENTITY).close()


def test_the_first_error_is_shown_and_not_that_of_a_file_behind_it(small_disk: Path) -> None:
    def use(run: Run) -> None:
        run.write_behind(write_noise, "state")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Run.open(small_disk / "run", IDENTITY) as run:
        use(run)


def test_a_reader_of_the_old_file_never_sees_the_new_one(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.write_json("old", "state.json")
        with run.file("state.json").open() as reader:
            run.write_json("new", "state.json")
            assert json.load(reader) == "old"
        assert run.read_json("state.json") == "new"


def test_kill_9_while_writing_keeps_the_old_file_and_the_run_goes_on(tmp_path: Path) -> None:
    source = """
        import json, sys, time
        from onptq.run import Run
        run = Run.open(sys.argv[1], json.loads(sys.argv[2]))
        run.write_json({"version": 1}, "rounds", "0", "state.json")
        with run.writing("rounds", "0", "state.json") as temporary:
            with temporary.open("w") as file:
                file.write('{"versi')
                file.flush()
                print("ready", flush=True)
                time.sleep(60)
    """
    folder = tmp_path / "run"
    with child(source, folder, json.dumps(IDENTITY)) as process:
        assert list(folder.rglob(".onptq-tmp-*"))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert json.loads((folder / "onptq" / "rounds" / "0" / "state.json").read_text()) == {"version": 1}
    with Run.open(folder, IDENTITY) as run:
        assert not list(folder.rglob(".onptq-tmp-*"))
        run.write_json({"version": 2}, "rounds", "0", "state.json")
        assert run.read_json("rounds", "0", "state.json") == {"version": 2}


def test_two_processes_cannot_have_the_same_run_and_a_dead_one_does_not_hold_it(tmp_path: Path) -> None:
    source = """
        import json, sys, time
        from onptq.run import Run
        run = Run.open(sys.argv[1], json.loads(sys.argv[2]))
        print("ready", flush=True)
        time.sleep(60)
    """
    with child(source, tmp_path, json.dumps(IDENTITY)) as process:
        with pytest.raises(OnPTQError, match="in use"):
            Run.open(tmp_path, IDENTITY)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with Run.open(tmp_path, IDENTITY), pytest.raises(OnPTQError, match="in use"):
        Run.open(tmp_path, IDENTITY)
    Run.open(tmp_path, IDENTITY).close()


@pytest.mark.parametrize(
    "write",
    [
        write_noise,
        lambda path: save_file({"a": NOISE}, path),
        lambda path: pq.write_table(pa.table({"a": NOISE}), path),
    ],
    ids=["bytes", "safetensors", "parquet"],
)
def test_a_full_disk_says_so_and_loses_nothing(small_disk: Path, write: Any) -> None:
    with Run.open(small_disk / "run", IDENTITY) as run:
        run.write_json({"a": 1}, "rounds", "0", "state")
        with (
            pytest.raises(OnPTQError, match=r"No space left .*free there.*same command continues"),
            run.writing("rounds", "0", "state") as temporary,
        ):
            write(temporary)
        assert run.read_json("rounds", "0", "state") == {"a": 1}
        assert [path.name for path in run.file("rounds", "0").iterdir()] == ["state"]
        run.write_json({"a": 2}, "rounds", "0", "state")
        assert run.read_json("rounds", "0", "state") == {"a": 2}


def test_a_full_disk_while_logging_says_so(small_disk: Path) -> None:
    with Run.open(small_disk / "run", IDENTITY) as run, pytest.raises(OnPTQError, match="No space left"):
        run.log("note", text="x" * (1 << 20))


@pytest.mark.parametrize(
    "writer", ["temporary.write_bytes(bytes(100000))", "save_file({'a': np.zeros(99999)}, temporary)"]
)
def test_a_file_size_limit_is_explained_like_a_full_disk(tmp_path: Path, writer: str) -> None:
    source = f"""
        import json, resource, signal, sys
        import numpy as np
        from safetensors.numpy import save_file
        from onptq.errors import OnPTQError
        from onptq.run import Run
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        run = Run.open(sys.argv[1], json.loads(sys.argv[2]))
        run.write_json([1], "state")
        resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))
        try:
            with run.writing("state") as temporary:
                {writer}
        except OnPTQError as error:
            print("ready")
            print(error)
    """
    with child(source, tmp_path, json.dumps(IDENTITY)) as process:
        message = process.communicate()[0]
    assert "File too large" in message
    assert "free there" in message
    assert sorted(path.name for path in (tmp_path / "onptq").iterdir()) == [
        ".lock",
        "SHA256SUMS",
        "log.jsonl",
        "recipe.yaml",
        "state",
    ]


def test_other_errors_while_writing_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomically(tmp_path / "a"):
        (tmp_path / "missing").read_bytes()


def test_an_error_is_explained_once(tmp_path: Path) -> None:
    with pytest.raises(OnPTQError) as caught, atomically(tmp_path / "outer"), atomically(tmp_path / "inner"):
        raise RuntimeError("No space left on device (os error 28)")
    assert str(caught.value).count("cannot write") == 1


def test_the_log_is_one_json_object_per_line_and_survives_a_torn_end(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.log("phase", phase="Follow", seconds=np.float32(1.5), where=tmp_path)
    with run.file("log.jsonl").open("a") as file:
        file.write('{"time": "2026-01-01", "eve')
    assert [event["event"] for event in run.events()] == ["open", "phase"]
    with Run.open(tmp_path, IDENTITY) as run:
        run.log("note", text="größer")
    lines = [json.loads(line) for line in run.file("log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["event"] for line in lines] == ["open", "phase", "open", "note"]
    assert (lines[1]["seconds"], lines[1]["where"], lines[3]["text"]) == (1.5, str(tmp_path), "größer")
    assert all(line["time"].endswith("+00:00") for line in lines)


def test_a_run_is_finished_once_its_summary_exists(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.write_json({"kl": float("nan"), "count": np.int64(3), "list": (1, 2)}, "summary.json")
        assert run.finished
        assert run.read_json("summary.json") == {"kl": None, "count": 3, "list": [1, 2]}


def test_json_is_valid_for_every_reader() -> None:
    value = {"a": np.array([1.0, np.inf]), "b": Path("x"), 3: {True: None}, "c": False}
    assert json.loads(to_json(value), parse_constant=lambda name: pytest.fail(name)) == {
        "a": [1.0, None],
        "b": "x",
        "3": {"True": None},
        "c": False,
    }


@pytest.mark.parametrize("reporter", [QuietReporter, JsonReporter, RichReporter])
def test_phases_notes_and_warnings_land_in_the_log(tmp_path: Path, reporter: Any, capfd: Any) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        logged = LoggedReporter(reporter(), run.log)
        for _ in range(2):
            with logged.phase("Follow", total=3, unit="prompts") as bar:
                bar.advance(2, loss=0.5)
                with logged.phase("Inside") as inner:
                    inner.advance()
        logged.note("a [note]")
        logged.warn("careful")
        with pytest.raises(ZeroDivisionError), logged.phase("Compare"):
            raise ZeroDivisionError
        events = list(run.events())
    ends = [event for event in events if event.get("phase") == "Follow" and event["state"] == "end"]
    assert [event["done"] for event in ends] == [2, 2]
    assert all(0 <= event["seconds"] < 60 for event in ends)
    assert [event["state"] for event in events if event.get("phase") == "Compare"] == ["start", "failed"]
    assert [event["text"] for event in events if event["event"] in ("note", "warning")] == ["a [note]", "careful"]
    captured = capfd.readouterr()
    assert "careful" in captured.err + captured.out


def test_json_lines_start_end_and_do_not_flood(capsys: Any) -> None:
    reporter = JsonReporter()
    with reporter.phase("Follow", total=1000, unit="prompts") as bar:
        for _ in range(1000):
            bar.advance(loss=0.5)
    reporter.note("n")
    reporter.warn("w")
    reporter.result({"kl": float("nan")})
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert lines[0] | {"seconds": 0} == {
        "event": "phase", "state": "start", "phase": "Follow", "total": 1000, "unit": "prompts", "done": 0, "seconds": 0
    }  # fmt: skip
    phase = [line for line in lines if line["event"] == "phase"]
    assert len(phase) < 10
    assert (phase[-1]["state"], phase[-1]["done"], phase[-1]["info"]) == ("end", 1000, {"loss": 0.5})
    assert lines[-3:] == [
        {"event": "note", "text": "n"},
        {"event": "warning", "text": "w"},
        {"event": "result", "result": {"kl": None}},
    ]


def test_quiet_says_only_warnings_and_bars_stay_off_stdout(capsys: Any) -> None:
    for reporter in (QuietReporter(), RichReporter()):
        with reporter.phase("Follow", total=2, unit="prompts") as bar:
            bar.advance(2)
        reporter.note("a note")
        reporter.warn("careful")
        out, err = capsys.readouterr()
        assert out == ""
        assert "warning: careful" in err
        assert ("2/2 prompts" in err, "a note" in err) == (isinstance(reporter, RichReporter),) * 2


def test_the_rich_result_is_a_table_on_stdout(capsys: Any) -> None:
    RichReporter().result({"scheme": "W4A8", "held-out mismatch": "[22%] -> 2%"})
    out, _ = capsys.readouterr()
    assert "W4A8" in out
    assert "[22%] -> 2%" in out


def write_text(value: str, path: Path) -> None:
    path.write_text(value)


TEXT: Codec[str] = Codec(write_text, lambda path: path.read_text())


def test_a_committed_step_is_not_computed_again(tmp_path: Path) -> None:
    computed = []

    def compute() -> str:
        computed.append(1)
        return "value"

    for _ in range(2):
        with Run.open(tmp_path, IDENTITY) as run:
            assert run.step("rounds/0/x", TEXT, compute) == "value"
    assert len(computed) == 1


@pytest.mark.parametrize("damaged", [b"valuE", b"", b"value "])
def test_a_file_that_changed_since_it_was_committed_is_refused_until_it_is_deleted(
    damaged: bytes, tmp_path: Path
) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.step("x", TEXT, lambda: "value")
        run.file("x").write_bytes(damaged)
        with pytest.raises(OnPTQError, match=r"x has changed since it was written: delete .*x, and the same"):
            run.step("x", TEXT, lambda: "value")
        run.file("x").unlink()
        assert run.step("x", TEXT, lambda: "value") == "value"


def test_a_file_written_several_times_matches_whichever_version_a_kill_left(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.write_json([1], "x.json")
        before = run.file("x.json").read_bytes()
        run.write_json([2], "x.json")
        assert run.read_json("x.json") == [2]
        run.file("x.json").write_bytes(before)  # as if killed after the sum, before the rename
        assert run.read_json("x.json") == [1]


def test_an_unreadable_file_without_a_sum_says_what_to_delete(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.file("x.json").write_text("{")
        with pytest.raises(OnPTQError, match=r"cannot read .*x\.json .*: delete .*x\.json, and the same"):
            run.read_json("x.json")


def test_unreadable_lines_of_the_log_are_skipped_and_the_next_line_is_whole(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        with run.file("log.jsonl").open("a") as log:
            log.write('[]\n\xff\n{"event": "ste')  # the last one cut short by a full disk
        run.log("note", text="later")
        assert [event["event"] for event in run.events()] == ["open", "note"]


def test_seconds_add_up_over_processes_and_failed_attempts(tmp_path: Path) -> None:
    for state in ("failed", "end"):
        with Run.open(tmp_path, IDENTITY) as run:
            run.log("phase", state="start", phase="Load")
            run.log("phase", state=state, phase="Load", seconds=1.5)
    assert run.seconds() == {"Load": 3.0}


def test_what_safetensors_left_behind_is_swept(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        (run.file() / ".tmpAb12Cd").write_bytes(b"half a theta")
    with Run.open(tmp_path, IDENTITY) as run:
        assert not (run.file() / ".tmpAb12Cd").exists()


def test_a_file_and_then_its_folder_are_synced_around_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves the old file or the whole new one: its bytes are on disk before it has its name."""
    calls: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(handle: int) -> None:
        fsync(handle)
        calls.append(("fsync", os.fstat(handle).st_ino))

    def spy_replace(source: Path, target: Path) -> None:
        calls.append(("replace", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    with atomically(tmp_path / "x") as path:
        path.write_text("whole")
    file, folder = (tmp_path / "x").stat().st_ino, tmp_path.stat().st_ino
    assert calls == [("fsync", file), ("replace", file), ("fsync", folder)]


def test_lines_of_the_log_that_lost_a_field_do_not_count(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.log("phase", phase="Load", state="end", seconds=1.5)
        run.log("phase", phase="Load", state="end", secnds=1.0)
        run.log("phase", phase=["Load"], state="end", seconds=1.0)
        run.log("phase", phase="Load", state="end", seconds="1")
        run.log("phase", state="failed", seconds=1.0)
        assert run.seconds() == {"Load": 1.5}


def test_only_the_process_that_began_a_run_withdraws_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Run.open(out, IDENTITY):
        pass  # as if killed before its first step
    with pytest.raises(OnPTQError, match="no luck"), Run.open(out, IDENTITY) as run:
        raise OnPTQError("no luck")
    assert run.resumed
    assert (run.home / "recipe.yaml").exists()
    with pytest.raises(OnPTQError, match="no luck"), Run.open(tmp_path / "new", IDENTITY):
        raise OnPTQError("no luck")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", ["rounds/0", "final", "rtn/final"])
def test_of_a_damaged_round_all_is_deleted_as_its_files_are_made_from_one_another(place: str, tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.step(f"{place}/x", TEXT, lambda: "value")
        run.file(place, "x").write_bytes(b"valuE")
        with pytest.raises(OnPTQError, match=rf"x has changed since it was written: delete .*/onptq/{place}, and"):
            run.read(f"{place}/x", TEXT.read)


def test_a_run_does_not_finish_with_a_damaged_file_that_nothing_read_again(tmp_path: Path) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.step("rounds/0/x", TEXT, lambda: "value")
    run.file("rounds", "0", "x").write_bytes(b"valuE")
    with Run.open(tmp_path, IDENTITY) as run:
        with pytest.raises(OnPTQError, match=r"rounds/0/x has changed since it was written"):
            run.finish({})
        assert not run.finished
        run.file("rounds", "0", "x").unlink()
        run.step("rounds/0/x", TEXT, lambda: "value")
        run.finish({})
    assert run.finished


@pytest.mark.parametrize("what", ["a file", "a line of the log", "the summary"])
def test_a_run_whose_folder_is_deleted_says_so_and_can_begin_again(what: str, tmp_path: Path) -> None:
    uses: dict[str, Callable[[Run], object]] = {
        "a file": lambda run: run.write_json([1], "rounds", "0", "x.json"),
        "a line of the log": lambda run: run.log("note", text="a"),
        "the summary": lambda run: run.finish({}),
    }
    with Run.open(tmp_path / "run", IDENTITY) as run:
        shutil.rmtree(run.home)
        run.scratch("prompts").mkdir(parents=True)  # what does not fit into memory is written past the run
        with pytest.raises(OnPTQError, match=r"onptq was deleted while the run went on: begin it again"):
            uses[what](run)
    with Run.open(tmp_path / "run", IDENTITY) as run:
        assert not run.resumed
        assert not run.scratch("prompts").exists()


def test_a_record_that_changed_only_where_nothing_is_compared_is_refused_too(tmp_path: Path) -> None:
    Run.open(tmp_path, IDENTITY).close()
    record = tmp_path / "onptq" / "recipe.yaml"
    record.write_text(record.read_text().replace("/models/a", "/models/b"))
    with pytest.raises(OnPTQError, match=r"recipe\.yaml has changed since it was written: restore it, or choose"):
        Run.open(tmp_path, IDENTITY)


@pytest.mark.parametrize("end", [66, 67, 70, 40], ids=["no name", "half a name", "a folder's name", "half a sum"])
def test_torn_sums_stop_no_run(tmp_path: Path, end: int) -> None:
    with Run.open(tmp_path, IDENTITY) as run:
        run.write_json([1], "state")
        run.write_json([2], "rounds", "0", "x")
    sums = run.file("SHA256SUMS")
    line = sums.read_text().splitlines()[-1]
    assert line[64:] == "  rounds/0/x"
    sums.write_text(sums.read_text().removesuffix(f"{line}\n") + line[: 72 if end == 70 else end])
    with Run.open(tmp_path, IDENTITY) as run:
        assert run.read_json("rounds/0/x") == [2]
        run.finish({})
    assert [one.split()[1] for one in sums.read_text().splitlines()] == ["recipe.yaml", "state", "summary.json"]


def test_a_folder_deleted_while_its_first_file_is_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Path.write_text

    def deleted_first(path: Path, *args: Any, **keywords: Any) -> int:
        if path.name.endswith("recipe.yaml"):
            shutil.rmtree(path.parent)
        return written(path, *args, **keywords)

    monkeypatch.setattr(Path, "write_text", deleted_first)
    with pytest.raises(OnPTQError, match=r"onptq was deleted while the run went on: begin it again"):
        Run.open(tmp_path, IDENTITY)
