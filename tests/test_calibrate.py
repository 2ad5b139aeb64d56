"""The update: it lowers what it says it lowers, is the same twice, survives interruption, and keeps the best iterate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Tiny

from onptq.bank import States, Trajectory
from onptq.cycle.branch import branch
from onptq.cycle.calibrate import Calibrated, Holdout, Progress, calibrate, objective
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.objective import Targets, block_energy, make_items, measure
from onptq.cycle.prefixes import Prefixes
from onptq.cycle.risk import score, select
from onptq.errors import OnPTQError
from onptq.models.encoding import EncodedPrompt
from onptq.models.loading import find_source
from onptq.models.processing import PromptProcessor
from onptq.policy import Policy
from onptq.quantizer.theta import SMOOTHING_REACH, Theta
from onptq.recipe import CalibrateConfig, Recipe, RiskConfig, SelectConfig
from onptq.zoo.random import write_random


@dataclass(frozen=True)
class Bed:
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
        items = make_items(self.policy, self.prompts, self.trajectories, self.states)
        targets = Targets(self.policy, None)
        energy = block_energy(targets, items) if cfg.normalize == "energy" else None
        return float(objective(measure(self.policy, items, targets, energy), cfg))

    def holdout_score(self, theta: Theta) -> float:
        """Anchor plus mean on-policy KL, energy-normalized as in training."""
        self.policy.freeze(theta)
        targets, states = Targets(self.policy, None), self.holdout.states
        energy = block_energy(targets, make_items(self.policy, self.prompts, [], None))
        every = states.with_columns(
            critical=np.ones(len(states), np.bool_), weight=np.full(len(states), 1 / len(states), np.float32)
        )
        items = make_items(self.policy, self.holdout.prompts, self.holdout.trajectories, every)
        terms = measure(self.policy, items, targets, energy).floats()
        return terms["anchor"] + terms["response"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("small")
    write_random("qwen2.5-vl", folder, prompts=8, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512, image_size=56)
    source = find_source(folder)
    return Tiny(folder, source, PromptProcessor.from_folder(folder, source.family, source.config))


@pytest.fixture(scope="module")
def bed(small: Tiny) -> Bed:
    return make_bed(small, "W4A8")


@pytest.fixture(scope="module")
def weights_only(small: Tiny) -> Bed:
    return make_bed(small, "W4A16")


def make_bed(small: Tiny, scheme: str) -> Bed:
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
    return Bed(policy, encoded[:6], banks[0][0], states, theta, Holdout(encoded[6:], *banks[1]))


def full_batch(**fields: object) -> CalibrateConfig:
    return CalibrateConfig(**{"batch": 6, "micro_batch": 3, "epochs": 8, "checkpointing": False, **fields})


def short(**fields: object) -> CalibrateConfig:
    return CalibrateConfig(**{"batch": 2, "micro_batch": 2, "epochs": 2, "checkpointing": False, **fields})


def same(a: Theta, b: Theta) -> bool:
    left, right = a.tensors(), b.tensors()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def close(a: Theta, b: Theta) -> bool:
    """Up to the few entries whose gradient is so near zero that rounding decides the direction of Adam's step."""
    left, right = (torch.cat([p.detach().flatten() for p in theta.parameters()]) for theta in (a, b))
    return bool(((left - right).abs() > 5e-5).double().mean() < 0.01)


def test_the_start_is_not_touched(bed: Bed) -> None:
    before = bed.theta.clone()
    result = bed.calibrate(short(rounding=True))
    assert same(bed.theta, before)
    assert not same(result.theta, before)
    assert not any(parameter.requires_grad for parameter in result.theta.parameters())


# It lowers the objective


