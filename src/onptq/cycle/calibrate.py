"""Calibrate (BasePTQUpdate): a short end-to-end update of theta on the objective, inside a trust region."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from onptq.bank import States, Trajectory
from onptq.cycle.guards import require_finite_loss, without_finite_gradient
from onptq.cycle.objective import (
    Targets,
    Terms,
    UpdateSequence,
    UpdateSequences,
    block_energy,
    measure,
    pair_strength,
)
from onptq.engine.budget import BatchBudget
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.ranks import ALONE, Ranks
from onptq.recipe import CalibrateConfig

GRADIENT_NORM = 1.0
FINAL_RATE = 0.1  # the cosine schedule ends here
OFFSET_ADAM = {"betas": (0.9, 0.98), "eps": 1e-12}  # gradients of single weights are small, and early ones are noise


@dataclass(frozen=True)
class Holdout:
    """Prompts that no update sees, with Q's rollouts when the round begins. They choose the iterate."""

    prompts: Sequence[EncodedPrompt]
    trajectories: Sequence[Trajectory]
    states: States


@dataclass
class Progress:
    """The state of an update, from which an interrupted one continues with the same bits.

    A file of it has no settled codes: they never change, and `take_codes` brings them back."""

    theta: Theta
    step: int = 0
    moments: dict[str, Tensor] = field(default_factory=dict)
    best: Theta | None = None
    best_score: float = math.inf
    best_step: int = 0
    rate: float = 1.0  # factor of the learning rates, halved by every step back

    def save(self, path: Path) -> None:
        thetas = {"theta": self.theta} | ({} if self.best is None else {"best": self.best})
        tensors = {
            f"{part}/{name}": tensor
            for part, theta in thetas.items()
            for name, tensor in theta.tensors().items()
            if not name.startswith(("levels/", "step/"))
        }
        tensors |= {f"moments/{name}": tensor for name, tensor in self.moments.items()}
        numbers = {"step": self.step, "best_step": self.best_step, "best_score": self.best_score}
        numbers |= {} if self.rate == 1 else {"rate": self.rate}
        save_file(
            {name: tensor.cpu() for name, tensor in tensors.items()}, path, {key: repr(n) for key, n in numbers.items()}
        )

    @classmethod
    def load(cls, path: Path, device: torch.device | str) -> Progress:
        parts: dict[str, dict[str, Tensor]] = {"theta": {}, "best": {}, "moments": {}}
        with safe_open(path, "pt", device=str(device)) as file:
            numbers = file.metadata()
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                part, key = name.split("/", 1)
                parts[part][key] = file.get_tensor(name)
        return cls(
            theta=Theta.of_tensors(parts["theta"]),
            step=int(numbers["step"]),
            moments=parts["moments"],
            best=Theta.of_tensors(parts["best"]) if parts["best"] else None,
            best_score=float(numbers["best_score"]),
            best_step=int(numbers["best_step"]),
            rate=float(numbers.get("rate", 1.0)),
        )

    def step_back(self) -> None:
        """Go on from the best theta so far, in smaller steps."""
        assert self.best is not None
        self.theta.copy_(self.best)
        self.rate /= 2

    def take_codes(self, origin: Theta) -> None:
        """Take the settled codes of the theta that the update began from."""
        for theta in (self.theta, self.best or self.theta):
            for path, settled in origin.settled.items():
                theta.linears[path] = replace(settled, ratio=theta.linears[path].ratio)


@dataclass(frozen=True)
class Calibrated:
    theta: Theta
    history: list[dict[str, float]]
    best_step: int


