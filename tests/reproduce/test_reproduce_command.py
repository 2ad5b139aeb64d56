"""`onptq reproduce`: results by name on a random model, killed and continued."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_by_hand import TINY
from typer.testing import CliRunner

from onptq.bank import States
from onptq.cli import app
from onptq.reproduce import settings
from onptq.reproduce.catalog import NAMES, RESULTS

STATES = ("risk-properties", "signals", "theory", "selection-value")


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def tiny_scale() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "SCALES", {**settings.SCALES, "tiny": TINY})
        yield


@pytest.fixture(scope="module")
def ran(tiny_scale: None, small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The results that share a bank of states, in one folder."""
    out = tmp_path_factory.mktemp("reproduce")
    return out, call("run", *STATES, "--model", small, "--scale", "tiny", "--out", out)


def test_every_result_is_listed_with_what_it_is() -> None:
    listed = call("list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(NAMES)
    assert all(says in line for says, line in zip(RESULTS.values(), listed, strict=True))


@pytest.mark.slow
def test_results_are_run_by_name_and_written_as_pages(ran: tuple[Path, Any]) -> None:
    out, done = ran
    assert done.exit_code == 0, done.stderr
    for name in STATES:
        page = json.loads((out / f"{name}.json").read_text())
        assert page["settings"]["scale"] == "tiny"
        assert page["claims"]
        assert all(claim["verdict"] in done.stdout for claim in page["claims"])
        assert (out / f"{name}.md").read_text().startswith(f"# {page['title']}\n")
        assert f"[{name}]({name}.md)" in (out / "summary.md").read_text()
    assert f"Summary: {out / 'summary.md'}" in done.stdout


@pytest.mark.slow
def test_theorem_1_and_the_pair_identity_hold_on_states_of_a_real_graph(ran: tuple[Path, Any]) -> None:
    claims = json.loads((ran[0] / "theory.json").read_text())["claims"]
    assert [claim["verdict"] for claim in claims[:2]] == ["holds", "holds"]


@pytest.mark.slow
def test_states_that_agree_have_a_risk_in_the_bank_but_are_never_chosen(ran: tuple[Path, Any]) -> None:
    """Eq. 9 is of every state; the rules choose between one mismatch and one near miss of each prompt."""
    [bank] = ran[0].rglob("states-W4A8/onptq/banks/*/compared.parquet")
    states = States.read(bank)
    assert set(states.prompt.tolist()) == {0, 1, 2}
    rounds = list(ran[0].rglob("candidates/pool-*/run/rounds/0/bank.parquet"))
    assert len(rounds) == 5
    for file in rounds:
        chosen = States.read(file)
        assert chosen.candidates[chosen.critical].all()
        assert all(chosen.critical[rows].sum() == 1 for rows in chosen.rows_by_prompt().values())
        assert chosen.weight[chosen.critical] == pytest.approx(1 / chosen.critical.sum())


@pytest.mark.slow
def test_a_result_that_was_cut_short_goes_on_where_it_stopped(ran: tuple[Path, Any], small: Path) -> None:
    out = ran[0]
    pages = {name: (out / f"{name}.json").read_text() for name in STATES}
    [far] = out.rglob("far.parquet")
    for lost in (far, out / "signals.json", *out.rglob("margins")):
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    again = call("run", *STATES, "--model", small, "--scale", "tiny", "--out", out)
    assert again.exit_code == 0, again.stderr
    assert "H = 16" in again.stderr
    assert "H = 4" not in again.stderr
    assert "Build" not in again.stderr
    assert {name: (out / f"{name}.json").read_text() for name in STATES} == pages


def test_what_cannot_be_run_is_told_and_does_not_stop_the_others(tiny_scale: None, small: Path, tmp_path: Path) -> None:
    done = call(
        "run", "omni-table", "efficiency", "--model", small, "--omni", small, "--scale", "tiny", "--out", tmp_path
    )
    assert done.exit_code == 2
    assert "omni-table was not run" in done.stderr
    assert "hears nothing; expected --omni with a model that does" in done.stderr
    assert "not run: omni-table; the others are finished" in done.stderr
    assert "not measured" in (tmp_path / "efficiency.md").read_text()


@pytest.mark.slow
def test_tables_and_flips_are_of_one_comparison(tiny_scale: None, small: Path, tmp_path: Path) -> None:
    """And other fields than those of the folder's runs are refused."""
    options = ("--model", small, "--scale", "tiny", "--out", tmp_path, "--scheme", "W4A8", "--quiet")
    done = call("run", "main-table", "flip-rate", *options)
    assert done.exit_code == 0, done.stderr
    page = json.loads((tmp_path / "main-table.json").read_text())
    ours, papers = page["tables"]
    assert [row[0] for row in ours["rows"]] == ["Dense", "RTN", "AWQ", "SmoothQuant", "MBQ", "QIG", "MASQuant", "OnPTQ"]
    assert len(papers["rows"]) == 25
    [report] = tmp_path.rglob("compared/main-table-W4A8.json")
    models = json.loads(report.read_text())["models"]
    flips = json.loads((tmp_path / "flip-rate.json").read_text())["tables"][0]["rows"]
    for row, (name, model) in zip(flips, list(models.items())[1:], strict=True):
        assert row[1].lower() == name.split(":")[0].lower()
        assert float(row[2].split()[0]) == pytest.approx(model["figures"]["flips"]["value"], abs=0.05)
        assert sum(float(cell.split()[0]) for cell in row[3:5]) == pytest.approx(float(row[2].split()[0]), abs=0.11)
    refused = call("run", "main-table", *options, "--set", "calibrate.gamma=9")
    assert refused.exit_code == 2
    assert "gamma" in refused.stderr
