"""The rounds: every round has its own order and its own draw, and its bank is selected by the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onptq
from onptq.bank import AGREE, MISMATCH, NEAR_MISS, States, load_bank
from onptq.cycle import rounds
from onptq.cycle.calibrate import Calibrated, order_seed
from onptq.cycle.risk import select
from onptq.cycle.rounds import bank_figures
from onptq.recipe import Recipe, RiskConfig
from onptq.run import run_home

SEED = 7
TINY: dict[str, Any] = {
    "rounds": 2,
    "init": "rtn",
    "seed": SEED,
    "data.prompts": 4,
    "data.holdout": 1,
    "follow.max_tokens": 8,
    "calibrate.codes": "free",
    "calibrate.epochs": 1,
    "calibrate.batch": 2,
    "calibrate.micro_batch": 2,
    "select.budget": 4,
    "compute.device": "cpu",
}


def run_rounds(model: Path, out: Path, **changes: Any) -> tuple[Recipe, list[States]]:
    """The recipe of a run and the bank of each of its rounds."""
    recipe = Recipe.preset("risk", TINY | changes)
    onptq.quantize(model, out, calibration=model / "prompts.jsonl", recipe=recipe, verify=False)
    return recipe, [load_bank(run_home(out), round_index=k) for k in range(recipe.rounds)]


@pytest.mark.slow
def test_every_round_has_its_own_order_of_prompts(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    calibrate = rounds.calibrate

    def spy(*arguments: Any, seed: int, **options: Any) -> Calibrated:
        seeds.append(seed)
        return calibrate(*arguments, seed=seed, **options)

    monkeypatch.setattr(rounds, "calibrate", spy)
    run_rounds(small, tmp_path / "out")
    assert seeds == [order_seed(SEED, 0), order_seed(SEED, 1)]
    assert len(set(seeds)) == 2


@pytest.mark.slow
def test_random_selection_draws_anew_in_every_round(small: Path, tmp_path: Path) -> None:
    recipe, banks = run_rounds(small, tmp_path / "out", **{"select.rule": "random"})
    for k, bank in enumerate(banks):
        drawn = [select(bank, recipe.select, risk=recipe.risk, seed=SEED + each).critical for each in (k, 1 - k)]
        np.testing.assert_array_equal(bank.critical, drawn[0])
        assert not np.array_equal(bank.critical, drawn[1]), "the draw of the other round"
        assert bank.critical.sum() == 4 < bank.candidates.sum()


def test_the_ranking_of_mismatches_and_near_misses_is_that_of_the_recipes_risk(small: Path, tmp_path: Path) -> None:
    changes = {"select.rule": "mismatch_near_miss", "risk.divergence_weight": 200.0, "rounds": 1}
    changes["risk.near_miss_tol"] = 0.01
    recipe, (bank,) = run_rounds(small, tmp_path / "out", **changes)
    agree, near = (bank.erosion[bank.kind == kind] for kind in (AGREE, NEAR_MISS))
    assert 0 < agree.max() <= 0.01 < near.min(), "and so is what counts as a near miss"
    rank = np.where(bank.candidates, bank.erosion + 200.0 * bank.js, -np.inf)
    np.testing.assert_array_equal(np.flatnonzero(bank.critical), np.sort(np.argsort(-rank)[:4]))
    default = select(bank, recipe.select, risk=RiskConfig())
    assert not np.array_equal(bank.critical, default.critical), "the default risk selects others"


def test_the_figures_of_a_bank_count_states_that_diverge_without_a_candidate() -> None:
    kind = np.array([AGREE, AGREE, NEAR_MISS, MISMATCH, *[AGREE] * 26], np.int8)
    js = np.array([0.9, 0.85, 0.7, 0.8, *[0.001] * 26], np.float32)
    whole = np.arange(30, dtype=np.int32)
    columns = dict.fromkeys(("prompt", "t", "token", "reference", "competitor", "quantized"), whole)
    floats = dict.fromkeys(("margin_dense", "margin_quant", "erosion", "js", "kl"), js)
    figures = bank_figures(States.compared(**columns, **floats, kind=kind))
    assert figures["no_candidate_but_diverging"] == 2, "of the three in the tenth that diverges most"
    assert (figures["mismatches"], figures["near_misses"], figures["states"]) == (1, 1, 30)


@pytest.mark.slow
def test_off_policy_calibrates_on_the_dense_models_rollouts_and_is_judged_by_the_quantized_ones(
    small: Path, tmp_path: Path
) -> None:
    recipe, (bank,) = run_rounds(small, tmp_path / "off", method="offpolicy", rounds=1)
    assert recipe.follow.policy == "dense"
    _, (own,) = run_rounds(small, tmp_path / "on", rounds=1)
    assert np.array_equal(bank.token, bank.reference), "D chooses what it writes"
    assert np.array_equal(own.token, own.quantized)
    assert not np.array_equal(own.token, own.reference)
    for name in ("holdout.parquet", "holdout_trajectories.parquet"):
        folders = (run_home(tmp_path / folder) / "rounds/0" / name for folder in ("off", "on"))
        first, second = (path.read_bytes() for path in folders)
        assert first == second


@pytest.mark.slow
def test_branch_is_left_out_where_nothing_depends_on_it(small: Path, tmp_path: Path) -> None:
    _, (uniform,) = run_rounds(small, tmp_path / "uniform", method="uniform", rounds=1)
    assert not uniform.horizon.any()
    assert uniform.critical.all()
    changes = {"calibrate.pair": 0.0, "calibrate.hidden": 0.0, "rounds": 1}
    _, (plain,) = run_rounds(small, tmp_path / "plain", **changes)
    assert not plain.horizon.any()
    _, (weighted,) = run_rounds(small, tmp_path / "weighted", **changes, **{"calibrate.consequence": 1.0})
    assert (weighted.horizon[weighted.kind == AGREE] > 0).any(), "every visited state is branched"


@pytest.mark.slow
def test_a_recipe_says_which_model_continues_the_forced_tokens(small: Path, tmp_path: Path) -> None:
    changes = {"rounds": 1, "branch.horizon": 4}
    _, (by_q,) = run_rounds(small, tmp_path / "quantized", **changes)
    _, (by_d,) = run_rounds(small, tmp_path / "dense", **changes, **{"branch.policy": "dense"})
    assert np.array_equal(by_q.token, by_d.token)
    rows = by_q.candidates
    assert (by_q.horizon[rows] > 0).any()
    assert not np.array_equal(by_q.consequence[rows], by_d.consequence[rows])
