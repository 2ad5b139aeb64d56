"""Do no harm: a run ends with its init where held-out prompts speak against calibration."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import onptq
from onptq.bank import AGREE, MISMATCH, States, Trajectory
from onptq.evaluate import guard
from onptq.evaluate.guard import CALIBRATED_ELSEWHERE, INIT_ELSEWHERE, Visited, choose, same_states
from onptq.evaluate.metrics import behaviour_measures
from onptq.evaluate.statistics import Interval, Measure, Resampler
from onptq.recipe import Recipe
from onptq.run import CALIBRATED, INIT_KEPT, final_theta, run_home

NOISE = 0.25  # standard deviation of what each theta adds to the log of a prompt's KL and, beside it, to a state's
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


def states(kl: np.ndarray, mismatch: np.ndarray, lengths: np.ndarray) -> States:
    """States of one prompt after the other, with that KL and those mismatches."""
    zeros, tokens = np.zeros(len(kl), np.float32), np.zeros(len(kl), np.int32)
    return States.compared(
        prompt=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        t=np.concatenate([np.arange(1, length + 1, dtype=np.int32) for length in lengths]),
        token=tokens, reference=tokens, competitor=tokens, quantized=tokens, margin_dense=zeros, margin_quant=zeros,
        erosion=zeros, js=zeros, kl=kl.astype(np.float32), kind=np.where(mismatch, MISMATCH, AGREE).astype(np.int8),
    )  # fmt: skip


@dataclass
class Prompts:
    """Prompts of one draw, by the log of their KL and by what each theta adds to it."""

    kl: np.ndarray
    init: np.ndarray
    calibrated: np.ndarray

    @classmethod
    def drawn(cls, rng: np.random.Generator, count: int) -> Prompts:
        return cls(rng.normal(0, 1, count), *rng.normal(0, NOISE, (2, count)))


def visited(
    rng: np.random.Generator,
    prompts: Prompts,
    *,
    kl: float = 1.0,
    mismatch: float = 0.05,
    harder: float = 1.0,
    cut_off: float = 0.0,
    loop: float = 0.0,
) -> Visited:
    """The states that one theta visits, with heavy tails. Calibration multiplies their KL by `kl` on average; 5% of them are
    mismatches of the init, a share `mismatch` of the calibrated theta. `harder` multiplies the KL of both; `cut_off` and
    `loop` are shares of responses."""
    count = len(prompts.kl)
    lengths = rng.integers(3, 60, count)
    prompt = np.repeat(np.arange(count), lengths)
    common = 0.001 * harder * np.exp(prompts.kl[prompt] + rng.normal(0, 1.3, len(prompt)))
    before, after = (
        common * np.exp(own[prompt] + rng.normal(0, NOISE, len(prompt))) for own in (prompts.init, prompts.calibrated)
    )
    after *= kl
    tie = rng.random(len(prompt))
    loops, ends = rng.random(count) < loop, rng.random(count) >= cut_off
    responses = [((7,) * 24, False) if loops[n] else (tuple(range(24)), bool(ends[n])) for n in range(count)]
    trajectories = [Trajectory(n, *response) for n, response in enumerate(responses)]
    return Visited(trajectories, states(before, tie < 0.05, lengths), states(after, tie < mismatch, lengths))


BETTER = {"kl": 0.7}


@pytest.mark.parametrize(
    ("both", "own", "draws", "fewest", "most"),
    [
        (BETTER, {}, 40, 0.8, 1),
        ({"kl": 0.8}, {}, 40, 0.55, 1),
        ({}, {}, 120, 0, 0.025),
        ({"kl": 1.2}, {}, 40, 0, 0),
        (BETTER | {"mismatch": 0.08}, {}, 40, 0, 0),
        (BETTER, {"harder": 4.0}, 40, 0, 0.1),
        (BETTER, {"loop": 0.15}, 40, 0, 0.05),
        (BETTER, {"cut_off": 0.15}, 40, 0, 0.05),
    ],
    ids=["KL -30%", "KL -20%", "equal", "KL +20%", "mismatch +3", "bad states", "loops", "no end"],
)
def test_how_often_the_calibrated_theta_is_kept(
    both: dict[str, float], own: dict[str, float], draws: int, fewest: float, most: float
) -> None:
    """64 prompts, and four iterates to choose from. `own` holds where the calibrated theta goes by itself."""
    resampler, kept = Resampler(0, 400), 0
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        prompts = Prompts.drawn(rng, 64)
        by_init, by_calibrated = visited(rng, prompts, **both), visited(rng, prompts, **both | own)
        kept += choose(by_init, by_calibrated, resampler, looks=4).kept == CALIBRATED
    assert fewest <= kept / draws <= most


def measured(one: Visited, side: str) -> Measure:
    return behaviour_measures(getattr(one, side), range(len(one.trajectories)))["kl"]


def test_the_best_of_iterates_that_change_nothing_is_seldom_taken_for_better() -> None:
    """The prompts that choose among four iterates also judge: an interval for one look is too narrow, that for four is not."""
    taken = {1: 0, 4: 0}
    draws = 100
    for seed in range(draws):
        prompts = Prompts.drawn(np.random.default_rng(seed), 64)
        iterates = [
            replace(prompts, calibrated=np.random.default_rng((seed, look)).normal(0, NOISE, 64)) for look in range(4)
        ]
        seen = [visited(np.random.default_rng((seed, 9)), iterate) for iterate in iterates]
        best = int(np.argmin([one.calibrated.kl.sum() for one in seen]))
        visits = seen[best], visited(np.random.default_rng((seed, 10)), iterates[best])
        pairs = [(measured(one, "init"), measured(one, "calibrated")) for one in visits]
        for looks in taken:
            high = same_states(pairs, 1 - 0.05 / looks).high
            taken[looks] += high is not None and high < 0
    assert taken[4] <= 0.05 * draws < taken[1]


def test_the_difference_on_the_same_states_and_its_error_are_those_of_a_loop_over_prompts() -> None:
    rng = np.random.default_rng(3)
    prompts = Prompts.drawn(rng, 30)
    visits = visited(rng, prompts, kl=0.9), visited(rng, prompts, kl=0.9, harder=2)
    choice = choose(*visits, Resampler(0, 50))
    value, influence = 0.0, [0.0] * 30
    for one in visits:
        rows = [
            (int(p), float(b) - float(a))
            for p, a, b in zip(one.init.prompt, one.init.kl, one.calibrated.kl, strict=True)
        ]
        mean = sum(change for _, change in rows) / len(rows)
        value += mean / 2
        for prompt, change in rows:
            influence[prompt] += (change - mean) / (len(rows) / 30) / 2
    error = math.sqrt(sum(each**2 for each in influence) / (30 * 29))
    interval = choice.differences["same_states_kl"]
    assert interval.value == pytest.approx(value, rel=1e-9)
    assert interval.low is not None
    assert interval.high is not None
    assert (interval.high - interval.low) / 2 == pytest.approx(2.0452296 * error, rel=1e-6)  # Student's t, 29 degrees


def test_the_difference_on_own_responses_is_that_on_the_same_states_and_what_other_states_cost() -> None:
    rng = np.random.default_rng(4)
    prompts = Prompts.drawn(rng, 20)
    by_init, by_calibrated = visited(rng, prompts, kl=0.8), visited(rng, prompts, kl=0.8, harder=1.5)
    differences = choose(by_init, by_calibrated, Resampler(0, 50)).differences
    means = [
        [float(one.kl.astype(np.float64).mean()) for one in (by.init, by.calibrated)] for by in (by_init, by_calibrated)
    ]
    other_states = (sum(means[1]) - sum(means[0])) / 2
    own, same = differences["kl"].value, differences["same_states_kl"].value
    assert own is not None
    assert same is not None
    assert own == pytest.approx(same + other_states, rel=1e-6)


def test_one_prompt_has_no_interval_so_its_kl_decides() -> None:
    lengths = np.array([4])
    for before, after, kept in ((0.5, 0.1, CALIBRATED), (0.1, 0.5, INIT_KEPT), (0.1, 0.1, INIT_KEPT)):
        sides = (states(np.full(4, kl), np.zeros(4, np.bool_), lengths) for kl in (before, after))
        one = Visited([Trajectory(0, (1, 2, 3, 4), finished=True)], *sides)
        choice = choose(one, one, Resampler(0))
        assert choice.differences["same_states_kl"].high is None
        assert choice.kept == kept


def quantize(small: Path, out: Path, **changes: Any) -> onptq.pipeline.Result:
    recipe = Recipe.preset("risk", TINY | changes)
    return onptq.quantize(small, out, calibration=small / "prompts.jsonl", recipe=recipe)


@pytest.mark.slow
def test_a_run_that_did_not_help_ships_its_init_and_says_so(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = {"kl": Interval(0.1, 0.05, 0.2), "mismatch": Interval(1.0, -1.0, 3.0)}
    monkeypatch.setattr(guard, "choose", lambda *given: guard.Choice(INIT_KEPT, "KL went up", worse))
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
    assert all((run_home(out) / name).is_file() for name in (CALIBRATED_ELSEWHERE, INIT_ELSEWHERE))
    assert summary["verification"]["argmax_agreement"] == 1.0
    warning = " ".join(capsys.readouterr().err.split())
    assert "so the init is kept: on 2 held-out prompts KL went up. On the responses of each, mismatch went" in warning
    assert "More prompts or longer answers" in warning
    assert "The init was kept: on held-out prompts KL went up." in (out / "README.md").read_text()


@pytest.mark.slow
def test_with_keep_last_nothing_is_judged(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "choose", None)
    summary = quantize(small, tmp_path / "out", **{"calibrate.keep": "last"}).summary
    assert summary["choice"] is summary["helped"] is None
    assert final_theta(tmp_path / "out", 1).name == "theta.safetensors"
    assert not (run_home(tmp_path / "out") / "final/choice.json").exists()
