"""The update: it lowers what it says it lowers, is the same twice, survives interruption, and keeps the best iterate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from conftest import Tiny
from safetensors import safe_open
from test_theta import deployed, learnable, with_offsets, zero_offsets

from onptq.bank import States, Trajectory
from onptq.checkpoint.source import find_source
from onptq.cycle.branch import branch
from onptq.cycle.calibrate import Calibrated, Holdout, Progress, calibrate, objective, order_seed
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.objective import Targets, UpdateSequences, block_energy, measure, pair_strength
from onptq.cycle.risk import score, select
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.models.encoding import EncodedPrompt
from onptq.models.processing import PromptProcessor
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import SMOOTHING_REACH, Theta
from onptq.recipe import CalibrateConfig, Recipe, RiskConfig, SelectConfig
from onptq.zoo.random import write_random


@dataclass(frozen=True)
class Case:
    """A small vision-language policy at RTN, six calibration and two held-out prompts, rollouts, critical states."""

    policy: Policy
    prompts: list[EncodedPrompt]
    trajectories: list[Trajectory]
    states: States
    theta: Theta
    holdout: Holdout

    def calibrate(self, cfg: CalibrateConfig, **options: object) -> Calibrated:
        return calibrate(self.policy, self.prompts, self.trajectories, self.states, self.theta, cfg, **options)  # type: ignore[arg-type]

    def loss(self, theta: Theta, cfg: CalibrateConfig) -> float:
        """The objective of the deployed, integer Q on all calibration prompts."""
        self.policy.freeze(theta)
        items = UpdateSequences(self.policy, self.prompts, self.trajectories, self.states)
        targets = Targets(self.policy, None)
        energy = block_energy(targets, items) if cfg.normalize == "energy" else None
        return float(objective(measure(self.policy, items, targets, energy), cfg))

    def holdout_score(self, theta: Theta, anchor: float = 1.0, response: float = 1.0) -> float:
        """Anchor and mean on-policy KL, weighted, energy-normalized as in training."""
        self.policy.freeze(theta)
        targets, states = Targets(self.policy, None), self.holdout.states
        energy = block_energy(targets, UpdateSequences(self.policy, self.prompts, [], None))
        every = states.with_columns(
            critical=np.ones(len(states), np.bool_), weight=np.full(len(states), 1 / len(states), np.float32)
        )
        items = UpdateSequences(self.policy, self.holdout.prompts, self.holdout.trajectories, every)
        terms = measure(self.policy, items, targets, energy).floats()
        return anchor * terms["anchor"] + response * terms["response"]

    def codes(self, theta: Theta) -> dict[str, torch.Tensor]:
        return {path: piece.codes.int() for path, piece in deployed(self.policy, theta).items()}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("small")
    write_random("qwen2.5-vl", folder, prompts=8, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512, image_size=56)
    source = find_source(folder)
    return Tiny(folder, source, PromptProcessor.from_folder(folder, source.family, source.config))


@pytest.fixture(scope="module")
def case(small: Tiny) -> Case:
    return make_case(small, "W4A8")


@pytest.fixture(scope="module")
def weights_only(small: Tiny) -> Case:
    return make_case(small, "W4A16")


def make_case(small: Tiny, scheme: str) -> Case:
    policy = small.policy(scheme)
    encoded = small.encode(policy, 8)
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    policy.freeze(theta)
    banks = []
    for prompts in (encoded[:6], encoded[6:]):
        prefixes = Prefixes(policy, prompts, max_tokens=10)
        trajectories = follow(prefixes)
        banks.append((trajectories, branch(prefixes, trajectories, compare(prefixes, trajectories), horizon=2)))
    states = select(score(banks[0][1], RiskConfig()), SelectConfig(budget=8))
    return Case(policy, encoded[:6], banks[0][0], states, theta, Holdout(encoded[6:], *banks[1]))


# Terms of like size and steps large enough to see
PLAIN: dict[str, Any] = {
    "hidden": 1.0,
    "pair": 1.0,
    "response": 1.0,
    "response_over": "critical",
    "codes": "free",
    "lr_smoothing": 2e-3,
    "lr_step": 5e-3,
    "checkpointing": False,
}


def full_batch(**fields: Any) -> CalibrateConfig:
    return CalibrateConfig(**{**PLAIN, "batch": 6, "micro_batch": 3, "epochs": 8, **fields})


def short(**fields: Any) -> CalibrateConfig:
    return CalibrateConfig(**{**PLAIN, "batch": 2, "micro_batch": 2, "epochs": 2, **fields})


def same(a: Theta, b: Theta) -> bool:
    left, right = a.tensors(), b.tensors()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def close(a: Theta, b: Theta) -> bool:
    """Up to the few entries whose gradient is so near zero that rounding decides the direction of Adam's step."""
    left, right = (torch.cat([p.flatten() for p in theta.tensors().values()]) for theta in (a, b))
    return bool(((left - right).abs() > 5e-5).double().mean() < 0.01)


