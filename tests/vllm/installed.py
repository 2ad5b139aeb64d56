"""The entry points of packages/onptq-vllm, whether it is installed or only on the path."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2] / "packages" / "onptq-vllm" / "pyproject.toml"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What an installer writes of pyproject.toml beside the package."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    folder = tmp_path_factory.mktemp("site") / f"{project['name'].replace('-', '_')}-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(folder.parent)
