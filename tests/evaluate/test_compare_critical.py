"""Margin flips on joint-critical states: one bank for all candidates of a scheme."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MULTIMODAL, Tiny

from onptq.bank import MISMATCH, States, read_trajectories
from onptq.cycle import compare as comparison
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare as compare_states
from onptq.cycle.follow import follow
from onptq.data.manifest import load_manifest
from onptq.engine.prefixes import Prefixes
from onptq.evaluate.candidates import folder_name
from onptq.evaluate.comparison import compare_models
from onptq.evaluate.critical import HORIZON, Margins, joint_critical, margins_on
from onptq.evaluate.metrics import critical_measures
from onptq.evaluate.report import markdown
from onptq.evaluate.statistics import Resampler
from onptq.evaluate.summary import PAIRED, Report, Results, summarize
from onptq.methods.rtn import rtn
from onptq.recipe import Recipe


@pytest.mark.parametrize("family", [*MULTIMODAL, "llama"])
def test_on_its_own_bank_a_model_has_the_margins_that_compare_found(tiny: Callable[[str], Tiny], family: str) -> None:
    model = tiny(family)
    policy = model.policy("W3A16")
    policy.freeze(rtn(policy, ()))
    prefixes = Prefixes(policy, model.encode(policy, 5), max_tokens=6, batch_tokens=200)
    rollouts = follow(prefixes)
    states = compare_states(prefixes, rollouts)
    margins = margins_on(prefixes, rollouts, states)
    assert margins.quant == pytest.approx(states.margin_quant, abs=1e-5)
    assert np.array_equal(margins.dense, states.margin_dense)


def test_critical_are_mismatches_among_the_most_consequential_fifth_of_all_states(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("qwen2.5-vl")
    policy = model.policy("W4A16")
    policy.freeze(rtn(policy, ()))
    prefixes = Prefixes(policy, model.encode(policy, 6), max_tokens=16, batch_tokens=400)
    rollouts = follow(prefixes)
    states = compare_states(prefixes, rollouts)
    bank = joint_critical(prefixes, rollouts, states, horizon=3)
    usual = branch(prefixes, rollouts, states, horizon=3)
    candidates = states.candidates
    assert bank.consequence[candidates] == pytest.approx(usual.consequence[candidates], abs=1e-6)
    assert not usual.horizon[~candidates].any()
    assert (bank.horizon[~candidates] > 0).any()
    assert np.array_equal(bank.kind, states.kind)
    bar = np.sort(bank.consequence)[int(np.ceil(0.8 * (len(bank) - 1)))]
    expected = {
        row
        for row in range(len(bank))
        if states.kind[row] == MISMATCH and bank.horizon[row] and bank.consequence[row] >= bar
    }
    assert 0 < len(expected) < (states.kind == MISMATCH).sum()
    assert expected <= set(np.flatnonzero(bank.critical))
    assert len(set(np.flatnonzero(bank.critical)) - expected) <= 1  # the quantile lies between two states


def critical_rows(
    consequence: list[float], horizon: list[int], monkeypatch: pytest.MonkeyPatch, **given: Any
) -> set[int]:
    """The critical ones of these states, all mismatches, where branching gives these consequences and horizons."""
    rows, module = len(consequence), importlib.import_module("onptq.evaluate.critical")
    numbers, values = np.arange(rows, dtype=np.int32), np.zeros(rows, np.float32)
    columns = dict.fromkeys(("prompt", "t", "token", "reference", "competitor", "quantized"), numbers)
    floats = dict.fromkeys(("margin_dense", "margin_quant", "erosion", "js", "kl"), values)
    states = States.compared(**columns, **floats, kind=np.full(rows, MISMATCH, np.int8))

    def branched(prefixes: Prefixes, trajectories: Any, states: States, *, horizon: int, **options: Any) -> States:
        assert horizon == given.get("horizon", 16)
        return states.with_columns(consequence=np.array(consequence, np.float32), horizon=np.array(reach, np.int8))

    reach = horizon
    monkeypatch.setattr(module, "branch", branched)
    bank = joint_critical(None, [], states)  # type: ignore[arg-type]
    return set(np.flatnonzero(bank.critical).tolist())


def test_the_bar_itself_is_consequential_and_a_state_without_a_future_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six states the top fifth begins at the fifth one's own consequence. Where all end at once, the bar is zero."""
    assert critical_rows([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [1] * 6, monkeypatch) == {4, 5}
    assert critical_rows([0.0] * 6, [1, 0, 1, 0, 0, 1], monkeypatch) == {0, 2, 5}


def test_a_consequence_is_measured_over_sixteen_tokens_as_the_report_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HORIZON == 16
    assert inspect.signature(joint_critical).parameters["horizon"].default == 16
    assert critical_rows([0.5] * 2, [1] * 2, monkeypatch) == {0, 1}  # whose branches look so far


@pytest.mark.parametrize("rows", [1, 3])
def test_a_few_rows_of_logits_at_a_time_give_the_same_margins(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    model = tiny("qwen2.5-vl")
    policy = model.policy("W3A16")
    policy.freeze(rtn(policy, ()))
    prefixes = Prefixes(policy, model.encode(policy, 3), max_tokens=7)
    rollouts = follow(prefixes)
    states = compare_states(prefixes, rollouts)
    assert np.bincount(states.prompt).max() > rows
    monkeypatch.setattr(comparison, "LOGIT_BYTES", 4 * rows * policy.vocabulary)
    assert comparison.state_rows(policy.vocabulary, models=1) == rows
    assert margins_on(prefixes, rollouts, states).quant == pytest.approx(states.margin_quant, abs=1e-5)


def test_flips_and_erosion_are_over_critical_states_alone() -> None:
    margins = Margins(
        prompt=np.array([0, 0, 2, 2, 3], np.int32),
        t=np.array([1, 2, 1, 2, 1], np.int32),
        dense=np.array([1, 2, 3, 1, 1], np.float32),
        quant=np.array([-1, -1, 1, 2, 0], np.float32),
        critical=np.array([True, False, True, True, True]),
    )
    figures = {
        name: Resampler(replicates=50).estimate(one) for name, one in critical_measures(margins, [0, 1, 2, 3]).items()
    }
    assert figures["critical_flips"].value == pytest.approx(100 * 1 / 4)  # a margin of exactly zero is not flipped
    assert figures["critical_erosion"].value == pytest.approx((2 + 2 + 0 + 1) / 4)


@pytest.fixture(scope="module")
def judged(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    return judge(small, tmp_path_factory.mktemp("critical") / "out", ["smoothquant:W2A8"])


def judge(small: Path, out: Path, names: list[str], **given: Any) -> tuple[Path, Report]:
    prompts = load_manifest(small / "prompts.jsonl")
    recipe = Recipe.preset("light", {"data.prompts": 3, "follow.max_tokens": 8, "compute.batch_tokens": 200})
    options: dict[str, Any] = {"prompts": prompts[1:], "calibration": prompts[:3], "critical": True} | given
    return out, compare_models(small, names, out, recipe=recipe, replicates=50, **options)


def test_all_candidates_of_a_scheme_are_judged_on_the_states_of_plain_rounding(judged: tuple[Path, Report]) -> None:
    out, report = judged
    assert list(report.models) == ["dense", "smoothquant:W2A8", "rtn:W2A8"]
    home = out / "onptq"
    bank = States.read(home / "critical" / f"{folder_name('rtn:W2A8')}.parquet")
    assert bank.critical.any()
    for name in ("rtn", "smoothquant"):
        margins = Margins.read(home / "candidates" / folder_name(f"{name}:W2A8") / "margins.parquet")
        assert np.array_equal(margins.prompt, bank.prompt)
        assert np.array_equal(margins.t, bank.t)
        assert np.array_equal(margins.critical, bank.critical)
        flips = report.models[f"{name}:W2A8"].figures["critical_flips"].value
        assert flips == pytest.approx(100 * (margins.quant[bank.critical] < 0).mean())
    assert report.models["rtn:W2A8"].figures["critical_flips"].value == 100
    own = [
        Margins.read(home / "candidates" / folder_name(f"{name}:W2A8") / "margins.parquet").quant
        for name in ("rtn", "smoothquant")
    ]
    assert np.abs(own[0] - own[1]).min() > 0
    assert own[0] == pytest.approx(bank.margin_quant, abs=1e-5)
    rollouts = read_trajectories(home / "candidates" / folder_name("rtn:W2A8") / "trajectories.parquet")
    assert [
        token for one in sorted(rollouts, key=lambda one: one.prompt) for token in one.tokens
    ] == bank.token.tolist()
    assert "margin flips %" in markdown(report)
    assert "the same for all candidates of a scheme" in markdown(report)


@pytest.mark.slow
def test_margins_stay_and_only_those_of_new_candidates_are_measured(judged: tuple[Path, Report], small: Path) -> None:
    out, before = judged
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    _, report = judge(small, out, ["search:W2A8"])
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert report.models["smoothquant:W2A8"].figures == before.models["smoothquant:W2A8"].figures
    assert report.models["search:W2A8"].figures["critical_flips"].value is not None


@pytest.mark.slow
def test_by_default_nothing_is_branched(small: Path, tmp_path: Path) -> None:
    out, report = judge(small, tmp_path / "out", ["rtn:W2A8"], critical=False)
    assert "critical_flips" not in report.models["rtn:W2A8"].figures
    assert not (out / "onptq" / "critical").exists()
    assert "margin flips" not in markdown(report)


def test_of_many_candidates_only_those_of_one_scheme_are_paired() -> None:
    def results(count: int) -> dict[str, Results]:
        schemes = ["W4A8", "W4A6", None]
        return {"dense": Results()} | {f"{n}": Results(scheme=schemes[n % 3]) for n in range(count)}

    few = summarize([], [], results(PAIRED), Resampler(replicates=2))
    assert len(few.pairs) == PAIRED * (PAIRED + 1) // 2
    assert "of the same scheme alone" not in markdown(few)
    many = summarize([], [], results(PAIRED + 2), Resampler(replicates=2))
    pairs = {(pair.first, pair.second) for pair in many.pairs}
    assert {("dense", "0"), ("0", "3"), ("0", "2"), ("2", "5")} <= pairs
    assert ("0", "1") not in pairs
    assert "of the same scheme alone" in markdown(many)
