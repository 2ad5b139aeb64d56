"""`benchmarks/low_bit_products.py --tiny`, and that wrong GEMMs show."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import low_bit_products as products

from onptq.quantizer.numerics import quantize_tokens

CPU = torch.device("cpu")


def test_every_gemm_is_timed_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert products.main(["--tiny", "--rows", "1", "20", "--out", str(out)]) == 0
    by_linear = json.loads(out.read_text())["products"]
    assert [len(rows) for rows in by_linear.values()] == [2] * 4
    for row in (row for rows in by_linear.values() for row in rows):
        assert row["not_finite"] == 0
        assert 0 < row["largest_difference"] < torch.finfo(torch.float16).eps
        assert all(seconds > 0 for seconds in row["seconds"].values())
    assert "gate_up_proj" in capsys.readouterr().out


@pytest.mark.parametrize("row", [0, -1])
def test_wrong_values_show_among_the_first_and_the_last_rows(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CHECKED", 4)
    torch.manual_seed(0)
    linear = products.random_linear(16, 32, torch.float16, CPU)
    x = torch.randn(12, 32).half()
    codes, scale = quantize_tokens(x, 8)
    right = linear(x)
    assert products.errors(right, codes, scale.view(-1, 1), linear)["not_finite"] == 0
    wrong = right.clone()
    wrong[row, 3] = float("nan")
    assert products.errors(wrong, codes, scale.view(-1, 1), linear)["not_finite"] == 1
    wrong[row, 3] = right.abs().max() * 4
    assert products.errors(wrong, codes, scale.view(-1, 1), linear)["largest_difference"] > 2


def test_a_gemm_without_a_finite_value_is_counted() -> None:
    linear = products.random_linear(16, 32, torch.float16, CPU)
    codes, scale = quantize_tokens(torch.randn(12, 32).half(), 8)
    wrong = products.errors(torch.full((12, 16), float("nan")), codes, scale.view(-1, 1), linear)
    assert wrong == {"not_finite": 12 * 16, "largest_difference": 0.0}