def test_the_start_is_not_touched(case: Case) -> None:
    before = case.theta.clone()
    for codes in ("free", "settled", "learned"):
        result = case.calibrate(short(codes=codes))
        assert same(case.theta, before)
        assert not same(result.theta, before)
        parts = result.theta.smoothing, result.theta.ratio, result.theta.offset
        assert not any(tensor.requires_grad for part in parts for tensor in part.values())


# It lowers the objective


@pytest.mark.slow
@pytest.mark.parametrize(("gamma", "normalize"), [(0.0, "energy"), (0.2, "none"), (1.0, "energy")])
def test_a_few_steps_lower_the_objective_of_the_deployed_model(case: Case, normalize: str, gamma: float) -> None:
    cfg = full_batch(normalize=normalize, gamma=gamma)
    result = case.calibrate(cfg)
    start, end = case.loss(case.theta, cfg), case.loss(result.theta, cfg)
    assert result.history[0]["loss"] == pytest.approx(start, rel=2e-2)
    assert end < (0.95 if gamma == 0 else 0.6) * start


@pytest.mark.slow
@pytest.mark.parametrize("term", ["hidden", "pair", "response"])
def test_each_critical_term_alone_can_be_lowered(case: Case, term: str) -> None:
    others = {name: 0.0 for name in ("anchor", "hidden", "pair", "response") if name != term}
    history = case.calibrate(full_batch(gamma=1.0, **others)).history
    assert min(record[term] for record in history) < 0.95 * history[0][term]
    assert history[-1]["loss"] == pytest.approx(history[-1][term], rel=1e-6)


def test_the_first_step_is_adamw_on_the_clipped_gradient(weights_only: Case) -> None:
    case = weights_only
    cfg = full_batch(epochs=1, gamma=30.0, normalize="none")
    theta = learnable(case.theta)
    case.policy.attach(theta)
    items = UpdateSequences(case.policy, case.prompts, case.trajectories, case.states)
    objective(measure(case.policy, items, Targets(case.policy, None)), cfg).backward()
    learned = [*theta.smoothing.values(), *theta.ratio.values()]
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in learned if parameter.grad is not None))
    assert norm > 1, "the gradient is long enough to be clipped"
    optimizer = torch.optim.AdamW(
        [
            {"params": list(theta.smoothing.values()), "lr": cfg.lr_smoothing},
            {"params": list(theta.ratio.values()), "lr": cfg.lr_step},
        ],
        betas=(0.9, 0.999),
        weight_decay=0.0,
    )
    for parameter in learned:
        assert parameter.grad is not None
        parameter.grad /= norm
    optimizer.step()
    theta.project_(case.theta)

    kept: list[Progress] = []
    result = case.calibrate(cfg, save=kept.append)
    assert result.history[0]["gradient"] == pytest.approx(norm, rel=1e-4)
    assert close(theta, result.theta)
    first = [moment for name, moment in kept[0].moments.items() if name.endswith("exp_avg")]
    length = math.sqrt(sum(float(moment.square().sum()) for moment in first))
    assert length == pytest.approx(0.1, rel=1e-3), "a tenth of a gradient of length 1"


def test_the_learning_rate_falls_to_a_tenth_along_a_cosine(case: Case) -> None:
    """Adam moves every entry by about its rate, so that the travel of the ratios shows the rate."""
    steps: list[torch.Tensor] = []

    def keep(progress: Progress) -> None:
        steps.append(torch.cat([c.flatten() for c in progress.theta.clone().ratio.values()]))

    result = case.calibrate(full_batch(epochs=10), save=keep)
    travel = torch.stack(steps).diff(dim=0).abs().amax(1)  # of steps 2..10
    rate = [5e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / 10))) for step in range(1, 10)]
    assert len(result.history) == 10
    assert all(float(moved) <= 1.8 * limit for moved, limit in zip(travel, rate, strict=True))
    assert float(travel[-1]) < 0.35 * float(travel[0])


