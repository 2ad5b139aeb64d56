"""What a stranger's model folder may not do: run code, open pickles, reach the network, or be found out only at the end."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_bad_input import arguments, assert_refused, call, edit
from typer.testing import CliRunner

from onptq.cli import _lacking, app
from onptq.run import SCRATCH, Run, run_home

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
REMOTE = "from pathlib import Path\nPath({canary!r}).write_text('ran')\nclass Evil:\n    pass\n"


@pytest.fixture
def model(small: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(small, tmp_path / "model")


class Planted:
    """A pickle that, once it is opened, leaves a file behind."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def plant(model: Path, canary: Path) -> None:
    """Pickles and code where loaders of other tools look for them."""
    for name in ("pytorch_model.bin", "training_args.bin", "spk_dict.pt", "consolidated.00.pth"):
        (model / name).write_bytes(pickle.dumps(Planted(canary)))
    torch.save(Planted(canary), model / "adapter_model.bin")
    index = {"weight_map": dict.fromkeys(load_file(model / WEIGHTS), "pytorch_model.bin")}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (model / "evil.py").write_text(REMOTE.format(canary=str(canary)))
    for name, key in (
        ("config.json", "AutoModelForImageTextToText"),
        ("tokenizer_config.json", "AutoTokenizer"),
        ("preprocessor_config.json", "AutoImageProcessor"),
        ("generation_config.json", "AutoConfig"),
    ):
        auto = {key: "evil.Evil", "AutoConfig": "evil.Evil", "AutoProcessor": "evil.Evil"}
        edit(model / name, lambda content, auto=auto: content.update(auto_map=auto, custom_generate="evil"))  # type: ignore[misc]


def refuse_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The addresses that anything wanted to reach."""
    reached: list[object] = []

    def refuse(*given: object, **more: object) -> Any:
        reached.append(given)
        raise OSError("no network here")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return reached


def test_the_canary_sings(model: Path, tmp_path: Path) -> None:
    plant(model, tmp_path / "canary")
    pickle.loads((model / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "canary").is_dir()


@pytest.mark.slow
def test_no_command_opens_pickles_runs_code_or_reaches_the_network(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary, out = tmp_path / "canary", tmp_path / "out"
    plant(model, canary)
    reached = refuse_network(monkeypatch)
    verified = [word for word in arguments(model, out) if word != "--no-verify"]
    for command in (
        verified,
        ["verify", str(out)],
        ["inspect", str(model)],
        ["inspect", str(out)],
        ["plan", str(model), "--scheme", "W4A8"],
        ["report", str(out)],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code in (0, 1), (command, done.output, done.exception)
        assert not canary.exists(), command
        assert reached == [], command
    assert not list(out.glob("*.bin"))


def test_pickled_weights_beside_other_safetensors_are_no_model(model: Path, tmp_path: Path) -> None:
    plant(model, tmp_path / "canary")
    (model / WEIGHTS).rename(model / "dummy.safetensors")
    assert_refused(call(model, tmp_path / "out"), "pickled weights are not read", "dummy.safetensors")
    assert not (tmp_path / "canary").exists()


# --- models that could not be exported --------------------------------------------------------------------------------


def elsewhere(model: Path) -> None:
    (model / WEIGHTS).rename(model.with_name("secret.safetensors"))
    names = load_file(model.with_name("secret.safetensors"))
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "../secret.safetensors")}))


def of_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        tensors = load_file(model / WEIGHTS)
        name = next(name for name in tensors if "layers.1" in name and name.endswith("down_proj.weight"))
        save_file(tensors | {name: tensors[name].to(dtype)}, model / WEIGHTS)

    return change


def with_an_eighth(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    name = next(name for name in tensors if "layers.1" in name and name.endswith("down_proj.weight"))
    save_file(tensors | {name.replace("down_proj", "extra_proj"): torch.ones(8, 8)}, model / WEIGHTS)


UNUSABLE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "shards elsewhere": (elsewhere, (INDEX, "must name files beside it", "../secret.safetensors")),
    "a linear of 64 bits": (of_dtype(torch.float64), ("down_proj", "F64")),
    "a linear of integers": (of_dtype(torch.int32), ("down_proj", "I32")),
    "a linear too many": (with_an_eighth, ("extra_proj", "none of its linears to quantize")),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_model_that_cannot_be_exported_is_refused_before_anything_is_computed(
    name: str, model: Path, tmp_path: Path
) -> None:
    spoil, expected = UNUSABLE[name]
    spoil(model)
    assert_refused(call(model, tmp_path / "out"), *expected)
    assert not run_home(tmp_path / "out").exists()


# --- headers that no reader opens -------------------------------------------------------------------------------------


def in_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        content = (model / WEIGHTS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(next(entry for name, entry in sorted(header.items()) if name != "__metadata__"))
        text = json.dumps(header).encode()
        (model / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return spoil


def shift(by: int) -> Callable[[dict[str, Any]], None]:
    return lambda entry: entry.update(data_offsets=[place + by for place in entry["data_offsets"]])


HEADERS = {
    "overlapping": (shift(64), "lies at bytes"),
    "negative offsets": (lambda entry: entry.update(data_offsets=[-64, entry["data_offsets"][1]]), "lies at bytes"),
    "backwards": (lambda entry: entry.update(data_offsets=entry["data_offsets"][::-1]), "lies at bytes"),
    "unknown dtype": (lambda entry: entry.update(dtype="F17"), "unknown dtype 'F17'"),
    "offsets that are text": (lambda entry: entry.update(data_offsets=["0", "1"]), "no safetensors header"),
    "negative shape": (lambda entry: entry.update(shape=[-1, 4]), "shape [-1, 4]"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_tensors_that_no_reader_opens_are_a_defect(name: str, model: Path, tmp_path: Path) -> None:
    change, expected = HEADERS[name]
    in_header(change)(model)
    inspected = CliRunner().invoke(app, ["inspect", str(model)])
    assert inspected.exit_code == 1
    assert expected in " ".join(inspected.output.split())
    assert_refused(call(model, tmp_path / "out"), expected)


# --- limits of a shell and private files ------------------------------------------------------------------------------


LIMITED = """
import json, resource, sys
from pathlib import Path
import torch, transformers, onptq.pipeline, onptq.page.write, compressed_tensors
from onptq.cli import main
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
for kind, value, line in (
    (resource.RLIMIT_AS, held + 2**30, sys.argv[1]),
    (resource.RLIMIT_NOFILE, 4, sys.argv[2]),
):
    usual = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, usual[1]))
    sys.argv = ["onptq", *json.loads(line)]
    try:
        main()
    except SystemExit as end:
        print(end.code)
    resource.setrlimit(kind, usual)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says what a process holds")
