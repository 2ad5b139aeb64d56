"""The examples as a user runs them, on an embedded model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from tokenizers import Tokenizer

import onptq
from onptq.bank import MISMATCH, load_bank
from onptq.run import run_home

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = "zoo:qwen2.5-vl"
SECONDS = 480  # far above the 60 that an idle core takes, so that a busy machine does not fail
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # threads of models this small wait for each other where cores are busy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def manifest(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with an image, so that whatever fork the notebook shows has one to draw."""
    model = tiny("qwen2.5-vl")
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [line for line in model.manifest.read_text().splitlines() if json.loads(line).get("images")]
    path.write_text("\n".join(lines))
    for image in {image for line in lines for image in json.loads(line)["images"]}:
        (path.parent / image).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model.folder / image, path.parent / image)
    return path


@pytest.fixture(scope="module")
def quantized(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The checkpoint that the first example writes, and what it prints."""
    out = tmp_path_factory.mktemp("examples") / "quantized"
    command = [sys.executable, str(EXAMPLES / "quantize_hub_model.py"), str(manifest), "--model", MODEL]
    done = subprocess.run(
        [*command, "--preset", "light", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_a_model_is_quantized_and_the_decisions_that_changed_are_printed(quantized: tuple[Path, str]) -> None:
    out, printed = quantized
    assert (out / "config.json").exists()
    summary = json.loads((run_home(out) / "summary.json").read_text())
    *figures, last = printed.splitlines()
    names = {"plain rounding": "rtn", "the init": "initial", "calibrated": "calibrated"}
    if summary["helped"] is False:
        assert figures.pop() == "The checkpoint has the weights of the init: calibration did not help."
    assert [line.partition(":")[0] for line in figures] == list(names)
    for line, name in zip(figures, names.values(), strict=True):
        changed, kl = (summary["holdout"][name][key] for key in ("mismatch_percent", "kl"))
        assert f": {changed:.1f}% of the decisions changed, KL to the dense model {kl:.4f}" in line
    assert last == f"checkpoint: {out}"


def test_two_checkpoints_are_compared(quantized: tuple[Path, str], manifest: Path, tmp_path: Path) -> None:
    rtn = onptq.quantize(MODEL, tmp_path / "rtn", recipe=onptq.Recipe(method="rtn", scheme="W4A8"), verify=False)
    done = compare_two_checkpoints(MODEL, rtn.path, quantized[0], manifest, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["models"]) == ["dense", "first", "second"]
    assert "- second against first: " in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        f"Report: {tmp_path / 'out' / 'report.md'}",
        f"Page: {tmp_path / 'out' / 'page.html'}",
    ]


def test_too_few_arguments_are_answered_with_the_usage() -> None:
    done = compare_two_checkpoints(MODEL, "one")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")


def compare_two_checkpoints(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The script with this environment's `onptq`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(EXAMPLES / "compare_two_checkpoints.sh"), *map(str, arguments)]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)


def test_the_notebook_shows_the_forks_of_a_run(quantized: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "decisions.ipynb", as_version=4)
    committed = [list(kinds(cell)) for cell in notebook.cells]
    monkeypatch.setenv("CHECKPOINT", str(quantized[0]))
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    [fork] = [output["text"] for output in outputs if "D chooses:" in output.get("text", "")]
    states = load_bank(run_home(quantized[0]))
    row = states.take(np.flatnonzero(states.kind == MISMATCH))
    tokenizer = Tokenizer.from_file(str(quantized[0] / "tokenizer.json"))
    pairs = {
        (tokenizer.decode([a], skip_special_tokens=False), tokenizer.decode([b], skip_special_tokens=False))
        for a, b in zip(row.reference.tolist(), row.quantized.tolist(), strict=True)
    }
    assert any(f"D chooses: {dense}\nQ chooses: {quant}\n" in fork for dense, quant in pairs)
    assert [list(kinds(cell)) for cell in notebook.cells] == committed


def kinds(cell: Any) -> Iterator[str]:
    """What a cell puts out, but warnings."""
    for output in cell.get("outputs", []):
        if output.get("name") != "stderr":
            yield output.get("name") or "+".join(sorted(set(output["data"]) - {"image/jpeg"}))


def test_the_notebook_holds_no_paths_and_no_times() -> None:
    text = (EXAMPLES / "decisions.ipynb").read_text()
    assert '"image/png"' in text
    for private in ("/tmp", "/home/", "iopub", "stderr"):
        assert private not in text
