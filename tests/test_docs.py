"""What the documentation says exists: commands, options, links, code. How it is written: length, width, words."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from model_tables import REGISTERED, TABLES, rows_of
from random_classes import CLASSES, SPARSE

import onptq
from onptq.cli import ELSEWHERE, app
from onptq.registry import FAMILIES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
WORDS = ("hall", "bed", "beds", "mend", "mended", "Built", "Made", "stands still", "in its mouth")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def prose(page: Path) -> str:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`]*`", "", text)


def commands(page: Path) -> Iterator[list[str]]:
    """Every call of `onptq` in the page's shell blocks, split into words."""
    for block in code(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for call in re.findall(r"(?:^|&& )(?:[A-Z_0-9]+=\S* )*onptq(.*?)(?= &&|$)", line):
                yield shlex.split(call, comments=True)


CALLS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), CALLS, ids=[f"{named(page)}: {' '.join(words)}" for page, words in CALLS])
def test_every_command_of_the_documentation_exists_with_its_options(page: Path, words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name in ELSEWHERE and name not in command.list_commands(None):
            pytest.skip(f"{ELSEWHERE[name]} is not installed")
        command = command.get_command(None, name)
        assert command is not None, f"{named(page)}: onptq {' '.join(words)}"
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.split("=")[0] for word in rest if word.startswith("--")}
    assert used <= options | {"--help"}, f"{named(page)}: onptq {' '.join(words)}"


SCRIPT = re.compile(r"python(?: -m)? ((?:benchmarks|clients|examples|tools)[\w./-]*)")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_script_of_the_documentation_exists(page: Path) -> None:
    for name in SCRIPT.findall(page.read_text(encoding="utf-8")):
        module = ROOT / name.replace(".", "/")
        places = (ROOT / name, module.with_suffix(".py"), module / "__main__.py")
        assert any(place.is_file() for place in places), f"{named(page)}: {name}"


def test_the_architecture_page_names_every_module_and_the_order_of_imports() -> None:
    tree, order = (block for block in code(ROOT / "docs/architecture.md", "") if "pipeline" in block)
    source = {entry.name for entry in (ROOT / "src/onptq").iterdir() if not entry.name.startswith("__")}
    documented = set(re.findall(r"^  (\w+(?:\.py|/))", tree, re.MULTILINE))
    assert documented == {name if "." in name else f"{name}/" for name in source} - {"py.typed", "presets/"}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    names = [{name.strip() for name in layer.split(",")} for layer in order.split("<")]
    assert names == [{name.strip() for name in layer.split(":")} for layer in reversed(layers)]


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_of_models_are_those_that_tests_cover(page: str) -> None:
    """`python tests/model_tables.py` writes them."""
    rows = TABLES[page]()
    assert rows_of((ROOT / page).read_text(encoding="utf-8"), rows[0]) == rows
    assert set(REGISTERED) == set(FAMILIES)
    assert all(made.examples for made in (*CLASSES.values(), *SPARSE.values()))


def test_the_readme_fits_a_first_minute() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{named(page)}: {target}"
        if anchor:
            headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{named(page)}: {target}"


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_every_page_is_in_the_navigation() -> None:
    def files(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from files(value)
        elif isinstance(entry, list):
            for value in entry:
                yield from files(value)

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    tables = {f"tables/{table.name}" for table in (ROOT / "results").glob("*.md")}
    assert set(files(navigation)) == pages | tables


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_words_are_those_of_the_field(page: Path) -> None:
    text = prose(page)
    for word in WORDS:
        assert not re.search(rf"(?<![\w-]){word}(?![\w-])", text), f"{named(page)}: {word}"


def test_the_library_example_runs_and_a_second_theta_gives_its_own_tokens(small: Path) -> None:
    [example] = [block for block in code(ROOT / "docs/quickstart.md", "python") if "onptq.follow" in block]
    example = example.replace('"MODEL"', repr(str(small))).replace('"PROMPTS"', repr(str(small / "prompts.jsonl")))
    names: dict[str, Any] = {}
    exec(example.replace("max_tokens=64", "max_tokens=8"), names)
    policy, prompts, prefixes = names["policy"], names["prompts"], names["prefixes"]
    coarse = names["theta"].freed()
    for ratio in coarse.ratio.values():
        ratio -= 1.5  # a narrow range: nearly every weight saturates
    tokens = {}
    for name, theta in (("calibrated", names["theta"]), ("coarse", coarse)):
        policy.freeze(theta)
        tokens[name] = [one.tokens for one in onptq.follow(prefixes)]
        fresh = onptq.follow(onptq.Prefixes(policy, prompts, max_tokens=8))
        assert tokens[name] == [one.tokens for one in fresh]
    assert tokens["calibrated"] != tokens["coarse"]
