"""The update: it lowers what it says it lowers, is the same twice, survives interruption, and keeps the best iterate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

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
from onptq.cycle.calibrate import Calibrated, Holdout, Progress, calibrate, objective
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.objective import Targets, block_energy, make_items, measure
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

    def holdout_score(self, theta: Theta, anchor: float = 1.0, response: float = 1.0) -> float:
        """Anchor and mean on-policy KL, weighted, energy-normalized as in training."""
        self.policy.freeze(theta)
        targets, states = Targets(self.policy, None), self.holdout.states
        energy = block_energy(targets, make_items(self.policy, self.prompts, [], None))
        every = states.with_columns(
            critical=np.ones(len(states), np.bool_), weight=np.full(len(states), 1 / len(states), np.float32)
        )
        items = make_items(self.policy, self.holdout.prompts, self.holdout.trajectories, every)
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


# Terms of like size and steps large enough to see
PLAIN = {
    "pair": 1.0,
    "response": 1.0,
    "response_over": "critical",
    "codes": "free",
    "lr_smoothing": 2e-3,
    "lr_step": 5e-3,
    "checkpointing": False,
}


def full_batch(**fields: object) -> CalibrateConfig:
    return CalibrateConfig(**{**PLAIN, "batch": 6, "micro_batch": 3, "epochs": 8, **fields})


def short(**fields: object) -> CalibrateConfig:
    return CalibrateConfig(**{**PLAIN, "batch": 2, "micro_batch": 2, "epochs": 2, **fields})


def same(a: Theta, b: Theta) -> bool:
    left, right = a.tensors(), b.tensors()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def close(a: Theta, b: Theta) -> bool:
    """Up to the few entries whose gradient is so near zero that rounding decides the direction of Adam's step."""
    left, right = (torch.cat([p.flatten() for p in theta.tensors().values()]) for theta in (a, b))
    return bool(((left - right).abs() > 5e-5).double().mean() < 0.01)


def test_the_start_is_not_touched(bed: Bed) -> None:
    before = bed.theta.clone()
    for codes in ("free", "settled", "learned"):
        result = bed.calibrate(short(codes=codes))
        assert same(bed.theta, before)
        assert not same(result.theta, before)
        parts = result.theta.smoothing, result.theta.ratio, result.theta.offset
        assert not any(tensor.requires_grad for part in parts for tensor in part.values())


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
    theta = learnable(bed.theta)
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


@pytest.mark.parametrize("codes", ["free", "settled", "learned"])
@pytest.mark.parametrize("held_out", [False, True], ids=["", "holdout"])
@pytest.mark.parametrize("at", [1, 4])
def test_an_interrupted_update_ends_where_the_uninterrupted_one_does(
    bed: Bed, tmp_path: Path, at: int, held_out: bool, codes: str
) -> None:
    cfg, options = short(codes=codes, evaluations=3), {"holdout": bed.holdout if held_out else None, "seed": 5}
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
    reversed_order = Theta(*(dict(reversed(part.items())) for part in (loaded.smoothing, loaded.linears)))
    cfg = short(gamma=30.0)  # gradients long enough that clipping adds up their lengths
    expected = bed.calibrate(cfg)
    assert max(record["gradient"] for record in expected.history) > 1
    for theta in (loaded, reversed_order):
        result = calibrate(bed.policy, bed.prompts, bed.trajectories, bed.states, theta, cfg)
        assert result.history == expected.history
        assert same(result.theta, expected.theta)


@pytest.mark.parametrize("codes", ["settled", "learned"])
def test_progress_survives_the_disk_bit_for_bit(bed: Bed, tmp_path: Path, codes: str) -> None:
    kept: list[Progress] = []
    bed.calibrate(short(epochs=1, codes=codes), holdout=bed.holdout, save=kept.append)
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
    never = Progress(bed.theta)
    never.save(file)
    assert Progress.load(file, "cpu").best_score == math.inf