def test_limits_of_memory_and_of_open_files_are_named_and_a_run_goes_on_without_them(
    small: Path, model: Path, tmp_path: Path
) -> None:
    """All libraries are loaded before the limits hold. The weights that do not fit are a hole of 2 GiB in a file."""
    content = (model / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, size = json.loads(content[8:end]), len(content) - end
    header["padding"] = {"dtype": "U8", "shape": [2**31], "data_offsets": [size, size + 2**31]}
    text = json.dumps(header).encode()
    (model / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    os.truncate(model / WEIGHTS, 8 + len(text) + size + 2**31)
    lines = [json.dumps(arguments(model, tmp_path / "large")), json.dumps(arguments(small, tmp_path / "out"))]
    command = [sys.executable, "-c", LIMITED, *lines]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.stdout.split() == ["2", "2"], done.stderr[-3000:]
    assert "annot allocate memory" in done.stderr or "not enough memory" in done.stderr
    assert "oo many open files" in done.stderr
    assert "Traceback" not in done.stderr
    assert call(small, tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("std::bad_alloc"), "memory"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOMEM, "x"), "memory"),
        (OSError(errno.EMFILE, "x"), "open files"),
        (RuntimeError("I/O error: Too many open files (os error 24)"), "open files"),
        (RuntimeError("shapes cannot be multiplied"), None),
        (OSError(errno.ENOENT, "x"), None),
    ],
)
def test_what_was_lacking_is_read_from_every_librarys_words(error: Exception, expected: str | None) -> None:
    lacking = _lacking(error)
    assert lacking is None if expected is None else expected in str(lacking)


def test_what_waits_in_files_is_private(tmp_path: Path) -> None:
    with Run.open(tmp_path, {"recipe": {}}) as run:
        folder = run.scratch("prompts")
        assert folder.parent.name == SCRATCH
        assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert not folder.parent.exists()