def test_a_violent_update_stays_in_the_trust_region(case: Case) -> None:
    result = case.calibrate(full_batch(epochs=6, lr_smoothing=2.0, lr_step=2.0))
    for key, u in result.theta.smoothing.items():
        assert (u - case.theta.smoothing[key]).abs().max() <= SMOOTHING_REACH + 1e-6
    for ratio in result.theta.ratio.values():
        assert ratio.min() >= math.log(0.4) - 1e-6
        assert ratio.max() <= 0


# Batches: with activations in full precision, where the shape of a batch decides no rounding


@pytest.mark.parametrize("normalize", ["energy", "none"])
def test_scaled_minibatches_average_to_the_full_batch(weights_only: Case, normalize: str) -> None:
    still = {"epochs": 1, "lr_smoothing": 0.0, "lr_step": 0.0, "normalize": normalize}
    (full,) = weights_only.calibrate(full_batch(**still)).history
    parts = weights_only.calibrate(short(**still)).history
    assert len(parts) == 3
    assert len({record["loss"] for record in parts}) == 3
    for name in ("anchor", "hidden", "pair", "response", "loss"):
        assert np.mean([record[name] for record in parts]) == pytest.approx(full[name], rel=1e-5)


def test_micro_batches_and_checkpointing_cost_memory_and_change_nothing_else(weights_only: Case) -> None:
    whole = weights_only.calibrate(full_batch(epochs=2, micro_batch=6))
    for other in ({"micro_batch": 1}, {"micro_batch": 4, "checkpointing": True}):
        result = weights_only.calibrate(full_batch(epochs=2, **other))
        for mine, theirs in zip(whole.history, result.history, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3)
        assert close(whole.theta, result.theta)


# The static control


def test_gamma_zero_is_the_static_control_bit_for_bit(case: Case) -> None:
    fields = {"batch": 2, "micro_batch": 2, "epochs": 2}
    static = Recipe.preset("paper", {"method": "static", "calibrate": fields}).calibrate
    assert static.gamma == 0
    control = calibrate(case.policy, case.prompts, [], None, case.theta, static)
    onptq = Recipe.preset("paper", {"calibrate": {**fields, "gamma": 0}}).calibrate
    for trajectories, states in ((case.trajectories, case.states), (case.trajectories, None), ([], None)):
        result = calibrate(case.policy, case.prompts, trajectories, states, case.theta, onptq)
        assert same(result.theta, control.theta)
        assert result.history == control.history
    other = calibrate(case.policy, case.prompts, case.trajectories, case.states, case.theta, short(normalize="none"))
    assert not same(other.theta, control.theta)


def test_an_empty_critical_set_is_an_anchor_only_update(case: Case) -> None:
    zero = np.zeros(len(case.states), np.float32)
    nothing = case.states.with_columns(critical=zero.astype(np.bool_), weight=zero)
    result = calibrate(case.policy, case.prompts, case.trajectories, nothing, case.theta, short())
    assert same(result.theta, case.calibrate(short(gamma=0)).theta)


def test_a_matched_pair_weight_is_the_weight_times_its_factor_bit_for_bit(case: Case) -> None:
    factor = pair_strength(case.states)
    assert abs(factor - 1) > 0.1
    matched, by_hand = case.calibrate(short(pair_matched=True)), case.calibrate(short(pair=PLAIN["pair"] * factor))
    assert same(matched.theta, by_hand.theta)
    assert matched.history == by_hand.history
    assert not same(matched.theta, case.calibrate(short()).theta)
    static = case.calibrate(short(gamma=0.0))
    assert same(case.calibrate(short(gamma=0.0, pair_matched=True)).theta, static.theta)


def test_equal_weights_begin_with_the_strength_they_match(case: Case) -> None:
    uniform = replace(case, states=select(case.states, SelectConfig(rule="all")))
    assert same(uniform.calibrate(short(pair_matched=True)).theta, uniform.calibrate(short()).theta)


# Seeds


def test_the_same_seed_gives_the_same_bits_and_another_seed_another_order(case: Case) -> None:
    first, again, other = (case.calibrate(short(), seed=seed) for seed in (3, 3, 4))
    assert same(first.theta, again.theta)
    assert first.history == again.history
    assert not same(first.theta, other.theta)
    assert first.history[0]["loss"] != other.history[0]["loss"]


