"""`onptq list`: every name that recipes and commands accept, and which package brings it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onptq import registry
from onptq.cli import app
from onptq.cli.list import LISTS
from onptq.evaluate.tasks import Item
from onptq.recipe import Recipe
from onptq.registry import Registry
from onptq.zoo import suite

REGISTRIES: dict[str, Registry[Any]] = {
    "methods": registry.METHODS,
    "selection-rules": registry.SELECTION_RULES,
    "loss-terms": registry.LOSS_TERMS,
    "tasks": registry.TASKS,
    "families": registry.FAMILIES,
}
ENTRY = {
    "methods": "my-rounding",
    "selection-rules": "my-rule",
    "loss-terms": "my-term",
    "tasks": "my-task",
    "families": "my-family",
}


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["list", *arguments])


def embedded(name: str) -> list[str]:
    return list(suite.TASKS) if name == "tasks" else []


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An installed package that adds a name to every list; its module must not be imported for a list."""
    (tmp_path / "additions.py").write_text('raise ImportError("imported for a list")\n')
    folder = tmp_path / "additions-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: additions\nVersion: 1\n")
    groups = [f"[{REGISTRIES[name].group}]\n{ENTRY[name]} = additions:anything\n" for name in LISTS]
    (folder / "entry_points.txt").write_text("".join(groups))
    monkeypatch.syspath_prepend(tmp_path)
    forget_installed()
    yield "additions"
    forget_installed()


def forget_installed() -> None:
    """Entry points are read once per process."""
    for one in REGISTRIES.values():
        one.__dict__.pop("_installed", None)


def test_without_a_name_all_lists_are_shown_with_their_titles() -> None:
    done = call()
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.removesuffix(":") for line in lines if not line.startswith(" ")] == list(LISTS)
    for place, name in enumerate(LISTS):
        first = lines.index(f"{name}:") + 1
        last = lines.index(f"{LISTS[place + 1]}:") if place + 1 < len(LISTS) else len(lines)
        shown = [line.strip() for line in lines[first:last]]
        names = [*embedded(name), *REGISTRIES[name]]
        assert shown == names or (not names and shown[0].startswith("none; other packages may add some"))


@pytest.mark.parametrize("name", LISTS)
def test_one_list_is_one_name_per_line(name: str) -> None:
    done = call(name)
    assert done.exit_code == 0
    names = [*embedded(name), *REGISTRIES[name]]
    assert done.stdout.splitlines() == names or (not names and done.stdout.startswith("none; "))


def test_what_is_listed_is_what_recipes_accept() -> None:
    assert [Recipe(init=name).init for name in call("methods").stdout.split()] == list(registry.METHODS)
    rules = call("selection-rules").stdout.split()
    assert [Recipe.preset("default", [f"select.rule={name}"]).select.rule for name in rules] == rules


@pytest.mark.parametrize("arguments", [(), ("tasks",)])
def test_json_has_the_package_of_every_name(arguments: tuple[str, ...]) -> None:
    done = call(*arguments, "--json")
    assert done.exit_code == 0
    lists = json.loads(done.stdout)
    assert list(lists) == list(arguments or LISTS)
    for name, entries in lists.items():
        assert entries == dict.fromkeys([*embedded(name), *REGISTRIES[name]], "onptq")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("method", "did you mean methods?"), ("task", "did you mean tasks?"), ("xyz", "unknown list 'xyz';")],
)
def test_an_unknown_list_is_refused_with_those_there_are(name: str, hint: str) -> None:
    done = call(name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert hint in done.stderr
    assert f"expected one of {', '.join(LISTS)}" in done.stderr


@pytest.mark.parametrize("name", LISTS)
def test_a_name_of_an_installed_package_is_listed_with_that_package(name: str, package: str) -> None:
    assert f"{ENTRY[name]}  (from {package})" in call(name).stdout.splitlines()
    assert f"  {ENTRY[name]}  (from {package})" in call().stdout.splitlines()
    assert json.loads(call("--json").stdout)[name][ENTRY[name]] == package


def test_a_name_of_the_running_program_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.TASKS, "_registered", {})

    @registry.TASKS.register("arithmetic")
    def arithmetic(family: str, split: str, count: int) -> list[Item]:
        return []

    assert "arithmetic  (from this program)" in call("tasks").stdout.splitlines()
    assert json.loads(call("tasks", "--json").stdout)["tasks"]["arithmetic"] == "this program"


@pytest.mark.parametrize(
    ("register", "expected"),
    [
        (lambda: registry.METHODS.register("rtn"), "the base method 'rtn' exists already, from onptq"),
        (lambda: registry.METHODS.register("my-rounding"), "'my-rounding' exists already, from additions"),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_program_cannot_take_a_name_that_is_there(register: Callable[[], Any], expected: str) -> None:
    from onptq.errors import OnPTQError

    with pytest.raises(OnPTQError, match=expected):
        register()


def test_a_list_of_names_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom onptq.cli import app\n"
        "try:\n    app(['list', 'methods'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "rtn" in done.stdout