@pytest.mark.parametrize("normalize", ["energy", "none"])
@pytest.mark.parametrize("gamma", [0.0, 0.2, 1.0])
def test_a_few_steps_lower_the_objective_of_the_deployed_model(bed: Bed, normalize: str, gamma: float) -> None:
    cfg = full_batch(normalize=normalize, gamma=gamma)
    result = bed.calibrate(cfg)
    start, end = bed.loss(bed.theta, cfg), bed.loss(result.theta, cfg)
    assert result.history[0]["loss"] == pytest.approx(start, rel=2e-2)
    assert end < (0.95 if gamma == 0 else 0.6) * start


@pytest.mark.parametrize("term", ["hidden", "pair", "response"])
def test_each_critical_term_alone_can_be_lowered(bed: Bed, term: str) -> None:
    others = {name: 0.0 for name in ("anchor", "hidden", "pair", "response") if name != term}
    history = bed.calibrate(full_batch(gamma=1.0, **others)).history
    assert min(record[term] for record in history) < 0.95 * history[0][term]
    assert history[-1]["loss"] == pytest.approx(history[-1][term], rel=1e-6)


def test_the_first_step_is_adamw_on_the_clipped_gradient(weights_only: Bed) -> None:
    bed = weights_only
    cfg = full_batch(epochs=1, gamma=30.0, normalize="none")
    theta = bed.theta.clone().requires_grad_()
    bed.policy.attach(theta)
    items = make_items(bed.policy, bed.prompts, bed.trajectories, bed.states)
    objective(measure(bed.policy, items, Targets(bed.policy, None)), cfg).backward()
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
        parameter.grad /= norm  # type: ignore[operator]
    optimizer.step()
    theta.project_(bed.theta)

    kept: list[Progress] = []
    result = bed.calibrate(cfg, save=kept.append)
    assert result.history[0]["gradient"] == pytest.approx(norm, rel=1e-4)
    assert close(theta, result.theta)
    first = [moment for name, moment in kept[0].moments.items() if name.endswith("exp_avg")]
    length = math.sqrt(sum(float(moment.square().sum()) for moment in first))
    assert length == pytest.approx(0.1, rel=1e-3), "a tenth of a gradient of length 1"


def test_the_learning_rate_falls_to_a_tenth_along_a_cosine(bed: Bed) -> None:
    """Adam moves every entry by about its rate, so that the travel of the ratios shows the rate."""
    steps: list[torch.Tensor] = []

    def keep(progress: Progress) -> None:
        steps.append(torch.cat([c.flatten() for c in progress.theta.clone().ratio.values()]))

    result = bed.calibrate(full_batch(epochs=10), save=keep)
    travel = torch.stack(steps).diff(dim=0).abs().amax(1)  # of steps 2..10
    rate = [5e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / 10))) for step in range(1, 10)]
    assert len(result.history) == 10
    assert all(float(moved) <= 1.8 * limit for moved, limit in zip(travel, rate, strict=True))
    assert float(travel[-1]) < 0.35 * float(travel[0])


def test_a_violent_update_stays_in_the_trust_region(bed: Bed) -> None:
    result = bed.calibrate(full_batch(epochs=6, lr_smoothing=2.0, lr_step=2.0))
    for key, u in result.theta.smoothing.items():
        assert (u - bed.theta.smoothing[key]).abs().max() <= SMOOTHING_REACH + 1e-6
    for ratio in result.theta.ratio.values():
        assert ratio.min() >= math.log(0.4) - 1e-6
        assert ratio.max() <= 0


# Batches: with activations in full precision, where the shape of a batch decides no rounding


@pytest.mark.parametrize("normalize", ["energy", "none"])
def test_scaled_minibatches_average_to_the_full_batch(weights_only: Bed, normalize: str) -> None:
    still = {"epochs": 1, "lr_smoothing": 0.0, "lr_step": 0.0, "normalize": normalize}
    (full,) = weights_only.calibrate(full_batch(**still)).history
    parts = weights_only.calibrate(short(**still)).history
    assert len(parts) == 3
    assert len({record["loss"] for record in parts}) == 3
    for name in ("anchor", "hidden", "pair", "response", "loss"):
        assert np.mean([record[name] for record in parts]) == pytest.approx(full[name], rel=1e-5)