def test_every_epoch_visits_every_prompt_once_in_its_own_order(case: Case) -> None:
    still = short(batch=1, epochs=2, lr_smoothing=0.0, lr_step=0.0, gamma=0.0)
    anchors = [record["anchor"] for record in case.calibrate(still).history]
    epochs = anchors[:6], anchors[6:]
    assert sorted(epochs[0]) == pytest.approx(sorted(epochs[1]), rel=1e-6)
    assert len(set(epochs[0])) == 6
    assert epochs[0] != pytest.approx(epochs[1], rel=1e-6)


def test_no_two_epochs_rounds_or_seeds_share_an_order() -> None:
    seeds = [order_seed(seed, k) + epoch for seed in range(3) for k in range(12) for epoch in range(200)]
    assert len(set(seeds)) == len(seeds)


# Interruption


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("codes", "held_out", "at"),
    [("free", False, 1), ("free", True, 4), ("settled", True, 1), ("learned", False, 4), ("learned", True, 1)],
)
def test_an_interrupted_update_ends_where_the_uninterrupted_one_does(
    case: Case, tmp_path: Path, at: int, held_out: bool, codes: str
) -> None:
    cfg, options = short(codes=codes, evaluations=3), {"holdout": case.holdout if held_out else None, "seed": 5}
    whole = case.calibrate(cfg, **options)
    assert len(whole.history) == 6
    file = tmp_path / "progress.safetensors"

    def die(progress: Progress) -> None:
        if progress.step == at:
            progress.save(file)
            raise Killed

    with pytest.raises(Killed):
        case.calibrate(cfg, **options, save=die)
    case.policy.freeze(case.theta)  # another process knows nothing of the first one's Q
    resumed = case.calibrate(cfg, **options, progress=Progress.load(file, "cpu"))
    assert same(resumed.theta, whole.theta)
    assert resumed.best_step == whole.best_step
    assert resumed.history == whole.history[at:]


def test_an_update_that_was_saved_at_its_end_has_nothing_left_to_do(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "progress.safetensors"
    whole = case.calibrate(short(), holdout=case.holdout, save=lambda progress: progress.save(file))
    resumed = case.calibrate(short(), holdout=case.holdout, progress=Progress.load(file, "cpu"))
    assert same(resumed.theta, whole.theta)
    assert resumed.best_step == whole.best_step
    assert resumed.history == []


def test_an_update_does_not_depend_on_the_order_in_which_theta_was_read(case: Case, tmp_path: Path) -> None:
    """A second round starts from memory, or after an interruption from the disk, which keeps another order of names."""
    case.theta.save(tmp_path / "theta.safetensors")
    loaded = Theta.load(tmp_path / "theta.safetensors")
    reversed_order = Theta(dict(reversed(loaded.smoothing.items())), dict(reversed(loaded.linears.items())))
    cfg = short(gamma=30.0)  # gradients long enough that clipping adds up their lengths
    expected = case.calibrate(cfg)
    assert max(record["gradient"] for record in expected.history) > 1
    for theta in (loaded, reversed_order):
        result = calibrate(case.policy, case.prompts, case.trajectories, case.states, theta, cfg)
        assert result.history == expected.history
        assert same(result.theta, expected.theta)


@pytest.mark.parametrize("codes", ["settled", "learned"])
def test_progress_survives_the_disk_bit_for_bit(case: Case, tmp_path: Path, codes: str) -> None:
    kept: list[Progress] = []
    case.calibrate(short(epochs=1, codes=codes), holdout=case.holdout, save=kept.append)
    assert kept[-1].theta.offset or kept[-1].theta.settled
    progress, file = kept[-1], tmp_path / "progress.safetensors"
    progress.save(file)
    with safe_open(file, "pt") as saved:
        assert not any("levels/" in name for name in saved.keys()), "they lie with the start"  # noqa: SIM118
    loaded = Progress.load(file, "cpu")
    loaded.take_codes(progress.theta)
    assert same(loaded.theta, progress.theta)
    assert loaded.best is not None
    assert progress.best is not None
    assert same(loaded.best, progress.best)
    assert (loaded.step, loaded.best_step, loaded.best_score) == (
        progress.step,
        progress.best_step,
        progress.best_score,
    )
    assert loaded.moments.keys() == progress.moments.keys()
    assert all(torch.equal(loaded.moments[name], progress.moments[name]) for name in loaded.moments)
    never = Progress(case.theta)
    never.save(file)
    assert Progress.load(file, "cpu").best_score == math.inf


# The best iterate


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.2, 10.0), (0.0, 3.0)], ids=str)
def test_the_kept_iterate_is_the_best_on_held_out_prompts_as_the_objective_weighs_them(
    case: Case, weights: tuple[float, float]
) -> None:
    anchor, response = weights
    result = case.calibrate(full_batch(evaluations=8, anchor=anchor, response=response), holdout=case.holdout)
    scores = {record["step"]: record["holdout"] for record in result.history}
    scores[0] = case.holdout_score(case.theta, anchor, response)
    assert len(scores) == 9
    assert result.best_step == min(scores, key=lambda step: scores[step])
    assert case.holdout_score(result.theta, anchor, response) == pytest.approx(min(scores.values()), rel=1e-4)
    assert case.holdout_score(result.theta, anchor, response) <= scores[0] * (1 + 1e-6)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 4.0), (0.0, 1.0)], ids=str)
