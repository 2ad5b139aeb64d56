"""Follow, Compare, Branch, Calibrate, refresh: the algorithm of appendix A, each finished step committed to the run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from onptq.bank import MISMATCH, NEAR_MISS, States, Trajectory, read_trajectories, write_trajectories
from onptq.cycle.branch import branch
from onptq.cycle.calibrate import Holdout, Progress, calibrate, order_seed
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.prefixes import Prefixes
from onptq.cycle.risk import score, select
from onptq.cycle.room import Budgets, Room
from onptq.models.encoding import EncodedPrompt
from onptq.policy import Policy, Side
from onptq.progress import Reporter
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import Run

SAVE_SECONDS = 20.0  # an update writes down where it is about this often
HALFWAY = ".calibrate.safetensors"  # an update that has not ended
ROOM = "room.json"  # what turned out to fit into memory, where that was less than the recipe says

T = TypeVar("T")


class Cycle:
    """One run of the cycle. Every step is read back if an earlier process finished it, and computed otherwise."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        holdout: Sequence[EncodedPrompt],
        recipe: Recipe,
        run: Run,
        reporter: Reporter,
        budgets: Budgets,
    ) -> None:
        self.policy, self.prompts, self.recipe, self.run, self.reporter = policy, prompts, recipe, run, reporter
        self.budgets = budgets
        self.tokens = self._room("tokens", recipe.compute.batch_tokens)
        self.updated = self._room("prompts", recipe.calibrate.micro_batch)
        self.prefixes = self._prefixes(prompts)
        self.held_out = self._prefixes(holdout) if holdout else None

    def rounds(self, theta: Theta) -> Theta:
        for k in range(self.recipe.rounds):
            committed = self._round_file(k, "theta.safetensors")
            halfway = self.run.file(*self._round_file(k, HALFWAY))
            if self.run.has(*committed):
                theta = Theta.load(self.run.file(*committed), self.policy.device)
                halfway.unlink(missing_ok=True)
            else:
                if self.recipe.settles and not theta.levels:
                    theta = self.policy.settle(theta)  # the same Q, without the offsets its codes may have come from
                self.speak_as(theta)
                trajectories = self.trajectories(k)
                states = self.states(k, trajectories)
                theta = self.update(k, trajectories, states, theta)
                self.run.write_behind(theta.saving(), *committed, instead_of=halfway)
        self.speak_as(theta)
        return theta

    def arm(self, recipe: Recipe, run: Run, reporter: Reporter) -> Cycle:
        """The cycle of another recipe over the same policy and prompts: what D left in the caches serves it too."""
        other = copy.copy(self)
        other.recipe, other.run, other.reporter = recipe, run, reporter
        return other

    def speak_as(self, theta: Theta) -> None:
        """Q is what theta folds to; whatever was cached of the previous Q is no longer true."""
        if self.budgets.keep == "nothing":
            self.policy.attach(theta)
        else:
            self.policy.freeze(theta, keep_dequantized=self.budgets.keep == "floats")
        self._forget("Q")

    def release(self) -> None:
        """Drop every cached prefix of both models."""
        self._forget("D")
        self._forget("Q")

    def trajectories(self, k: int) -> list[Trajectory]:
        source = k if self.recipe.refresh else 0
        if source != k:
            earlier = read_trajectories(self.run.file(*self._round_file(source, "trajectories.parquet")))
            return self._trajectory_step(self._round_file(k, "trajectories.parquet"), lambda: earlier)
        return self._follow(self._round_file(k, "trajectories.parquet"), f"Follow {k + 1}", self.prefixes)

    def states(self, k: int, trajectories: Sequence[Trajectory]) -> States:
        """The round's bank: compared, branched, scored, selected. Without refresh, the first round's."""
        committed, compared = self._round_file(k, "bank.parquet"), self._round_file(k, ".compared.parquet")
        if k > 0 and not self.recipe.refresh:
            earlier = States.read(self.run.file(*self._round_file(0, "bank.parquet")))
            return self._state_step(committed, lambda: earlier)

        def compute() -> States:
            states = self._compare(compared, f"Compare {k + 1}", self.prefixes, trajectories)
            total = int(states.candidates.sum()) if self.recipe.calibrate.gamma else 0
            if not total:
                return weigh(self.prefixes, trajectories, states, self.recipe, k)
            with self.reporter.phase(f"Branch {k + 1}", total=total, unit="candidates") as bar:
                return weigh(self.prefixes, trajectories, states, self.recipe, k, bar.advance)

        states = self._state_step(committed, compute)
        self.run.file(*compared).unlink(missing_ok=True)
        self.run.log("bank", round=k, **bank_figures(states))
        if not states.weight.any() and self.recipe.calibrate.gamma > 0:
            rest = " and the response KL" if self.recipe.calibrate.response_over == "visited" else " alone"
            self.reporter.warn(f"round {k + 1}: no candidate states, so the update follows the anchor{rest}")
        return states

    def holdout(self, name: str, label: str) -> Holdout | None:
        """Held-out prompts under the Q of the moment: rollouts and comparison, kept beside the rounds."""
        if self.held_out is None:
            return None
        trajectories = self._follow((name, "holdout_trajectories.parquet"), f"Follow {label}", self.held_out)
        states = self._compare((name, "holdout.parquet"), f"Compare {label}", self.held_out, trajectories)
        prompts = [prompt for batch in self.held_out.batches for prompt in batch.prompts]
        return Holdout(sorted(prompts, key=lambda prompt: prompt.ordinal), trajectories, states)

    def update(self, k: int, trajectories: Sequence[Trajectory], states: States, theta: Theta) -> Theta:
        cfg, saved = self.recipe.calibrate, self._round_file(k, HALFWAY)
        holdout = self.holdout(f"rounds/{k}", f"held-out {k + 1}")
        self._forget("Q")  # this Q has said all it will be asked
        progress = Progress.load(self.run.file(*saved), self.policy.device) if self.run.has(*saved) else None
        steps = cfg.epochs * -(-len(self.prompts) // cfg.batch)
        last_saved = time.monotonic()

        def save(progress: Progress) -> None:
            nonlocal last_saved
            if time.monotonic() - last_saved > SAVE_SECONDS:
                with self.run.writing(*saved) as path:
                    progress.save(path)
                last_saved = time.monotonic()

        with self.reporter.phase(f"Calibrate {k + 1}", total=steps, unit="steps") as bar:
            bar.advance(progress.step if progress else 0)

            def log(record: dict[str, float]) -> None:
                self.run.log("step", round=k, **record)
                bar.advance(1, loss=record["loss"])

            result = calibrate(
                self.policy,
                self.prompts,
                trajectories,
                states,
                theta,
                cfg,
                holdout=holdout,
                seed=order_seed(self.recipe.seed, k),
                target_budget=self.budgets.targets,
                room=self.updated,
                progress=progress,
                save=save,
                log=log,
            )
        self.run.log("calibrated", round=k, best_step=result.best_step, steps=steps)
        return result.theta

    def _follow(self, parts: Sequence[str], label: str, prefixes: Prefixes) -> list[Trajectory]:
        def compute() -> list[Trajectory]:
            with self.reporter.phase(label, total=_count(prefixes), unit="prompts") as bar:
                return follow(prefixes, advance=bar.advance)

        return self._trajectory_step(parts, compute)

    def _compare(
        self, parts: Sequence[str], label: str, prefixes: Prefixes, trajectories: Sequence[Trajectory]
    ) -> States:
        def compute() -> States:
            with self.reporter.phase(label, total=_count(prefixes), unit="prompts") as bar:
                return compare(
                    prefixes, trajectories, near_miss_tol=self.recipe.risk.near_miss_tol, advance=bar.advance
                )

        return self._state_step(parts, compute)

    def _trajectory_step(self, parts: Sequence[str], compute: Callable[[], list[Trajectory]]) -> list[Trajectory]:
        return self._step(parts, compute, write_trajectories, read_trajectories)

    def _state_step(self, parts: Sequence[str], compute: Callable[[], States]) -> States:
        return self._step(parts, compute, States.write, States.read)

    def _step(
        self,
        parts: Sequence[str],
        compute: Callable[[], T],
        write: Callable[[T, Path], None],
        read: Callable[[Path], T],
    ) -> T:
        if not self.run.has(*parts):
            value = compute()
            with self.run.writing(*parts) as path:
                write(value, path)
        return read(self.run.file(*parts))

    def _forget(self, side: Side) -> None:
        for prefixes in (self.prefixes, self.held_out):
            if prefixes is not None:
                prefixes.forget(side)

    def _prefixes(self, prompts: Sequence[EncodedPrompt]) -> Prefixes:
        return Prefixes(
            self.policy,
            prompts,
            max_tokens=self.recipe.follow.max_tokens,
            batch_tokens=self.tokens,
            budget=self.budgets.prefixes,
        )

    def _room(self, unit: str, size: int) -> Room:
        def keep(size: int) -> None:
            self.run.write_json(self._known_room() | {unit: size}, ROOM)

        return Room(min(size, self._known_room().get(unit, size)), unit, tell=self.reporter.warn, keep=keep)

    def _known_room(self) -> dict[str, int]:
        return self.run.read_json(ROOM) if self.run.has(ROOM) else {}

    @staticmethod
    def _round_file(k: int, name: str) -> tuple[str, str, str]:
        return "rounds", str(k), name


def weigh(
    prefixes: Prefixes,
    trajectories: Sequence[Trajectory],
    states: States,
    recipe: Recipe,
    k: int,
    advance: Callable[[int], None] = lambda candidates: None,
) -> States:
    """Branch, score and select compared states. With gamma = 0 nothing is critical and nothing needs a branch."""
    if recipe.calibrate.gamma == 0:
        return score(states, recipe.risk)
    states = branch(
        prefixes,
        trajectories,
        states,
        horizon=recipe.branch.horizon,
        divergence=recipe.risk.divergence,
        eos_as_max=recipe.branch.eos_as_max,
        advance=advance,
    )
    return select(score(states, recipe.risk), recipe.select, risk=recipe.risk, seed=recipe.seed + k)


def _count(prefixes: Prefixes) -> int:
    return sum(len(batch.prompts) for batch in prefixes.batches)


def bank_figures(states: States) -> dict[str, float]:
    """What a bank says in a few numbers."""
    branched = states.horizon > 0
    agree_but_moved = ~states.candidates & (states.js > np.quantile(states.js, 0.9))
    return {
        "states": len(states),
        "mismatches": int((states.kind == MISMATCH).sum()),
        "near_misses": int((states.kind == NEAR_MISS).sum()),
        "mismatch_percent": 100 * float((states.kind == MISMATCH).mean()),
        "erosion": float(states.erosion.mean()),
        "js": float(states.js.mean()),
        "kl": float(states.kl.mean()),
        "first_fork": first_fork(states),
        "consequence": float(states.consequence[branched].mean()) if branched.any() else 0.0,
        "critical": int(states.critical.sum()),
        "critical_prompts": len(np.unique(states.prompt[states.critical])),
        "no_candidate_but_diverging": int(agree_but_moved.sum()),
        "rollout_disagreements": int((states.token != states.quantized).sum()),
    }


def first_fork(states: States) -> float:
    """Tokens that D and Q, each answering alone, have in common: up to a prompt's first mismatch, averaged over prompts."""
    prompts, lengths = np.unique(states.prompt, return_counts=True)
    common = dict(zip(prompts.tolist(), lengths.tolist(), strict=True))
    mismatch = states.take(np.flatnonzero(states.kind == MISMATCH))
    first, where = np.unique(mismatch.prompt, return_index=True)
    common |= dict(zip(first.tolist(), (mismatch.t[where] - 1).tolist(), strict=True))
    return float(np.mean(list(common.values())))
