"""Pictures: what they show by hand, that nothing is drawn of nothing, that data stay bounded, and that all of them render."""

from __future__ import annotations

import builtins
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onptq.errors import OnPTQError
from onptq.page import plots, state_plots, vega
from onptq.page.contract import Answer, Candidate, Figure, Page, Plot, Question, Response, States

vl_convert = pytest.importorskip("vl_convert")


def states(risk: Sequence[float], **columns: Any) -> States:
    count = len(risk)
    zeros = [0.0] * count
    own: dict[str, Any] = dict.fromkeys(("margin_dense", "margin_quant", "erosion", "js", "kl", "weight"), zeros) | {
        "reference": [1] * count,
        "competitor": [2] * count,
        "quantized": [1] * count,
        "kind": [0] * count,
        "consequence": [None] * count,
        "critical": [False] * count,
        "top": [None] * count,
        "futures": [None] * count,
    }
    return States(risk=risk, **(own | columns))


def response(of: States | None, fork: int | None = None) -> Response:
    return Response(Answer("b"), "same" if fork is None else "clear", fork, of)


def candidate(*responses: Response | None, **more: Any) -> Candidate:
    own: dict[str, Any] = {"name": "rtn:W4A8", "title": "RTN", "how": "", "verdict": "", "figures": {}}
    return Candidate(**(own | more), responses=responses)


def page_of(*candidates: Candidate, **more: Any) -> Page:
    count = max((len(one.responses) for one in candidates), default=0)
    prompts = [Question(f"p{number}", "", ("text",), (), Answer("a")) for number in range(count)]
    return Page("t", "dense", "", candidates, prompts, **more)


def data(plot: Plot | None, layer: int | None = None) -> list[dict[str, Any]]:
    assert plot is not None
    part = plot.spec if layer is None else plot.spec["layer"][layer]
    rows: list[dict[str, Any]] = part["data"]["values"]
    return rows


def full_page() -> Page:
    """A page on which every picture has something to show."""
    kinds = [0, 1, 2, 2]
    of_one = states(
        [6.0, 3.0, 1.0, 0.0],
        js=[0.0, 0.1, 0.5, 0.3],
        kl=[0.0, 1e-5, 0.2, 1.0],
        kind=kinds,
        consequence=[None, 0.0, 0.4, 0.6],
        critical=[True, True, True, False],
        became=[(0, 1), (2, None), (0, 0), (0, 0)],
    )
    figures = {
        "kl": Figure(0.08, 0.05, 0.12),
        "kl_p50": Figure(0.0, 0.0, 0.0),
        "kl_p95": Figure(0.3, 0.2, 0.5),
        "kl_p99": Figure(0.6, None, None),
    }
    first = candidate(response(of_one, 2), None, response(None), figures=figures, size_bytes=4_200_000_000)
    hostile = "<img src=x onerror=alert(1)> \x1b[31m"
    second = replace(first, name="b", title=hostile, figures=figures | {"kl": Figure(0.002)}, size_bytes=4_200_000_000)
    return page_of(first, second, dense_bytes=15_000_000_000)


def write_run(home: Path, steps: int = 4, rounds: int = 2) -> Path:
    home.mkdir()
    lines = [
        {"event": "step", "round": number, "step": step, "loss": 1.0 / step, "pair": 0.01, "gradient": 3.0}
        for number in range(rounds)
        for step in range(1, steps + 1)
    ]
    lines += [{"event": "step", "arm": "static", "round": 0, "step": 1, "loss": 77.0}, {"event": "open"}]
    text = "".join(json.dumps({"time": "2026"} | line) + "\n" for line in lines)
    (home / "log.jsonl").write_text(text + '{"event": "step", "rou')
    seconds = {"Load": 1.0, "Follow 1": 2.0, "Follow 2": 3.0, "Follow held-out 1": 0.5, "Initialize (rtn)": 0.25}
    (home / "summary.json").write_text(json.dumps({"seconds": seconds}))
    return home


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_risk_is_concentrated_as_counted_by_hand() -> None:
    plot = state_plots.risk_concentration(candidate(response(states([1, 6])), None, response(states([0, 3]))))
    assert [(row["states"], row["risk"]) for row in data(plot)] == [(0, 0), (25, 60), (50, 90), (75, 100), (100, 100)]
    assert plot is not None
    assert "riskiest 5% of 4 states hold 60% of the risk" in plot.caption