# The best iterate


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.2, 10.0), (0.0, 3.0)], ids=str)
def test_the_kept_iterate_is_the_best_on_held_out_prompts_as_the_objective_weighs_them(
    bed: Bed, weights: tuple[float, float]
) -> None:
    anchor, response = weights
    result = bed.calibrate(full_batch(evaluations=8, anchor=anchor, response=response), holdout=bed.holdout)
    scores = {record["step"]: record["holdout"] for record in result.history}
    scores[0] = bed.holdout_score(bed.theta, anchor, response)
    assert len(scores) == 9
    assert result.best_step == min(scores, key=lambda step: scores[step])
    assert bed.holdout_score(result.theta, anchor, response) == pytest.approx(min(scores.values()), rel=1e-4)
    assert bed.holdout_score(result.theta, anchor, response) <= scores[0] * (1 + 1e-6)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 4.0), (0.0, 1.0)], ids=str)
def test_the_held_out_score_is_the_weighted_anchor_and_the_mean_kl(
    weights_only: Bed, weights: tuple[float, float]
) -> None:
    """The KL is what Compare wrote into the bank, a plain mean of it; gamma and the critical states have no say."""
    bed, (anchor, response) = weights_only, weights
    still = {"lr_smoothing": 0.0, "lr_step": 0.0, "epochs": 1, "anchor": anchor, "response": response}
    policy, targets = bed.policy, Targets(bed.policy, None)
    policy.freeze(bed.theta)
    energy = block_energy(targets, make_items(policy, bed.prompts, [], None))
    context = make_items(policy, bed.holdout.prompts, [], None)
    expected = anchor * measure(policy, context, targets, energy).floats()["anchor"]
    expected += response * float(bed.holdout.states.kl.mean())
    for cfg in (full_batch(**still), full_batch(**still, gamma=0.0), full_batch(**still, response_over="visited")):
        (record,) = bed.calibrate(cfg, holdout=bed.holdout).history
        assert record["holdout"] == pytest.approx(expected, rel=1e-4)


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


# The response loss over visited states


def test_over_visited_states_the_response_loss_is_the_mean_kl_of_the_bank(weights_only: Bed) -> None:
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


def test_gamma_zero_hears_nothing_of_visited_states(bed: Bed) -> None:
    visited = bed.calibrate(short(gamma=0.0, response_over="visited"))
    assert same(visited.theta, bed.calibrate(short(gamma=0.0)).theta)
    assert all(record["response"] == 0 for record in visited.history)


# Learned codes

LEARNED = {"codes": "learned", "lr_smoothing": 0.0, "lr_step": 0.0}  # and nothing but codes


def test_learned_codes_begin_as_the_starts_own(bed: Bed) -> None:
    kept: list[Progress] = []
    still = full_batch(**LEARNED, lr_rounding=0.0, epochs=1)
    bed.calibrate(still, save=lambda progress: kept.append(replace(progress, theta=progress.theta.clone())))
    centred = bed.policy.centre(bed.theta)
    assert same(kept[0].theta, centred)
    free = bed.calibrate(full_batch(lr_smoothing=0.0, lr_step=0.0, epochs=1))
    assert bed.calibrate(still).history[0]["loss"] == pytest.approx(free.history[0]["loss"], rel=1e-6)


def test_a_code_changes_only_when_the_evidence_for_it_adds_up(bed: Bed) -> None:
    """Eight steps of a hundredth leave every weight within half a step of its code; eight that are larger do not."""
    before, begin = bed.codes(bed.theta), bed.policy.centre(bed.theta).offset
    slow = bed.calibrate(full_batch(**LEARNED))
    assert not any(torch.equal(offset, slow.theta.offset[key]) for key, offset in begin.items())
    after = bed.codes(slow.theta)
    assert all(torch.equal(codes, after[path]) for path, codes in before.items())
    after = bed.codes(bed.calibrate(full_batch(**LEARNED, lr_rounding=0.15)).theta)
    for path, codes in before.items():
        change = (after[path] - codes).abs()
        assert 0 < change.double().mean() < 0.5, path
        assert change.max() == 1


def test_learning_codes_lowers_the_objective_of_the_deployed_model(bed: Bed) -> None:
    """One prompt a step: directions that prompts do not share cancel before a code changes."""
    cfg = short(**LEARNED, lr_rounding=0.03, batch=1, epochs=10)
    result = bed.calibrate(cfg)
    assert bed.loss(result.theta, cfg) < 0.6 * bed.loss(bed.theta, cfg)