def test_micro_batches_and_checkpointing_cost_memory_and_change_nothing_else(weights_only: Bed) -> None:
    whole = weights_only.calibrate(full_batch(epochs=2, micro_batch=6))
    for other in ({"micro_batch": 1}, {"micro_batch": 4, "checkpointing": True}):
        result = weights_only.calibrate(full_batch(epochs=2, **other))
        for mine, theirs in zip(whole.history, result.history, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3)
        assert close(whole.theta, result.theta)


# The static control


def test_gamma_zero_is_the_static_control_bit_for_bit(bed: Bed) -> None:
    fields = {"batch": 2, "micro_batch": 2, "epochs": 2}
    static = Recipe.preset("paper", {"method": "static", "calibrate": fields}).calibrate
    assert static.gamma == 0
    control = calibrate(bed.policy, bed.prompts, [], None, bed.theta, static)
    onptq = Recipe.preset("paper", {"calibrate": {**fields, "gamma": 0}}).calibrate
    for trajectories, states in ((bed.trajectories, bed.states), (bed.trajectories, None), ([], None)):
        result = calibrate(bed.policy, bed.prompts, trajectories, states, bed.theta, onptq)
        assert same(result.theta, control.theta)
        assert result.history == control.history
    other = calibrate(bed.policy, bed.prompts, bed.trajectories, bed.states, bed.theta, short(normalize="none"))
    assert not same(other.theta, control.theta)


def test_an_empty_critical_set_is_an_anchor_only_update(bed: Bed) -> None:
    zero = np.zeros(len(bed.states), np.float32)
    nothing = bed.states.with_columns(critical=zero.astype(np.bool_), weight=zero)
    result = calibrate(bed.policy, bed.prompts, bed.trajectories, nothing, bed.theta, short())
    assert same(result.theta, bed.calibrate(short(gamma=0)).theta)


# Seeds


def test_the_same_seed_gives_the_same_bits_and_another_seed_another_order(bed: Bed) -> None:
    first, again, other = (bed.calibrate(short(), seed=seed) for seed in (3, 3, 4))
    assert same(first.theta, again.theta)
    assert first.history == again.history
    assert not same(first.theta, other.theta)
    assert first.history[0]["loss"] != other.history[0]["loss"]


def test_every_epoch_visits_every_prompt_once_in_its_own_order(bed: Bed) -> None:
    still = short(batch=1, epochs=2, lr_smoothing=0.0, lr_step=0.0, gamma=0.0)
    anchors = [record["anchor"] for record in bed.calibrate(still).history]
    epochs = anchors[:6], anchors[6:]
    assert sorted(epochs[0]) == pytest.approx(sorted(epochs[1]), rel=1e-6)
    assert len(set(epochs[0])) == 6
    assert epochs[0] != pytest.approx(epochs[1], rel=1e-6)


# Interruption


class Killed(Exception):
    pass


@pytest.mark.parametrize("rounding", [False, True], ids=["", "rounding"])
@pytest.mark.parametrize("held_out", [False, True], ids=["", "holdout"])
@pytest.mark.parametrize("at", [1, 4])
def test_an_interrupted_update_ends_where_the_uninterrupted_one_does(
    bed: Bed, tmp_path: Path, at: int, held_out: bool, rounding: bool
) -> None:
    cfg, options = short(rounding=rounding, evaluations=3), {"holdout": bed.holdout if held_out else None, "seed": 5}
    whole = bed.calibrate(cfg, **options)
    assert len(whole.history) == 6
    file = tmp_path / "progress.safetensors"

    def die(progress: Progress) -> None:
        if progress.step == at:
            progress.save(file)
            raise Killed

    with pytest.raises(Killed):
        bed.calibrate(cfg, **options, save=die)
    bed.policy.freeze(bed.theta)  # another process knows nothing of the first one's Q
    resumed = bed.calibrate(cfg, **options, progress=Progress.load(file, "cpu"))
    assert same(resumed.theta, whole.theta)
    assert resumed.best_step == whole.best_step
    assert resumed.history == whole.history[at:]