def test_risk_spread_evenly_lies_on_the_line_to_compare_with() -> None:
    plot = state_plots.risk_concentration(candidate(response(states([2.0] * 50))))
    assert all(row["risk"] == pytest.approx(row["states"]) for row in data(plot))


def test_divergence_is_averaged_by_the_distance_to_each_responses_own_fork() -> None:
    one = response(states([0] * 3, js=[0.1, 0.5, 0.3]), fork=1)
    other = response(states([0] * 3, js=[0.2, 0.2, 0.7]), fork=2)
    unforked = response(states([0] * 3, js=[9.0, 9.0, 9.0]))
    rows = data(state_plots.around_the_fork(candidate(one, other, unforked)))
    means = {row["offset"]: (row["js"], row["states"]) for row in rows}
    assert means == {-2: (0.2, 1), -1: (pytest.approx(0.15), 2), 0: (pytest.approx(0.6), 2), 1: (0.3, 1)}


def test_forks_are_counted_by_the_tokens_before_them() -> None:
    forks = (0, 0, 3, None)
    plot = state_plots.first_forks(candidate(*(response(None, fork) for fork in forks)))
    assert [row["responses"] for row in data(plot)] == [2, 0, 0, 1]
    assert plot is not None
    assert "3 of 4 responses" in plot.caption
    assert "1 never" in plot.caption


def test_late_forks_are_counted_in_wider_bins_that_lose_none() -> None:
    rows = data(state_plots.first_forks(candidate(*(response(None, fork) for fork in range(1000)))))
    assert len(rows) <= state_plots.BINS
    assert sum(row["responses"] for row in rows) == 1000
    assert all(before["end"] == after["first"] for before, after in itertools.pairwise(rows))


def test_percentiles_of_the_kl_are_the_smallest_values_that_so_many_do_not_exceed() -> None:
    plot = state_plots.kl_distribution(candidate(response(states([0] * 100, kl=[(n + 1) / 100 for n in range(100)]))))
    assert {row["name"]: row["kl"] for row in data(plot, 1)} == {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def test_critical_states_are_counted_by_what_they_were_in_each_round() -> None:
    of_one = states([0] * 3, kind=[2, 1, 0], critical=[True, True, False], became=[(0, None), (2, 0), (2, 2)])
    rows = data(state_plots.migration(candidate(response(of_one))))
    found = {(row["round"], row["kind"]): row["states"] for row in rows}
    assert found == {
        (1, "mismatch"): 1,
        (1, "near miss"): 1,
        (2, "agree"): 1,
        (2, "mismatch"): 1,
        (3, "agree"): 1,
        (3, "not visited"): 1,
    }


def test_consequences_are_shown_of_decisions_that_were_branched_alone() -> None:
    of_one = states([0] * 3, kind=[2, 1, 0], js=[0.1, 0.2, 0.3], consequence=[0.4, 0.0, None])
    one = candidate(None, response(of_one))
    rows = data(state_plots.mismatch_against_consequence(one, page_of(one)))
    assert [(row["prompt"], row["token"], row["kind"], row["consequence"]) for row in rows] == [
        ("p1", 1, "mismatch", 0.4),
        ("p1", 2, "near miss", 0.0),
    ]


def test_sizes_are_in_megabytes_where_all_are_small() -> None:
    one = candidate(figures={"kl": Figure(0.1)}, size_bytes=5_000_000)
    plot = plots.size_against_damage(page_of(one, dense_bytes=20_000_000))
    assert [row["size"] for row in data(plot)] == [5.0]
    assert plot is not None
    assert "20 MB" in plot.caption


def test_the_terms_of_a_run_follow_each_other_round_after_round(tmp_path: Path) -> None:
    loss = plots.run_plots(write_run(tmp_path / "run"))[0]
    rows = [row for row in data(loss, 0) if row["term"] == "loss"] if "data" in loss.spec["layer"][0] else data(loss)
    found = [(row["step"], row["value"]) for row in rows if row["term"] == "loss"]
    assert found == [(1, 1), (2, 0.5), (3, 0.3333), (4, 0.25), (5, 1), (6, 0.5), (7, 0.3333), (8, 0.25)]
    assert {row["term"] for row in data(loss)} == {"loss", "pair"}


def test_a_step_that_was_computed_again_is_drawn_once(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"event": "step", "round": 0, "step": 1, "loss": loss}) + "\n" for loss in (5.0, 2.0))
    )
    assert data(plots.run_plots(tmp_path)[0]) == [{"step": 1, "term": "loss", "value": 2.0}]