def test_the_held_out_score_is_the_weighted_anchor_and_the_mean_kl(
    weights_only: Case, weights: tuple[float, float]
) -> None:
    """The KL is what Compare wrote into the bank, a plain mean of it; gamma and the critical states have no say."""
    case, (anchor, response) = weights_only, weights
    still = {"lr_smoothing": 0.0, "lr_step": 0.0, "epochs": 1, "anchor": anchor, "response": response}
    policy, targets = case.policy, Targets(case.policy, None)
    policy.freeze(case.theta)
    energy = block_energy(targets, UpdateSequences(policy, case.prompts, [], None))
    context = UpdateSequences(policy, case.holdout.prompts, [], None)
    expected = anchor * measure(policy, context, targets, energy).floats()["anchor"]
    expected += response * float(case.holdout.states.kl.mean())
    for cfg in (full_batch(**still), full_batch(**still, gamma=0.0), full_batch(**still, response_over="visited")):
        (record,) = case.calibrate(cfg, holdout=case.holdout).history
        assert record["holdout"] == pytest.approx(expected, rel=1e-4)


def test_an_update_that_only_harms_returns_the_start(case: Case) -> None:
    result = case.calibrate(short(lr_smoothing=1.0, lr_step=1.0), holdout=case.holdout)
    assert result.best_step == 0
    assert same(result.theta, case.theta)
    assert all(record["holdout"] > case.holdout_score(case.theta) for record in result.history if "holdout" in record)


def test_an_update_that_worsens_goes_back_to_its_best_in_smaller_steps(case: Case) -> None:
    """Steps back show in the score: it is that of the best again, but for the steps since."""
    harmful = {"lr_smoothing": 1.0, "lr_step": 1.0, "evaluations": 6}
    saved: list[Progress] = []

    def keep(progress: Progress) -> None:
        saved.append(replace(progress, theta=progress.theta.clone(), moments=dict(progress.moments)))

    result = case.calibrate(short(**harmful, rollback=0.01), holdout=case.holdout, save=keep)
    back = [record["step"] for record in result.history if "rollback" in record]
    assert back
    for progress in saved:
        if progress.step in back:
            assert progress.best is not None
            assert same(progress.theta, progress.best)
            assert progress.moments == {}
    assert saved[-1].rate == 0.5 ** len(back)
    plain = case.calibrate(short(**harmful), holdout=case.holdout)
    assert result.history[0]["holdout"] == plain.history[0]["holdout"]
    assert result.history[-1]["holdout"] < plain.history[-1]["holdout"]


def test_without_a_worse_score_a_rollback_changes_nothing(case: Case) -> None:
    plain, guarded = (case.calibrate(short(rollback=bound), holdout=case.holdout) for bound in (None, 10.0))
    assert same(plain.theta, guarded.theta)
    assert plain.history == guarded.history


@pytest.mark.slow
@pytest.mark.parametrize("codes", ["free", "settled", "learned"])
def test_an_update_interrupted_after_a_rollback_goes_on_with_the_same_bits(
    case: Case, tmp_path: Path, codes: str
) -> None:
    rates = {"lr_smoothing": 0.3, "lr_step": 0.3, "lr_rounding": 0.3}
    cfg, file = short(codes=codes, **rates, evaluations=6, rollback=0.0), tmp_path / "progress.safetensors"
    whole = case.calibrate(cfg, holdout=case.holdout)
    at = next(record["step"] for record in whole.history if "rollback" in record)

    def save(progress: Progress) -> None:
        if progress.step == at:
            progress.save(file)

    case.calibrate(cfg, holdout=case.holdout, save=save)
    resumed = case.calibrate(cfg, holdout=case.holdout, progress=Progress.load(file, "cpu"))
    assert same(resumed.theta, whole.theta)
    assert resumed.history == whole.history[int(at) :]


