"""Commands that other packages contribute to `onptq`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onptq.cli import ELSEWHERE, GROUP, app


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package outside this repository, as an installer leaves it."""
    (tmp_path / "greeting.py").write_text(
        'import typer\n\n\ndef greet(name: str) -> None:\n    """Greet NAME."""\n    typer.echo(f"hello {name}")\n'
    )
    folder = tmp_path / "greeting-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\ngreet = greeting:greet\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("package")
def test_a_command_of_another_package_is_listed_and_runs() -> None:
    overview = CliRunner().invoke(app, ["--help"]).output
    assert "greet" in overview
    assert "Greet NAME." in overview
    assert CliRunner().invoke(app, ["greet", "world"]).output == "hello world\n"


def test_help_imports_nothing_heavy(package: Path) -> None:
    program = (
        f"import sys\nsys.path.insert(0, {str(package)!r})\nsys.argv = ['onptq', '--help']\n"
        "from onptq.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "greet" in done.stdout


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_command_that_is_not_installed_names_its_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onptq.cli.entry_points", lambda group: entry_points(group="nobody.has.this"))
    done = CliRunner().invoke(app, [name])
    assert done.exit_code == 2
    assert f"pip install {ELSEWHERE[name]}" in done.output
    assert "No such command" in CliRunner().invoke(app, ["nonsense"]).output
