"""Verdicts, tables, the paper's rows, and the pages that show them."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from made_by_hand import TINY, describe

from onptq.errors import OnPTQError
from onptq.evaluate.metrics import Label
from onptq.evaluate.statistics import Interval
from onptq.evaluate.summary import ModelReport, Pair, Report
from onptq.reproduce import ablations, catalog, efficiency, hyperparameters, selection_value, tables
from onptq.reproduce.catalog import NAMES, WORK, Clock, check_names
from onptq.reproduce.common import differing_setup
from onptq.reproduce.compared import Compared
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.page import SUMMARY, read_results, write_page, write_summary
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.record import Claim, Mark, Picture, Result, Table, above, all_of, below, guarded, shown, within
from onptq.reproduce.settings import SCALES, Settings, find_scale

SETTINGS = describe()
BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "results"


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_claim_holds_where_its_whole_interval_speaks_for_it() -> None:
    assert [above(Interval(2.0, low, high)) for low, high in ((1, 3), (-1, 3), (-3, -1))] == [
        "holds",
        "open",
        "does not hold",
    ]
    assert [below(Interval(0.4, 0.2, high), 0.5) for high in (0.45, 0.6)] == ["holds", "open"]
    assert below(Interval(0.9, 0.6, 1.2), 0.5) == "does not hold"
    assert [within(Interval(0.0, low, high), 2) for low, high in ((-1, 1), (-3, 1), (-1, 3), (3, 4))] == [
        "holds",
        "open",
        "open",
        "does not hold",
    ]


def test_a_claim_is_open_where_too_little_was_seen() -> None:
    assert below(Interval(0.0, 0.0, 0.0), 0.5) == "open"
    assert above(Interval(3.0)) == "open"
    assert above(Interval(None)) == "not measured"
    assert guarded(Interval(1.0, 0.5, 2.0), differing=5) == Interval(1.0)
    assert guarded(Interval(1.0, 0.5, 2.0), differing=6) == Interval(1.0, 0.5, 2.0)


def test_a_claim_of_several_parts_fails_with_any_and_holds_with_all() -> None:
    assert all_of(["holds", "open", "does not hold"]) == "does not hold"
    assert all_of(["holds", "not measured", "open"]) == "open"
    assert all_of(["holds", "holds"]) == "holds"
    assert all_of([]) == "not measured"


def test_numbers_are_shown_with_their_intervals_and_without_a_negative_zero() -> None:
    assert shown(Interval(-0.001, -0.3, 0.25), 1, signed=True) == "+0.0 [-0.3, +0.2]"
    assert shown(Interval(12.34), 1, unit="%") == "12.3%"
    assert shown(Interval(None)) == "-"


# --- the paper's rows -------------------------------------------------------------------------------------------------


def test_the_averages_of_table_1_are_those_of_its_rows() -> None:
    """To 0.1, as the paper averaged before it rounded."""
    there = paper("main-table")
    assert len(there["rows"]) == 1 + 4 * 6
    for row in there["rows"]:
        for model in there["models"]:
            *scores, average = row[model]
            assert len(scores) == 5
            assert average == pytest.approx(sum(scores) / 5, abs=0.1)


def test_the_paper_leads_in_six_of_its_eight_averages() -> None:
    there = paper("main-table")
    leads = 0
    for scheme in ("W4A16", "W8A8", "W4A8", "W4A6"):
        for model in there["models"]:
            averages = {row["method"]: row[model][-1] for row in there["rows"] if row["scheme"] == scheme}
            leads += max(averages, key=lambda method: averages[method]) == "OnPTQ"
    assert leads == 6


def test_table_2_has_the_lowest_word_error_rates_and_the_best_mmmu_in_w4a6() -> None:
    there = paper("omni-table")
    assert len(there["rows"]) == 1 + 2 * 6
    for model in there["models"]:
        for scheme in ("W4A8", "W4A6"):
            rows = {row["method"]: row[model] for row in there["rows"] if row["scheme"] == scheme}
            for place in (0, 1):
                assert min(rows, key=lambda method: rows[method][place]) == "OnPTQ"
            assert scheme == "W4A8" or max(rows, key=lambda method: rows[method][2]) == "OnPTQ"


def test_tables_4_and_8_agree_with_table_1_and_with_the_text() -> None:
    main = next(
        row["Qwen3-VL-8B-Instruct"]
        for row in paper("main-table")["rows"]
        if (row["method"], row["scheme"]) == ("OnPTQ", "W4A6")
    )
    expected = [main[0], main[3]]  # MMMU and ScienceQA
    table, swept = paper("ablations"), paper("hyperparameters")
    assert table["full"]["paper"] == swept["main"] == expected
    assert len(table["rows"]) == 13
    of = {row["name"]: row["paper"] for row in table["rows"]}
    costs = {name: [round(expected[i] - of[name][i], 1) for i in (0, 1)] for name in of}
    assert costs["without consequence"] == [3.1, 2.4]
    assert costs["without distribution term"] == [1.3, 1.1]
    farthest = [
        max(expected[i] - scores[i] for group in swept["groups"] for scores in group["settings"].values())
        for i in (0, 1)
    ]
    assert farthest == pytest.approx(swept["within"])


def test_tables_3_5_9_and_figure_3_agree_with_the_text() -> None:
    risk, selected = paper("risk-properties"), paper("selection-value")
    assert selected["states"]["all"] == risk["states"]
    assert risk["mismatch"] == pytest.approx(100 * selected["states"]["mismatch"] / risk["states"], abs=0.05)
    assert risk["joint"] == pytest.approx(100 * selected["states"]["joint-critical"] / risk["states"], abs=0.05)
    assert risk["high_of_mismatch"] == pytest.approx(
        100 * selected["states"]["joint-critical"] / selected["states"]["mismatch"], abs=0.05
    )
    ratios = [row["fp16"]["ms"] / row["w4a8"]["ms"] for row in paper("efficiency")["rows"]]
    assert ratios == pytest.approx([1.79, 1.41], abs=0.005)
    less = [100 * (1 - row["w4a8"]["gb"] / row["fp16"]["gb"]) for row in paper("efficiency")["rows"]]
    assert less == pytest.approx([37.4, 28.7], abs=0.05)


def test_every_ablation_and_setting_is_a_recipe_that_differs_from_the_full_one() -> None:
    settings = Settings(out=Path("x"), scale=SCALES["full"])
    full = settings.recipe("W4A6")
    changed = [row["changes"] for row in paper("ablations")["rows"]]
    changed += [{group["field"]: value} for group in paper("hyperparameters")["groups"] for value in group["settings"]]
    recipes = [settings.recipe("W4A6", fields) for fields in changed]
    assert len({recipe.model_dump_json() for recipe in [full, *recipes]}) == 1 + 13 + 10
    for group in paper("hyperparameters")["groups"]:
        section, field = group["field"].split(".")
        assert getattr(getattr(full, section), field) == group["main"]
    assert (full.rounds, full.refresh, full.follow.max_tokens, full.data.prompts) == (2, True, 64, 128)


# --- tables of methods ------------------------------------------------------------------------------------------------


def compared(values: dict[str, dict[str, float]], ahead: dict[tuple[str, str], Interval]) -> Compared:
    """A comparison with these figures, by candidate and measure, and these paired differences in the average score."""
    labels = {"read": Label("read", False, True), "average": Label("average score", False, True)}
    labels |= {"speech": Label("speech WER", True, True)}
    labels |= {"mismatch": Label("mismatch", percent=True), "kl": Label("KL", digits=4)}
    models = {
        name: ModelReport({}, {measure: Interval(value) for measure, value in of.items()})
        for name, of in values.items()
    }
    pairs = [Pair(*names, {"average": change}, {"average": 9}, {}, {}) for names, change in ahead.items()]
    return Compared(Report("", "", 0, 0, 0, 0.95, 0, True, labels, models, pairs), Path("nowhere"))


FIGURES = {
    "dense": {"read": 99.0, "average": 98.0},
    "rtn:W4A8": {"read": 60.0, "average": 61.0, "mismatch": 9.0, "kl": 0.5},
    "awq:W4A8": {"read": 80.0, "average": 71.0, "mismatch": 5.0, "kl": 0.25},
    "smoothquant:W4A8": {"read": 70.0, "average": 70.0, "mismatch": 6.0, "kl": 0.25},
    "mbq:W4A8": {"read": 70.0, "average": 70.0, "mismatch": 6.0, "kl": 0.3},
    "qig:W4A8": {"read": 70.0, "average": 70.0, "mismatch": 6.0, "kl": 0.3},
    "masquant:W4A8": {"read": 70.0, "average": 70.0, "mismatch": 6.0, "kl": 0.3},
    "onptq:W4A8": {"read": 75.0, "average": 74.0, "mismatch": 4.0},
}
AHEAD = {("awq:W4A8", "onptq:W4A8"): Interval(3.0, 1.0, 5.0)}


def test_the_best_of_a_scheme_is_bold_whichever_way_is_better_and_equals_share_it() -> None:
    found = tables.table(compared(FIGURES, AHEAD), ["W4A8"], ["read", "average"])
    assert found.rows[0] == ["Dense", "FP16", "99.0", "98.0", "", ""]
    bold = {(found.rows[row][0], found.heads[column]) for row, column in found.best}
    assert bold == {
        ("AWQ", "read"), ("OnPTQ", "average score"), ("OnPTQ", "changed decisions %"), ("AWQ", "KL"), ("SmoothQuant", "KL"),
    }  # fmt: skip


def test_a_lead_is_over_the_best_other_method() -> None:
    made = compared(FIGURES, AHEAD)
    assert tables.lead(made, "W4A8", "average") == ("AWQ", Interval(3.0, 1.0, 5.0))
    claim = tables.lead_claim(made, "W4A8", "average", "OnPTQ leads", "69.9 against 69.0")
    assert (claim.verdict, claim.here) == ("holds", "average score 74.0; better than AWQ by +3.00 [+1.00, +5.00]")
    behind = compared(FIGURES, {("onptq:W4A8", "awq:W4A8"): Interval(3.0, 1.0, 5.0)})
    assert tables.lead(behind, "W4A8", "average")[1] == Interval(-3.0, -5.0, -1.0)


def test_the_papers_table_has_its_own_best_in_bold() -> None:
    found = tables.paper_table(paper("omni-table"))
    bold = {(*found.rows[row][:2], found.heads[column]) for row, column in found.best}
    assert ("OnPTQ", "W4A6", "Qwen2.5-Omni-7B: LibriSpeech WER") in bold
    assert ("MBQ", "W4A6", "Qwen2.5-Omni-3B: OmniBench") in bold
    assert not {row for row in bold if row[0] == "Dense"}
    assert len(found.best) == 2 * 8


def test_the_page_of_ablations_has_what_each_change_costs() -> None:
    there = {**paper("ablations"), "rows": paper("ablations")["rows"][:2]}
    figures = {f"{name}:W4A6": {"average": value} for name, value in (("onptq", 80.0), ("mismatch only", 75.0))}
    figures["all on-policy states:W4A6"] = {"average": 82.0}
    ahead = {
        ("onptq:W4A6", "all on-policy states:W4A6"): Interval(2.0, 1.0, 3.0),
        ("onptq:W4A6", "mismatch only:W4A6"): Interval(-5.0, -8.0, -2.0),
    }
    page = ablations.result(compared(figures, ahead), "W4A6", there, SETTINGS)
    assert [claim.verdict for claim in page.claims] == ["does not hold", "holds"]
    assert [claim.paper for claim in page.claims] == [
        "by 3.4 on MMMU, 2.9 on ScienceQA",
        "by 1.7 on MMMU, 1.4 on ScienceQA",
    ]
    assert [row[5] for row in page.tables[0].rows] == ["-2.00 [-3.00, -1.00]", "+5.00 [+2.00, +8.00]", ""]


def test_a_hyperparameter_is_best_where_it_beats_every_other_setting() -> None:
    there = {**paper("hyperparameters"), "groups": paper("hyperparameters")["groups"][:1]}
    figures = {f"{name}:W4A6": {"average": 80.0} for name in ("onptq", "H 2", "H 8")}
    ahead = {("H 2:W4A6", "onptq:W4A6"): Interval(1.0, 0.5, 1.2), ("H 8:W4A6", "onptq:W4A6"): Interval(0.9, 0.2, 1.3)}
    page = hyperparameters.result(compared(figures, ahead), "W4A6", there, SETTINGS)
    assert [claim.verdict for claim in page.claims] == ["holds", "holds"]
    assert [row[0] for row in page.tables[0].rows] == ["H = 2", "H = 4", "H = 8"]
    assert [row[4] for row in page.tables[0].rows] == ["+1.00 [+0.50, +1.20]", "main setting", "+0.90 [+0.20, +1.30]"]


def test_what_differs_is_told_of_every_init_and_of_the_papers_own_calibration_set() -> None:
    texts = differing_setup(
        SETTINGS | {"init": ["qig", "masquant"]}, "a model", "a bank", calibrated="OmniBench 0 to 127"
    )
    assert texts[1].endswith("2 items of each task; the paper's are OmniBench 0 to 127, and a bank.")
    assert "Here it starts from `qig` and `masquant`, and" in texts[2]
    assert "Here it starts from `search`, and" in differing_setup(SETTINGS, "a model", "a bank")[2]
    assert "128 pairs of COCO, and a bank." in differing_setup(SETTINGS, "a model", "a bank")[1]


def test_the_paper_is_told_where_its_table_9_contradicts_its_text() -> None:
    rules = ("Dense-InitQ", *selection_value.RULES)
    of = {rule: dict.fromkeys(selection_value.SUBSETS, Interval(1.0, 0.5, 2.0)) for rule in rules}
    ahead = {rule: dict.fromkeys(selection_value.SUBSETS, Interval(-0.5, -0.9, -0.1)) for rule in rules}
    ahead["consequence only"] = dict.fromkeys(selection_value.SUBSETS, Interval(0.5, 0.1, 0.9))
    counts = dict.fromkeys(selection_value.SUBSETS, 9)
    page = selection_value.result(selection_value.Selection(counts, of, of, ahead, ahead), SETTINGS)
    assert [claim.verdict for claim in page.claims] == ["does not hold"] * 2  # one rule is better
    assert "consequence only 43.59, random 64.1" in page.claims[1].paper
    assert any("the margin flips of consequence only (43.59%)" in text for text in page.differs)


# --- efficiency -------------------------------------------------------------------------------------------------------


def test_speed_and_memory_are_those_of_the_committed_reports() -> None:
    files = [BENCHMARKS / f"h200-vllm-full-batch-{batch}.json" for batch in (1, 8)]
    found = {(one.engine.batch, one.engine.name): one for one in efficiency.speedups(efficiency.read_reports(files))}
    for batch, file in zip((1, 8), files, strict=True):
        engines = {one["name"]: one["batches"][0] for one in json.loads(file.read_text())["results"]}
        one, dense, ours = found[batch, "W4A8"], engines["dense"], engines["W4A8"]
        assert one.times.value == pytest.approx(dense["prefill_seconds"] / ours["prefill_seconds"], rel=1e-3)
        low, value, high = one.times.low, one.times.value, one.times.high
        assert low is not None
        assert value is not None
        assert high is not None
        assert low <= value <= high
        assert one.less == pytest.approx(100 * (1 - ours["peak_bytes"] / dense["peak_bytes"]))
    page = efficiency.result(list(found.values()), experiment(bench=tuple(files)))
    assert [claim.verdict for claim in page.claims] == ["holds"] * 4
    assert any("No report has FP8" in text for text in page.differs)


def test_fp8_is_beside_the_others_where_a_report_has_it(tmp_path: Path) -> None:
    seconds = {"dense": 0.04, "W4A8": 0.025, "FP8": 0.02}
    results = [
        {"name": name, "weight_bytes": 1, "batches": [{"batch": 1, "prefill_all": [of, of], "peak_bytes": 8e9}]}
        for name, of in seconds.items()
    ]
    file = tmp_path / "fp8.json"
    file.write_text(json.dumps({"settings": {"prompt_tokens": 2048}, "device": "GPU", "results": results}))
    page = efficiency.result(efficiency.speedups(efficiency.read_reports([file])), experiment(bench=(file,)))
    row = next(row for row in page.tables[0].rows if row[2] == "FP8")
    assert row == ["GPU (fp8.json)", 1, "FP8", 40.0, 20.0, "2.00 [2.00, 2.00]", 8.0, 8.0]
    assert not any("FP8" in text for text in page.differs)
    assert [claim.verdict for claim in page.claims[2:]] == ["not measured"] * 2  # of batch size 8


def test_what_is_no_report_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(OnPTQError, match=r"other\.json is no report of `onptq bench`"):
        efficiency.read_reports([file])


def experiment(**given: Any) -> Experiment:
    return Experiment(Settings(out=Path("x"), scale=TINY, **given))


# --- files ------------------------------------------------------------------------------------------------------------

FOUND = Result(
    "signals",
    "A title",
    [Claim("a | claim", "0.1", "0.2 [0.1, 0.3]", "holds"), Claim("another", "1", "-", "not measured")],
    [Table("A table", ("x", "y"), [["a", 1.5], ["b", None]], frozenset({(0, 1)}))],
    ["The model."],
    Picture("A picture", "unit", [Mark("a", "g", 1.0, 0.5, 1.5), Mark("b", "h", 2.0)]),
    {"scale": "tiny"},
)


def test_a_page_says_claims_tables_and_differences_and_the_summary_collects_them(tmp_path: Path) -> None:
    written = write_page(FOUND, "onptq reproduce run signals", tmp_path)
    assert [path.suffix for path in written] == [".svg", ".png", ".json", ".md"]
    text = (tmp_path / "signals.md").read_text()
    for line in (
        "onptq reproduce run signals",
        "| a \\| claim | 0.1 | 0.2 [0.1, 0.3] | **holds** |",
        "| a | **1.5** |",
        "| b |  |",
        "- The model.",
        "Settings: scale tiny.",
        "![A title](signals.svg)",
    ):
        assert line in text.splitlines()
    assert "<svg" in (tmp_path / "signals.svg").read_text()
    assert (tmp_path / "signals.png").read_bytes().startswith(b"\x89PNG")
    summary = write_summary(tmp_path)
    assert summary.name == SUMMARY
    assert "| [signals](signals.md), tiny | a \\| claim | 0.1 | 0.2 [0.1, 0.3] | **holds** |" in summary.read_text()
    assert "Of 2 claims: 1 holds, 1 not measured." in summary.read_text()
    [read] = read_results(tmp_path)
    assert read["command"] == "onptq reproduce run signals"
    assert read["tables"][0]["best"] == [[0, 1]]


def test_where_no_picture_can_be_drawn_the_page_and_the_command_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    told: list[str] = []
    written = write_page(FOUND, "onptq reproduce run signals", tmp_path, told.append)
    assert [path.suffix for path in written] == [".json", ".md"]
    assert told == [
        "no picture of signals: pictures as files need vl-convert-python, which is not installed: "
        'pip install "onptq[figures]"'
    ]
    assert '\nNo picture: `pip install "onptq[figures]"` draws it.\n' in (tmp_path / "signals.md").read_text()


def test_the_clock_estimates_what_is_left_in_proportion_to_the_work_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 100.0, 130.0, 190.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    monkeypatch.setattr(catalog, "WORK", {"signals": 3, "theory": 6, "motivation": 12})
    clock = Clock(["signals", "theory", "motivation"])
    assert clock.begin("signals") == "signals, 1 of 3"
    assert clock.begin("theory") == "theory, 2 of 3; 30 s so far, eta 180 s"
    assert re.fullmatch(r"Elapsed: 90 s, \d+ s of processor time", clock.end())
    assert set(WORK) == set(NAMES)


def test_names_are_run_in_the_order_of_the_catalog_and_unknown_ones_refused() -> None:
    assert check_names(["motivation", "signals"]) == ["signals", "motivation"]
    assert check_names(["all", "signals"]) == list(NAMES)
    with pytest.raises(
        OnPTQError,
        match=r"unknown result 'signal' \(did you mean signals\?\); expected all, or some of risk-properties, ",
    ):
        check_names(["signal"])
    with pytest.raises(OnPTQError, match=r"unknown scale 'fast'; expected one of quick, medium, full"):
        find_scale("fast")


def test_budgets_are_in_proportion_to_the_prompts() -> None:
    assert SCALES["full"].budget(256) == 256
    assert TINY.budget(256) == 6
    assert TINY.budget(1) == 1