@pytest.mark.parametrize("clipped", [False, True], ids=["full range", "clipped"])
def test_offsets_stay_within_half_a_step_or_where_they_began(bed: Bed, clipped: bool) -> None:
    start = bed.theta.clone()
    for ratio in start.ratio.values():
        ratio.fill_(
            math.log(0.6) if clipped else 0.0
        )  # weights beyond the last code lie further from it than half a step
    begin = bed.policy.centre(start).offset
    result = replace(bed, theta=start).calibrate(full_batch(codes="learned", epochs=3, lr_rounding=5.0))
    for key, offset in result.theta.offset.items():
        assert (offset >= begin[key].clamp(max=-0.5)).all()
        assert (offset <= begin[key].clamp(min=0.5)).all()
        assert float(offset.abs().median()) == 0.5, "so large a step ends at the bounds"
    assert any(float(offset.abs().max()) > 0.6 for offset in begin.values()) == clipped


def test_offsets_of_the_start_stay_where_codes_are_not_learned(bed: Bed) -> None:
    start = with_offsets(bed.theta.clone(), zero_offsets(bed.policy))
    for offset in start.offset.values():
        offset[:, ::3] = 0.7  # as GPTQ's codes, beyond half a step
    result = replace(bed, theta=start).calibrate(short(epochs=1))
    assert any(not torch.equal(u, start.smoothing[key]) for key, u in result.theta.smoothing.items())
    assert all(torch.equal(offset, start.offset[key]) for key, offset in result.theta.offset.items())


def test_offsets_take_the_steps_of_adam_written_out(weights_only: Bed) -> None:
    """Unclipped gradients, betas 0.9 and 0.98, no epsilon to speak of, the same cosine as the scales."""
    bed, steps, rate = weights_only, 3, 0.02
    cfg = full_batch(codes="learned", epochs=steps, lr_rounding=rate, gamma=30.0, normalize="none", micro_batch=6)
    seen = [bed.policy.centre(bed.theta)]
    result = bed.calibrate(cfg, save=lambda progress: seen.append(progress.theta.clone()))
    assert len(seen) == steps + 1
    assert result.history[0]["gradient"] > 1, "that of the scales is clipped"
    items = make_items(bed.policy, bed.prompts, bed.trajectories, bed.states)
    gradients: list[dict[str, np.ndarray]] = []
    for theta in seen[:-1]:
        live = learnable(theta)
        bed.policy.attach(live)
        objective(measure(bed.policy, items, Targets(bed.policy, None)), cfg).backward()
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


def test_the_moments_of_offsets_forget_sooner_than_those_of_scales(bed: Bed) -> None:
    """After one step they are (1 - beta) times the gradient and its square."""
    moments: dict[str, torch.Tensor] = {}
    bed.calibrate(full_batch(**LEARNED, epochs=1), save=lambda progress: moments.update(progress.moments))
    scales = len(bed.theta.smoothing) + len(bed.theta.ratio)
    for index in range(scales + len(bed.theta.ratio)):
        first, second = moments[f"{index}/exp_avg"] / 0.1, moments[f"{index}/exp_avg_sq"]
        torch.testing.assert_close(second, (0.001 if index < scales else 0.02) * first.square(), rtol=1e-4, atol=1e-30)
    assert f"{scales + len(bed.theta.ratio)}/exp_avg" not in moments


def test_without_learned_codes_there_are_no_offsets(bed: Bed) -> None:
    assert not bed.calibrate(short()).theta.offset
    settled = bed.calibrate(short(codes="settled")).theta
    assert not settled.offset
    assert settled.settled


# Failure


@pytest.mark.parametrize("part", ["smoothing", "ratio"])
def test_a_loss_that_is_not_a_number_is_an_error_a_user_can_read(bed: Bed, part: str) -> None:
    broken = bed.theta.clone()
    next(iter(getattr(broken, part).values())).fill_(math.nan)
    with pytest.raises(OnPTQError, match="not finite"):
        calibrate(bed.policy, bed.prompts, bed.trajectories, bed.states, broken, short())
