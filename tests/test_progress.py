"""What a terminal and a log file show while a run works."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import onptq
from onptq import progress
from onptq.progress import RichReporter
from onptq.recipe import Recipe
from onptq.run import run_home


def test_a_phase_that_had_nothing_to_do_is_shown_as_done_and_one_that_failed_is_not(capsys: Any) -> None:
    with RichReporter().phase("Build", total=6, unit="blocks"):
        pass
    with pytest.raises(ZeroDivisionError), RichReporter().phase("Load", total=1, unit="checkpoint"):
        raise ZeroDivisionError
    done, failed = capsys.readouterr().err.splitlines()
    assert "6/6 blocks" in done
    assert "eta 0:00:00" in done
    assert "0/1 checkpoint" in failed


def test_a_file_shows_that_a_long_phase_has_begun_and_of_a_short_one_only_its_end(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "BEGUN_SECONDS", 0.05)
    with RichReporter().phase("Initialize", total=6, unit="blocks") as bar:
        deadline, shown = time.monotonic() + 30, ""
        while not shown and time.monotonic() < deadline:
            time.sleep(0.01)
            shown = capsys.readouterr().err
        bar.advance(6)
    assert shown == "Initialize has begun\n"
    assert "6/6 blocks" in capsys.readouterr().err
    monkeypatch.setattr(progress, "BEGUN_SECONDS", 60)
    with RichReporter().phase("Load", total=1, unit="checkpoint") as bar:
        bar.advance()
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(("method", "gamma", "branches"), [("static", 0.0, False), ("onptq", 1.0, True)])
def test_branch_is_a_phase_only_where_something_is_branched(
    small: Path, tmp_path: Path, method: str, gamma: float, branches: bool
) -> None:
    changes = {
        "method": method,
        "calibrate.gamma": gamma,
        "scheme": "W3A8",
        "rounds": 1,
        "init": "rtn",
        "calibrate.epochs": 1,
    }
    recipe = Recipe.preset("light", changes | {"data.prompts": 3, "data.holdout": 1, "follow.max_tokens": 6})
    onptq.quantize(small, tmp_path / "out", calibration=small / "prompts.jsonl", recipe=recipe, verify=False)
    events = map(json.loads, (run_home(tmp_path / "out") / "log.jsonl").read_text().splitlines())
    phases = {event["phase"] for event in events if event["event"] == "phase"}
    assert "Compare 1" in phases
    assert ("Branch 1" in phases) == branches