def test_an_update_that_was_saved_at_its_end_has_nothing_left_to_do(bed: Bed, tmp_path: Path) -> None:
    file = tmp_path / "progress.safetensors"
    whole = bed.calibrate(short(), holdout=bed.holdout, save=lambda progress: progress.save(file))
    resumed = bed.calibrate(short(), holdout=bed.holdout, progress=Progress.load(file, "cpu"))
    assert same(resumed.theta, whole.theta)
    assert resumed.best_step == whole.best_step
    assert resumed.history == []


def test_an_update_does_not_depend_on_the_order_in_which_theta_was_read(bed: Bed, tmp_path: Path) -> None:
    """A second round starts from memory, or after an interruption from the disk, which keeps another order of names."""
    bed.theta.save(tmp_path / "theta.safetensors")
    loaded = Theta.load(tmp_path / "theta.safetensors")
    reversed_order = Theta(*(dict(reversed(part.items())) for part in (loaded.smoothing, loaded.ratio, loaded.offset)))
    cfg = short(gamma=30.0)  # gradients long enough that clipping adds up their lengths
    expected = bed.calibrate(cfg)
    assert max(record["gradient"] for record in expected.history) > 1
    for theta in (loaded, reversed_order):
        result = calibrate(bed.policy, bed.prompts, bed.trajectories, bed.states, theta, cfg)
        assert result.history == expected.history
        assert same(result.theta, expected.theta)


def test_progress_survives_the_disk_bit_for_bit(bed: Bed, tmp_path: Path) -> None:
    kept: list[Progress] = []
    bed.calibrate(short(epochs=1, rounding=True), holdout=bed.holdout, save=kept.append)
    progress, file = kept[-1], tmp_path / "progress.safetensors"
    progress.save(file)
    loaded = Progress.load(file, "cpu")
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
    never = Progress(bed.theta)
    never.save(file)
    assert Progress.load(file, "cpu").best_score == math.inf


# The best iterate


def test_the_kept_iterate_is_the_best_on_held_out_prompts(bed: Bed) -> None:
    result = bed.calibrate(full_batch(evaluations=8), holdout=bed.holdout)
    scores = {record["step"]: record["holdout"] for record in result.history}
    scores[0] = bed.holdout_score(bed.theta)
    assert len(scores) == 9
    assert result.best_step == min(scores, key=lambda step: scores[step])
    assert bed.holdout_score(result.theta) == pytest.approx(min(scores.values()), rel=1e-4)
    assert bed.holdout_score(result.theta) <= scores[0] * (1 + 1e-6)


def test_an_update_that_only_harms_returns_the_start(bed: Bed) -> None:
    result = bed.calibrate(short(lr_smoothing=1.0, lr_step=1.0), holdout=bed.holdout)
    assert result.best_step == 0
    assert same(result.theta, bed.theta)
    assert all(record["holdout"] > bed.holdout_score(bed.theta) for record in result.history if "holdout" in record)


def test_held_out_prompts_are_evaluated_as_often_as_asked_and_at_the_end(bed: Bed) -> None:
    result = bed.calibrate(short(evaluations=2), holdout=bed.holdout)
    assert [record["step"] for record in result.history if "holdout" in record] == [3, 6]
    result = bed.calibrate(short(evaluations=100), holdout=bed.holdout)
    assert all("holdout" in record for record in result.history)


