"""Models by name: embedded ones, and those of a package that registers a catalog."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onptq.checkpoint.catalogs import did_you_mean, is_cataloged

MODULE = """
from pathlib import Path

def names():
    return ("mine:tiny",)

def locate(name):
    return Path({folder!r})
"""


@pytest.mark.parametrize(
    ("model", "cataloged"), [("zoo:qwen2.5-vl", True), ("real:smollm2", True), ("zoo", False), ("other:x", False)]
)
def test_a_prefix_with_a_catalog_makes_a_name(model: str, cataloged: bool) -> None:
    assert is_cataloged(model) is cataloged


def test_hints_come_from_every_catalog() -> None:
    assert did_you_mean("zoo:qwen3vl") == " (did you mean zoo:qwen3-vl?)"
    assert did_you_mean("nothing like it") == ""


@pytest.mark.slow
def test_a_package_registers_a_catalog_by_an_entry_point(small: Path, tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(MODULE.format(folder=str(small)))
    metadata = tmp_path / "my_models-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-models\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[onptq.sources]\nmine = my_models\n")
    code = (
        "from onptq.checkpoint.source import find_source\n"
        "from onptq.errors import OnPTQError\n"
        "source = find_source('mine:tiny'); print(source.name, source.folder)\n"
        "try: find_source('mine-tiny')\n"
        "except OnPTQError as error: print(error)\n"
    )
    path = os.pathsep.join((str(tmp_path), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == f"mine:tiny {small}"
    assert "did you mean mine:tiny?" in second
