"""Do no harm: a run ends with its init where held-out prompts speak against calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import onptq
from onptq.bank import AGREE, MISMATCH, States, Trajectory
from onptq.cycle.calibrate import Holdout
from onptq.evaluate import guard
from onptq.evaluate.guard import choose
from onptq.evaluate.statistics import Interval
from onptq.recipe import Recipe
from onptq.run import CALIBRATED, INIT_KEPT, final_theta, run_home

PROMPTS, LENGTH = 40, 10
TINY: dict[str, Any] = {
    "init": "rtn",
    "data.prompts": 4,
    "data.holdout": 2,
    "follow.max_tokens": 6,
    "calibrate.codes": "free",
    "calibrate.epochs": 1,
    "calibrate.batch": 2,
    "calibrate.lr_step": 0.02,
    "compute.device": "cpu",
}


def states(kl: float, mismatches: int, seed: int = 0) -> States:
    """States of PROMPTS prompts with that mean KL; each of the first `mismatches` prompts has one mismatch."""
    rng = np.random.default_rng(seed)
    count = PROMPTS * LENGTH
    prompt = np.repeat(np.arange(PROMPTS, dtype=np.int32), LENGTH)
    kind = np.full(count, AGREE, np.int8)
    kind[np.arange(mismatches) * LENGTH] = MISMATCH
    noise = rng.normal(0, 0.01, count)
    zeros = np.zeros(count, np.float32)
    tokens = np.zeros(count, np.int32)
    return States.compared(
        prompt=prompt, t=np.tile(np.arange(1, LENGTH + 1, dtype=np.int32), PROMPTS), token=tokens, reference=tokens,
        competitor=tokens, quantized=tokens, margin_dense=zeros, margin_quant=zeros, erosion=zeros, js=zeros,
        kl=(kl + noise - noise.mean()).astype(np.float32), kind=kind,
    )  # fmt: skip


def held_out(one: States) -> Holdout:
    return Holdout([], [Trajectory(n, (0,), finished=True) for n in range(PROMPTS)], one)


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        (states(0.08, 10, seed=1), CALIBRATED),
        (states(0.08, 12, seed=1), CALIBRATED),  # two more mismatches of 400 states may be chance
        (states(0.08, 30, seed=1), INIT_KEPT),  # twenty are not
        (states(0.12, 2, seed=1), INIT_KEPT),
        (states(0.1, 10), INIT_KEPT),  # nothing changed
        (states(0.0999, 10, seed=1), INIT_KEPT),  # a KL that fell so little may be chance
    ],
    ids=["better", "mismatch within chance", "mismatch worse", "KL worse", "the same", "KL within chance"],
)
def test_the_init_is_kept_unless_kl_fell_and_mismatch_did_not_rise_beyond_chance(after: States, kept: str) -> None:
    before = states(0.1, 10)
    choice = choose(before, held_out(after), seed=0)
    assert choice.kept == kept
    assert choice.differences["kl"].value == pytest.approx(after.kl.mean() - before.kl.mean(), abs=1e-6)
    mismatches = [100 * (one.kind == MISMATCH).mean() for one in (before, after)]
    assert choice.differences["mismatch"].value == pytest.approx(mismatches[1] - mismatches[0])


def test_one_prompt_has_no_interval_so_its_kl_decides() -> None:
    def alone(kl: float) -> States:
        one = states(kl, 0)
        return one.take(np.flatnonzero(one.prompt == 0))

    for before, after, kept in ((0.5, 0.1, CALIBRATED), (0.1, 0.5, INIT_KEPT)):
        choice = choose(alone(before), Holdout([], [Trajectory(0, (0,), finished=True)], alone(after)), seed=0)
        assert choice.differences["kl"].high is None
        assert choice.kept == kept


def quantize(small: Path, out: Path, **changes: Any) -> onptq.pipeline.Result:
    recipe = Recipe.preset("risk", TINY | changes)
    return onptq.quantize(small, out, calibration=small / "prompts.jsonl", recipe=recipe)


def test_a_run_that_did_not_help_ships_its_init_and_says_so(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = {"kl": Interval(0.1, 0.05, 0.2), "mismatch": Interval(1.0, -1.0, 3.0)}
    monkeypatch.setattr(guard, "choose", lambda *given: guard.Choice(INIT_KEPT, worse))
    out = tmp_path / "out"
    summary = quantize(small, out).summary
    init = quantize(small, tmp_path / "init", rounds=0)
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (out, init.path))
    assert mine.keys() == theirs.keys()
    assert all(bool((mine[name] == theirs[name]).all()) for name in mine)
    assert final_theta(out, 1) == run_home(out) / "init.safetensors"
    assert summary["helped"] is False
    assert summary["choice"]["kept"] == INIT_KEPT
    assert json.loads((run_home(out) / "final/choice.json").read_text()) == summary["choice"]
    assert summary["holdout"]["final"] == summary["holdout"]["initial"] != summary["holdout"]["calibrated"]
    assert summary["verification"]["argmax_agreement"] == 1.0
    warning = " ".join(capsys.readouterr().err.split())
    assert "calibration did not help, so the init is kept: on 2 held-out prompts mismatch went from" in warning
    assert "More prompts or longer answers" in warning
    assert "The init was kept" in (out / "README.md").read_text()


def test_with_keep_last_nothing_is_judged(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "choose", None)
    summary = quantize(small, tmp_path / "out", **{"calibrate.keep": "last"}).summary
    assert summary["choice"] is summary["helped"] is None
    assert final_theta(tmp_path / "out", 1).name == "theta.safetensors"
    assert not (run_home(tmp_path / "out") / "final/choice.json").exists()