def calibrate(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    trajectories: Sequence[Trajectory],
    states: States | None,
    theta: Theta,
    cfg: CalibrateConfig,
    *,
    holdout: Holdout | None = None,
    seed: int = 0,
    target_budget: int | None = None,
    batch_budget: BatchBudget | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    save: Callable[[Progress], None] = lambda progress: None,
    log: Callable[[dict[str, float]], None] = lambda record: None,
) -> Calibrated:
    """theta^(k+1) from theta^(k), updated on the critical states of `states`; None, or gamma = 0, is the static
    control.

    `batch_budget` is the number of prompts that go through the model at once, by default `cfg.micro_batch`. The prompts of
    a step are shared among the `ranks`, and their gradients summed."""
    if cfg.codes == "settled" and not theta.settled:
        theta = policy.settle(theta)
    if cfg.codes == "learned":
        theta = policy.centre(theta)
    batches = [batch for epoch in range(cfg.epochs) for batch in _batches(len(prompts), cfg.batch, seed + epoch)]
    progress = progress or Progress(theta.clone())
    progress.take_codes(theta)
    update = _Update(progress.theta, theta, cfg, len(batches), progress.moments)
    policy.attach(progress.theta)  # before the targets: they take the place of Q's folded weights

    critical = states if cfg.gamma > 0 else None
    if critical is not None and cfg.pair_matched:
        cfg = cfg.model_copy(update={"pair": cfg.pair * pair_strength(critical)})
    items = UpdateSequences(
        policy,
        prompts,
        trajectories,
        critical,
        modality_balanced=cfg.modality_balanced,
        every_response=cfg.response_over == "visited",
        consequence=cfg.consequence,
    )
    targets = Targets(policy, target_budget)
    energy = block_energy(targets, items, ranks) if cfg.normalize == "energy" else None
    batch_budget = batch_budget or BatchBudget(cfg.micro_batch, "prompts")
    judge = None
    if holdout is not None and cfg.keep != "last":
        judge = _Judge(policy, holdout, targets, energy, cfg, batch_budget, ranks)
    history: list[dict[str, float]] = []
    if judge is not None and progress.step == 0:
        judge.consider(progress)
    interval = max(1, len(batches) // cfg.evaluations)
    for step in range(progress.step, len(batches)):
        chosen = [items[index] for index in ranks.shares(batches[step], cfg.micro_batch)]
        scale = len(items) / len(batches[step])
        sums = batch_budget.fit(partial(_accumulate, policy, chosen, scale, targets, energy, cfg, update))
        require_finite_loss(_figures(sums, cfg), policy, [item.sequence for item in chosen], step + 1)
        ranks.sum_([*update.gradients(), *sums.named().values()])
        terms = _figures(sums, cfg)
        gradient = update(step, progress.rate)
        record = {"step": step + 1, **terms, "gradient": gradient}
        progress.step, progress.moments = step + 1, update.moments()
        if judge is not None and ((step + 1) % interval == 0 or step + 1 == len(batches)):
            record["holdout"] = judge.consider(progress)
            if cfg.rollback is not None and not record["holdout"] <= progress.best_score * (1 + cfg.rollback):
                progress.step_back()
                update.forget(progress.moments)
                record["rollback"] = progress.best_step
        history.append(record)
        log(record)
        save(progress)
    best = progress.best if progress.best is not None else progress.theta
    return Calibrated(best.clone(), history, progress.best_step if progress.best else len(batches))


def _accumulate(
    policy: Policy,
    items: Sequence[UpdateSequence],
    scale: float,
    targets: Targets,
    energy: Tensor | None,
    cfg: CalibrateConfig,
    update: _Update,
    size: int,
) -> Terms:
    """The terms of an unbiased estimate of the objective, sums over a batch times `scale` = N / |B|; their gradients are
    accumulated.

    `size` items go through the model at a time."""
    update.optimizer.zero_grad()  # an attempt that did not fit may have left some
    sums = Terms.zero(cfg.terms, policy)
    for start in range(0, len(items), size):
        with torch.enable_grad():
            chunk = items[start : start + size]
            terms = measure(
                policy,
                chunk,
                targets,
                energy,
                added=cfg.terms,
                checkpointed=cfg.checkpointing or policy.sharded is not None,
            )
            loss = scale * objective(terms, cfg)
        with policy.speaking("Q"):  # checkpointed blocks run again inside backward
            loss.backward()
        sums = sums + terms.scaled(scale)
    return sums


def _figures(terms: Terms, cfg: CalibrateConfig) -> dict[str, float]:
    return terms.floats() | {"loss": float(objective(terms, cfg))}


def objective(terms: Terms, cfg: CalibrateConfig) -> Tensor:
    """Eqs. 12-13, with a weight for each term so that any can be removed, and the terms that a recipe adds."""
    critical = cfg.hidden * terms.hidden + cfg.pair * terms.pair + cfg.response * terms.response
    for name, value in terms.added.items():
        critical = critical + cfg.terms[name] * value
    return cfg.anchor * terms.anchor + cfg.gamma * critical


def order_seed(seed: int, round_: int) -> int:
    """The seed of a round's first epoch; later epochs count on from it. No two runs or rounds share an order."""
    return 1_000_000 * seed + 1_000 * round_


def _batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return (order[start : start + size] for start in range(0, count, size))


class _Update:
    """AdamW on smoothing, scale ratios and learned rounding offsets, with a projection after every step."""

    def __init__(
        self, theta: Theta, origin: Theta, cfg: CalibrateConfig, steps: int, moments: dict[str, Tensor]
    ) -> None:
        self.theta, self.origin, self.steps = theta, origin, steps
        offsets = theta.offset if cfg.codes == "learned" else {}  # other offsets, of the init, stay as they are
        parts = (theta.smoothing, cfg.lr_smoothing), (theta.ratio, cfg.lr_step), (offsets, cfg.lr_rounding)
        # By name: a theta read from disk comes in another order, and sums and moments must not depend on it.
        groups: list[dict[str, Any]] = [
            {"params": [part[name] for name in sorted(part)], "lr": rate} for part, rate in parts if part
        ]
        self.names = [name for part, _ in parts for name in sorted(part)]
        groups[-1] |= OFFSET_ADAM if offsets else {}
        self.scales = [*groups[0]["params"], *groups[1]["params"]]
        self.learned = [parameter.requires_grad_() for group in groups for parameter in group["params"]]
        # Not tensors in lists, as a GPU has them by default: that would take another copy of every offset.
        on_gpu = self.learned[0].is_cuda
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, foreach=False, fused=on_gpu)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        for name, tensor in moments.items():
            index, key = name.split("/")
            counted = key == "step" and not on_gpu
            self.optimizer.state[self.learned[int(index)]][key] = tensor.cpu() if counted else tensor

    def forget(self, moments: dict[str, Tensor]) -> None:
        """Begin without moments, as the first step does."""
        self.optimizer.state.clear()
        moments.clear()

    def __call__(self, step: int, factor: float = 1.0) -> float:
        """Take a step at `factor` of the rates; return the gradient norm before clipping."""
        done = step / max(1, self.steps)
        cosine = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * cosine * factor
        try:
            norm = torch.nn.utils.clip_grad_norm_(self.scales, GRADIENT_NORM, error_if_nonfinite=True)
        except RuntimeError:
            raise without_finite_gradient(dict(zip(self.names, self.learned, strict=True)), step + 1) from None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.theta.project_(self.origin)
        return float(norm)

    def gradients(self) -> list[Tensor]:
        """The gradients of all parameters: zero of experts without tokens, and of all on a rank without prompts."""
        for parameter in self.learned:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.learned if parameter.grad is not None]

    def moments(self) -> dict[str, Tensor]:
        states = ((index, self.optimizer.state[parameter]) for index, parameter in enumerate(self.learned))
        return {f"{index}/{key}": tensor for index, state in states for key, tensor in state.items()}


