"""docs/reproduction.md: its table is the summary of results/reproduce, and its Python runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_by_hand import TINY
from test_docs import code

from onptq import LOSS_TERMS
from onptq.reproduce.catalog import NAMES
from onptq.reproduce.page import read_results
from tools.docs.reproduction import PAGE, RESULTS, with_table


def test_the_table_is_the_summary_of_the_committed_results() -> None:
    results = read_results(RESULTS)
    assert [one["name"] for one in results] == list(NAMES)
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "python -m tools.docs.reproduction writes the table"
    for one in results:
        assert f"\n{one['command']}\n" in (RESULTS / f"{one['name']}.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_loss_term_is_changed_and_one_ablation_run_again_in_under_ten_lines(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LOSS_TERMS, "_registered", {})
    [example] = code(PAGE, "python")
    assert len([line for line in example.splitlines() if line.strip()]) < 10
    names: dict[str, Any] = {"TINY": TINY, "MODEL": str(small)}
    exec(example.replace('out="mine"', 'out="mine", model=MODEL, scale=TINY'), names)
    compared = names["compared"]
    assert list(compared.report.models) == ["dense", "onptq:W4A6", "without Huber:W4A6"]
    assert compared.gain("without Huber:W4A6", "onptq:W4A6").value is not None
    assert compared.theta("onptq:W4A6").read_bytes() != compared.theta("without Huber:W4A6").read_bytes()
