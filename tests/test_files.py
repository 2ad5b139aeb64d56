"""YAML within limits: what a stranger's recipe or a damaged run record may not do."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml

from onptq.errors import OnPTQError
from onptq.overrides import parse_override
from onptq.plain_yaml import YAML_LIMIT, parse_yaml, read_yaml, to_yaml
from onptq.recipe import Recipe
from onptq.run import RECORD, Run, run_home

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
BROKEN = {
    BOMB: "line 2 has a YAML alias",
    "a: &a [*a]": "line 1 has a YAML alias",
    "a" * (YAML_LIMIT + 1): "longer than",
    "[" * 5000: "nested too deeply",
    "a: [": "not valid YAML",
    "a: 2001-99-99": "not valid YAML",
    "a: !!int ''": "not valid YAML",
    "a: !!timestamp x": "not valid YAML",
    "a: " + "1" * 5000: "not valid YAML",
    "!!python/object/apply:os.system ['true']": "not valid YAML",
}


@pytest.mark.parametrize(("text", "message"), BROKEN.items(), ids=list(BROKEN.values()))
def test_yaml_that_cannot_be_read_is_refused_at_once(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(OnPTQError, match=message):
        parse_yaml(text)
    with pytest.raises(OnPTQError, match=rf"cannot read the recipe .*recipe\.yaml: .*{message}"):
        Recipe.from_yaml(path)
    assert time.process_time() - started < 20


def test_an_alias_bomb_as_the_record_of_a_run_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    home = run_home(out)
    with Run.open(out, {"recipe": {}}, home=home):
        pass
    (home / RECORD).write_text(BOMB)
    with pytest.raises(OnPTQError, match=r"alias .*says what the run is: restore it, or choose another --out"):
        Run.open(out, {"recipe": {}}, home=home)
    with pytest.raises(OnPTQError, match="alias"):
        parse_override("calibrate.terms={a: &a 1, b: *a}")


def test_a_pipe_is_no_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(OnPTQError, match="not a regular file"):
        read_yaml(tmp_path / "recipe.yaml")


def test_what_is_written_has_no_aliases() -> None:
    shared = ["x"]
    content = {"b": shared, "a": {"again": shared}}
    assert "&" not in to_yaml(content)
    assert parse_yaml(to_yaml(content)) == content == yaml.safe_load(to_yaml(content))