def test_keep_last_returns_the_last_iterate_whatever_the_held_out_prompts_say(bed: Bed) -> None:
    cfg = short(lr_smoothing=1.0, lr_step=1.0, keep="last")
    result, alone = bed.calibrate(cfg, holdout=bed.holdout), bed.calibrate(cfg)
    assert same(result.theta, alone.theta)
    assert result.best_step == len(result.history) == 6
    assert not same(result.theta, bed.theta)


def test_held_out_prompts_choose_but_do_not_teach(bed: Bed) -> None:
    with_holdout, without = bed.calibrate(short(), holdout=bed.holdout), bed.calibrate(short())
    stripped = [{name: value for name, value in record.items() if name != "holdout"} for record in with_holdout.history]
    assert stripped == without.history


# Rounding offsets


def test_rounding_offsets_stay_within_half_a_step_and_move_codes(bed: Bed) -> None:
    result = bed.calibrate(full_batch(rounding=True))
    offsets = torch.cat([offset.flatten() for offset in result.theta.offset.values()])
    assert offsets.abs().max() <= 0.5
    assert offsets.abs().max() > 0.2
    bed.policy.freeze(result.theta)
    with_offsets = {path: piece.codes for path, piece in bed.policy.folded() if hasattr(piece, "codes")}
    bed.policy.freeze(Theta(result.theta.smoothing, result.theta.ratio))
    nearest = {path: piece.codes for path, piece in bed.policy.folded() if hasattr(piece, "codes")}
    assert with_offsets.keys() == result.theta.offset.keys()
    for path, codes in with_offsets.items():
        change = (codes.int() - nearest[path].int()).abs()
        assert 0 < change.double().mean() < 0.5, path
        assert change.max() == 1


def test_offsets_of_the_start_stay_where_nothing_is_said_about_rounding(bed: Bed) -> None:
    start = bed.theta.clone()
    start.add_offsets(bed.policy.structure.blocks)
    for offset in start.offset.values():
        offset[:, ::3] = 0.7  # as GPTQ's codes, beyond half a step
    result = replace(bed, theta=start).calibrate(short(epochs=1))
    assert any(not torch.equal(u, start.smoothing[key]) for key, u in result.theta.smoothing.items())
    assert all(torch.equal(offset, start.offset[key]) for key, offset in result.theta.offset.items())


def test_offsets_take_sign_steps_that_shrink_to_nothing(bed: Bed) -> None:
    seen: list[torch.Tensor] = []

    def keep(progress: Progress) -> None:
        seen.append(torch.cat([v.flatten() for v in progress.theta.clone().offset.values()]))

    bed.calibrate(full_batch(rounding=True, epochs=4), save=keep)
    moves = torch.stack([torch.zeros_like(seen[0]), *seen]).diff(dim=0).abs()
    for step, move in enumerate(moves):
        expected = (1 / 4) * (1 - step / 4)
        stopped = (move < 1e-7) | (torch.stack(seen)[step].abs() == 0.5)  # no gradient, or the end of the range
        torch.testing.assert_close(move[~stopped], torch.full_like(move[~stopped], expected))
    assert float(seen[-1].abs().max()) == 0.5


def test_a_larger_step_of_the_offsets_is_clamped(bed: Bed) -> None:
    result = bed.calibrate(full_batch(rounding=True, epochs=2, lr_rounding=5.0))
    assert max(float(offset.abs().max()) for offset in result.theta.offset.values()) == 0.5


def test_without_rounding_there_are_no_offsets(bed: Bed) -> None:
    assert not bed.calibrate(short()).theta.offset


# Failure


@pytest.mark.parametrize("part", ["smoothing", "ratio"])
def test_a_loss_that_is_not_a_number_is_an_error_a_user_can_read(bed: Bed, part: str) -> None:
    broken = bed.theta.clone()
    next(iter(getattr(broken, part).values())).fill_(math.nan)
    with pytest.raises(OnPTQError, match="not finite"):
        calibrate(bed.policy, bed.prompts, bed.trajectories, bed.states, broken, short())