def test_the_phases_of_all_rounds_are_added_up(tmp_path: Path) -> None:
    rows = data(plots.run_plots(write_run(tmp_path / "run"))[1])
    seconds = {row["what"]: row["value"] for row in rows}
    assert seconds == {"Load": 1.0, "Follow": 5.0, "Follow held-out": 0.5, "Initialize": 0.25}


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_of_many_points_some_are_drawn_and_the_caption_says_so() -> None:
    count = 9000
    many = states(
        [1.0] * count,
        js=[0.1] * count,
        kl=[n / count for n in range(count)],
        consequence=[0.2] * count,
        kind=[2] * count,
    )
    one = candidate(response(many, fork=5))
    scatter, again = (state_plots.mismatch_against_consequence(one, page_of(one)) for _ in range(2))
    assert len(data(scatter)) == vega.MOST
    assert scatter is not None
    assert scatter == again
    assert "2,000 of 9,000" in scatter.caption
    for plot in plots.candidate_plots(one, page_of(one)):
        assert len(json.dumps(plot.spec)) < 300_000, plot.id


def test_a_long_run_is_drawn_as_means_and_the_caption_says_so(tmp_path: Path) -> None:
    loss = plots.run_plots(write_run(tmp_path / "run", steps=3000, rounds=1))[0]
    assert len(data(loss)) <= vega.MOST
    assert "mean of 3 steps" in loss.caption


def test_points_that_are_kept_are_evenly_spaced_with_both_ends() -> None:
    assert vega.thinned(list(range(9)), 5) == [0, 2, 4, 6, 8]
    assert vega.thinned([1, 2], 5) == [1, 2]


# --- nothing ----------------------------------------------------------------------------------------------------------


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    empty = candidate(None, response(None), response(states([0.0, 0.0]), None))
    assert {plot.id for plot in plots.candidate_plots(empty, page_of(empty))} == {"kl-distribution"}
    assert plots.candidate_plots(candidate(), page_of()) == []
    assert (
        plots.page_plots(page_of(candidate(figures={"kl": Figure(None), "kl_p50": Figure(None)}, size_bytes=5))) == []
    )
    assert plots.run_plots(tmp_path / "absent") == []
    (tmp_path / "summary.json").write_text('{"seconds": null}')
    assert plots.run_plots(tmp_path) == []


# --- drawing ----------------------------------------------------------------------------------------------------------


def all_plots(tmp_path: Path) -> list[Plot]:
    page = full_page()
    return [
        *plots.page_plots(page),
        *plots.candidate_plots(page.candidates[0], page),
        *plots.run_plots(write_run(tmp_path / "run")),
    ]


def test_every_picture_compiles_and_is_drawn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    drawn = all_plots(tmp_path)
    assert len({plot.id for plot in drawn}) == len(drawn) == 10
    for plot in drawn:
        json.dumps(plot.spec, allow_nan=False)
        vl_convert.vegalite_to_vega(dict(plot.spec), vl_version=vega.VERSION)
        file = tmp_path / f"{plot.id}.svg"
        vega.write_svg(plot, file)
        text = file.read_text()
        assert text.startswith("<svg"), plot.id
        assert "NaN" not in text, plot.id
        assert "<img" not in text, plot.id
        assert plot.spec["description"].startswith(plot.title)
        assert plot.spec["width"] == "container"
        assert plot.spec["background"] == "transparent"


def test_a_specification_names_no_file_and_no_address_to_load(tmp_path: Path) -> None:
    for plot in all_plots(tmp_path):
        text = json.dumps({key: value for key, value in plot.spec.items() if key != "$schema"})
        assert '"url"' not in text
        assert "http" not in text


def test_without_the_drawing_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = builtins.__import__

    def absent(name: str, *args: Any, **keywords: Any) -> Any:
        if name == "vl_convert":
            raise ImportError(name)
        return real(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", absent)
    plot = vega.picture("a", "A", "b", {"data": {"values": []}, "mark": "bar"})
    with pytest.raises(OnPTQError, match=r"pip install \"onptq\[figures\]\""):
        vega.write_svg(plot, tmp_path / "a.svg")


def test_a_picture_that_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match="picture 'a'"):
        vega.write_svg(vega.picture("a", "A", "b", {"mark": 7}), tmp_path / "a.svg")
