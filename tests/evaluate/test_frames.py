"""Results of a comparison as a pandas table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onptq import OnPTQError, load_results

REPORT = {
    "models": {
        "dense": {"figures": {"average": {"value": 90.0, "low": 85.0, "high": 95.0}}},
        "rtn:W4A8": {
            "figures": {
                "average": {"value": 80.0, "low": 70.0, "high": 90.0},
                "kl": {"value": 0.5, "low": None, "high": None},
            }
        },
    }
}


@pytest.mark.parametrize("place", ["report.json", "comparison/report.json"])
def test_a_row_has_every_figure_of_a_model_with_its_interval(place: str, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(REPORT))
    table = load_results(tmp_path)
    assert table.equals(load_results(str(file)))
    assert list(table.index) == ["dense", "rtn:W4A8"]
    assert table.average.tolist() == [90, 80]
    assert table.loc["rtn:W4A8", ["average_low", "average_high"]].tolist() == [70, 90]
    assert table.kl.isna().tolist() == [True, False]
    assert table.kl_low.isna().all()


def test_another_folder_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match=r"there is no report\.json"):
        load_results(tmp_path)
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(OnPTQError, match="no report of `onptq compare`"):
        load_results(tmp_path)