class _Judge:
    """The score of an iterate: anchor and on-policy KL on held-out prompts, at every state they visit, with the objective's
    weights of terms, states and responses. The static control is judged alike."""

    def __init__(
        self,
        policy: Policy,
        holdout: Holdout,
        targets: Targets,
        energy: Tensor | None,
        cfg: CalibrateConfig,
        batch_budget: BatchBudget,
        ranks: Ranks,
    ) -> None:
        count = len(holdout.states)
        every = holdout.states.with_columns(
            critical=np.ones(count, np.bool_), weight=np.full(count, 1 / count, np.float32)
        )
        self.items = UpdateSequences(
            policy,
            holdout.prompts,
            holdout.trajectories,
            every,
            every_response=True,
            consequence=cfg.consequence,
        )
        self.policy, self.targets, self.energy, self.cfg = policy, targets, energy, cfg
        self.batch_budget, self.ranks = batch_budget, ranks

    def consider(self, progress: Progress) -> float:
        """Score the current theta, record it where it is the best so far, and return the score."""
        score: float = sum(sum(each) for each in self.ranks.gather(self.batch_budget.fit(self._scores)))
        if score < progress.best_score:
            progress.best, progress.best_score, progress.best_step = progress.theta.clone(), score, progress.step
        return score

    @torch.no_grad()
    def _scores(self, size: int) -> list[float]:
        """What this rank's prompts add to the score, `size` of them at a time."""
        own = self.ranks.shares(range(len(self.items)), self.cfg.micro_batch)
        chunks = [[self.items[place] for place in own[start : start + size]] for start in range(0, len(own), size)]
        terms = [measure(self.policy, chunk, self.targets, self.energy).floats() for chunk in chunks]
        return [self.cfg.anchor * term["anchor"] + self.cfg.response * term["response"] for term in terms]