def test_a_rollback_needs_a_judge() -> None:
    with pytest.raises(OnPTQError, match=r"calibrate\.rollback goes by held-out prompts"):
        Recipe.preset("default", {"calibrate.rollback": 0.1, "calibrate.keep": "last"})


def test_of_equal_iterates_the_first_is_returned(case: Case) -> None:
    still = full_batch(lr_smoothing=0.0, lr_step=0.0, epochs=3, evaluations=3)
    result = case.calibrate(still, holdout=case.holdout)
    assert len({record["holdout"] for record in result.history}) == 1
    assert result.best_step == 0


def test_the_held_out_score_does_not_depend_on_the_micro_batch(weights_only: Case) -> None:
    case, still = weights_only, {"lr_smoothing": 0.0, "lr_step": 0.0, "epochs": 1}
    scores = [
        case.calibrate(full_batch(**still, micro_batch=size), holdout=case.holdout).history[0]["holdout"]
        for size in (1, 2)
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert scores[0] == pytest.approx(case.holdout_score(case.theta), rel=1e-4)


def test_the_judge_weighs_states_as_the_objective_does(case: Case) -> None:
    still = {"lr_smoothing": 0.0, "lr_step": 0.0, "anchor": 0.0, "response_over": "visited", "epochs": 1}
    kl, states = case.holdout.states.kl.astype(np.float64), case.holdout.states
    expected = np.average(kl, weights=1 + 3.0 * states.consequence.astype(np.float64))
    assert abs(expected / kl.mean() - 1) > 0.01
    result = case.calibrate(full_batch(**still, response=1.0, consequence=3.0), holdout=case.holdout)
    assert result.history[0]["holdout"] == pytest.approx(expected, rel=1e-4)


def test_the_last_iterate_is_judged_where_the_interval_does_not_divide(case: Case) -> None:
    result = case.calibrate(full_batch(epochs=5, evaluations=2), holdout=case.holdout)
    assert [record["step"] for record in result.history if "holdout" in record] == [2, 4, 5]


def test_held_out_prompts_are_evaluated_as_often_as_asked_and_at_the_end(case: Case) -> None:
    result = case.calibrate(short(evaluations=2), holdout=case.holdout)
    assert [record["step"] for record in result.history if "holdout" in record] == [3, 6]
    result = case.calibrate(short(evaluations=100), holdout=case.holdout)
    assert all("holdout" in record for record in result.history)


def test_keep_last_returns_the_last_iterate_whatever_the_held_out_prompts_say(case: Case) -> None:
    cfg = short(lr_smoothing=1.0, lr_step=1.0, keep="last")
    result, alone = case.calibrate(cfg, holdout=case.holdout), case.calibrate(cfg)
    assert same(result.theta, alone.theta)
    assert result.best_step == len(result.history) == 6
    assert not same(result.theta, case.theta)


def test_held_out_prompts_choose_but_do_not_teach(case: Case) -> None:
    with_holdout, without = case.calibrate(short(), holdout=case.holdout), case.calibrate(short())
    stripped = [{name: value for name, value in record.items() if name != "holdout"} for record in with_holdout.history]
    assert stripped == without.history


# The response loss over visited states


def test_over_visited_states_the_response_loss_is_the_mean_kl_of_the_bank(weights_only: Case) -> None:
    still = {"epochs": 1, "lr_smoothing": 0.0, "lr_step": 0.0}
    (visited,) = weights_only.calibrate(full_batch(**still, response_over="visited")).history
    (critical,) = weights_only.calibrate(full_batch(**still)).history
    states = weights_only.states
    assert 0 < states.critical.sum() < len(states)
    assert visited["response"] == pytest.approx(float(states.kl.mean()), rel=1e-4)
    assert critical["response"] == pytest.approx(float((states.kl * states.weight).sum()), rel=1e-4)
    assert visited["response"] != pytest.approx(critical["response"], rel=0.01)
    for term in ("anchor", "hidden", "pair"):
        assert visited[term] == pytest.approx(critical[term], rel=1e-5)


def test_gamma_zero_hears_nothing_of_visited_states(case: Case) -> None:
    visited = case.calibrate(short(gamma=0.0, response_over="visited"))
    assert same(visited.theta, case.calibrate(short(gamma=0.0)).theta)
    assert all(record["response"] == 0 for record in visited.history)


# Learned codes

LEARNED = {"codes": "learned", "lr_smoothing": 0.0, "lr_step": 0.0}  # and nothing but codes


def test_learned_codes_begin_as_the_starts_own(case: Case) -> None:
    kept: list[Progress] = []
    still = full_batch(**LEARNED, lr_rounding=0.0, epochs=1)
    case.calibrate(still, save=lambda progress: kept.append(replace(progress, theta=progress.theta.clone())))
    centred = case.policy.centre(case.theta)
    assert same(kept[0].theta, centred)
    free = case.calibrate(full_batch(lr_smoothing=0.0, lr_step=0.0, epochs=1))
    assert case.calibrate(still).history[0]["loss"] == pytest.approx(free.history[0]["loss"], rel=1e-6)


@pytest.mark.slow
def test_a_code_changes_only_when_the_evidence_for_it_adds_up(case: Case) -> None:
    """Eight steps of a hundredth leave every weight within half a step of its code; eight that are larger do not."""
    before, begin = case.codes(case.theta), case.policy.centre(case.theta).offset
    slow = case.calibrate(full_batch(**LEARNED))
    assert not any(torch.equal(offset, slow.theta.offset[key]) for key, offset in begin.items())
    after = case.codes(slow.theta)
    assert all(torch.equal(codes, after[path]) for path, codes in before.items())
    after = case.codes(case.calibrate(full_batch(**LEARNED, lr_rounding=0.15)).theta)
    for path, codes in before.items():
        change = (after[path] - codes).abs()
        assert 0 < change.double().mean() < 0.5, path
        assert change.max() == 1


@pytest.mark.slow
def test_learning_codes_lowers_the_objective_of_the_deployed_model(case: Case) -> None:
    """One prompt a step: directions that prompts do not share cancel before a code changes."""
    cfg = short(**LEARNED, lr_rounding=0.03, batch=1, epochs=10)
    result = case.calibrate(cfg)
    assert case.loss(result.theta, cfg) < 0.6 * case.loss(case.theta, cfg)


@pytest.mark.parametrize("clipped", [False, True], ids=["full range", "clipped"])
def test_offsets_stay_within_half_a_step_or_where_they_began(case: Case, clipped: bool) -> None:
    start = case.theta.clone()
    for ratio in start.ratio.values():
        ratio.fill_(
            math.log(0.6) if clipped else 0.0
        )  # weights beyond the last code lie further from it than half a step
    begin = case.policy.centre(start).offset
    result = replace(case, theta=start).calibrate(full_batch(codes="learned", epochs=3, lr_rounding=5.0))
    for key, offset in result.theta.offset.items():
        assert (offset >= begin[key].clamp(max=-0.5)).all()
        assert (offset <= begin[key].clamp(min=0.5)).all()
        assert float(offset.abs().median()) == 0.5, "so large a step ends at the bounds"
    assert any(float(offset.abs().max()) > 0.6 for offset in begin.values()) == clipped


def test_offsets_of_the_start_stay_where_codes_are_not_learned(case: Case) -> None:
    start = with_offsets(case.theta.clone(), zero_offsets(case.policy))
    for offset in start.offset.values():
        offset[:, ::3] = 0.7  # as GPTQ's codes, beyond half a step
    result = replace(case, theta=start).calibrate(short(epochs=1))
    assert any(not torch.equal(u, start.smoothing[key]) for key, u in result.theta.smoothing.items())
    assert all(torch.equal(offset, start.offset[key]) for key, offset in result.theta.offset.items())


def test_offsets_take_the_steps_of_adam_written_out(weights_only: Case) -> None:
    """Unclipped gradients, betas 0.9 and 0.98, no epsilon to speak of, the same cosine as the scales."""
    case, steps, rate = weights_only, 3, 0.02
    cfg = full_batch(codes="learned", epochs=steps, lr_rounding=rate, gamma=30.0, normalize="none", micro_batch=6)
    seen = [case.policy.centre(case.theta)]
    result = case.calibrate(cfg, save=lambda progress: seen.append(progress.theta.clone()))
    assert len(seen) == steps + 1
    assert result.history[0]["gradient"] > 1, "that of the scales is clipped"
    items = UpdateSequences(case.policy, case.prompts, case.trajectories, case.states)
    gradients: list[dict[str, np.ndarray]] = []
    for theta in seen[:-1]:
        live = learnable(theta)
        case.policy.attach(live)
        objective(measure(case.policy, items, Targets(case.policy, None)), cfg).backward()
        gradients.append({key: offset.grad.double().numpy() for key, offset in live.offset.items()})  # type: ignore[union-attr]
    rates = [oracles.cosine_rate(rate, step, steps) for step in range(steps)]
    off = count = 0
    for key, begin in seen[0].offset.items():
        expected = begin.double().numpy()
        bounds = np.minimum(expected, -0.5), np.maximum(expected, 0.5)
        for step, move in enumerate(oracles.adam_moves([g[key] for g in gradients], rates, (0.9, 0.98), 1e-12)):
            expected = np.clip(expected + np.where(gradients[0][key] == 0, 0, move), *bounds)
            wrong = np.abs(seen[step + 1].offset[key].double().numpy() - expected) > 0.01 * rate
            off, count = off + int(wrong.sum()), count + wrong.size
        assert np.abs(expected - begin.double().numpy()).max() > 2 * rate
    assert off / count < 0.01  # a gradient that is all noise has no direction to agree on


def test_the_smallest_gradients_of_offsets_still_move_them_by_a_whole_step(weights_only: Case) -> None:
    """An epsilon of 1e-12: Adam's usual 1e-8 is larger than most of these gradients."""
    case, rate, seen = weights_only, 0.02, dict[str, torch.Tensor]()
    cfg = full_batch(codes="learned", epochs=1, lr_rounding=rate, gamma=0.0, anchor=1e-3)
    begin = case.policy.centre(case.theta).offset
    result = case.calibrate(cfg, save=lambda progress: seen.update(progress.moments))
    first, small = len(case.theta.smoothing) + len(case.theta.ratio), 0
    for index, path in enumerate(sorted(begin), start=first):
        gradient = seen[f"{index}/exp_avg"] / 0.1
        small += int(((gradient.abs() > 1e-10) & (gradient.abs() < 1e-8)).sum())
        bounds = begin[path].clamp(max=-0.5), begin[path].clamp(min=0.5)
        expected = torch.clamp(begin[path] - rate * gradient / (gradient.abs() + 1e-12), *bounds)
        torch.testing.assert_close(result.theta.offset[path], expected, rtol=0, atol=1e-3 * rate)
    assert small > 1000


@pytest.mark.parametrize("codes", ["free", "learned"])
def test_without_a_gradient_nothing_moves(case: Case, codes: str) -> None:
    """No weight decay: it would pull smoothing, ratios and offsets to zero."""
    theta = case.theta.clone()
    for index, u in enumerate(theta.smoothing.values()):
        u.copy_(torch.linspace(-0.5, 0.5, len(u)) * (-1) ** index)
    for ratio in theta.ratio.values():
        ratio.fill_(math.log(0.8))
    rates = {"lr_smoothing": 1.0, "lr_step": 1.0, "lr_rounding": 1.0}
    result = replace(case, theta=theta).calibrate(full_batch(codes=codes, epochs=2, gamma=0.0, anchor=0.0, **rates))
    assert [record["loss"] for record in result.history] == [0.0, 0.0]
    expected = (case.policy.centre(theta) if codes == "learned" else theta).tensors()
    for name, tensor in result.theta.tensors().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_the_moments_of_offsets_forget_sooner_than_those_of_scales(case: Case) -> None:
    """After one step they are (1 - beta) times the gradient and its square."""
    moments: dict[str, torch.Tensor] = {}
    case.calibrate(full_batch(**LEARNED, epochs=1), save=lambda progress: moments.update(progress.moments))
    scales = len(case.theta.smoothing) + len(case.theta.ratio)
    for index in range(scales + len(case.theta.ratio)):
        first, second = moments[f"{index}/exp_avg"] / 0.1, moments[f"{index}/exp_avg_sq"]
        torch.testing.assert_close(second, (0.001 if index < scales else 0.02) * first.square(), rtol=1e-4, atol=1e-30)
    assert f"{scales + len(case.theta.ratio)}/exp_avg" not in moments


def test_without_learned_codes_there_are_no_offsets(case: Case) -> None:
    assert not case.calibrate(short()).theta.offset
    settled = case.calibrate(short(codes="settled")).theta
    assert not settled.offset
    assert settled.settled


# Failure


@pytest.mark.parametrize("part", ["smoothing", "ratio"])
def test_a_loss_that_is_not_a_number_is_an_error_a_user_can_read(case: Case, part: str) -> None:
    broken = case.theta.clone()
    next(iter(getattr(broken, part).values())).fill_(math.nan)
    with pytest.raises(OnPTQError, match="not finite"):
        calibrate(case.policy, case.prompts, case.trajectories, case.states, broken, short())
