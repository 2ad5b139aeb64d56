"""The examples as a user runs them, on an embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Tiny

import onptq

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = "zoo:qwen2.5-vl"
SECONDS = 240  # far above the budget of 60 on an idle core, so that a busy machine does not fail

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def manifest(tiny: Callable[[str], Tiny]) -> Path:
    return tiny("qwen2.5-vl").manifest


@pytest.fixture(scope="module")
def quantized(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The checkpoint that the first example writes, and what it prints."""
    out = tmp_path_factory.mktemp("examples") / "quantized"
    command = [sys.executable, str(EXAMPLES / "quantize_hub_model.py"), str(manifest), "--model", MODEL]
    done = subprocess.run(
        [*command, "--preset", "light", "--out", str(out)], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_a_model_is_quantized_and_its_decisions_are_shown(quantized: tuple[Path, str]) -> None:
    out, printed = quantized
    assert (out / "config.json").exists()
    assert "initial: " in printed
    assert "final: " in printed
    assert str(out) in printed


def test_two_checkpoints_are_compared(quantized: tuple[Path, str], manifest: Path, tmp_path: Path) -> None:
    rtn = onptq.quantize(MODEL, tmp_path / "rtn", recipe=onptq.Recipe(method="rtn", scheme="W4A8"), verify=False)
    command = [EXAMPLES / "compare_two_checkpoints.sh", MODEL, rtn.path, quantized[0], manifest, tmp_path / "out"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "first" in done.stdout
    assert "second" in done.stdout


def test_the_notebook_shows_the_forks_of_a_run(quantized: tuple[Path, str]) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "decisions.ipynb", as_version=4)
    os.environ["CHECKPOINT"] = str(quantized[0])
    try:
        nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3").execute()
    finally:
        del os.environ["CHECKPOINT"]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("D says:" in output.get("text", "") for output in outputs)
