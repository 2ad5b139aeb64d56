"""Follow, Compare, Branch, Calibrate, refresh: the algorithm of appendix A, each finished step committed to the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from onptq.bank import MISMATCH, NEAR_MISS, States, Trajectory, read_trajectories, write_trajectories
from onptq.cycle.branch import Seen, branch
from onptq.cycle.calibrate import Holdout, Progress, calibrate, order_seed
from onptq.cycle.compare import compare
from onptq.cycle.disagreements import CLEAR_SHARE, Disagreements, disagreements, sentence
from onptq.cycle.follow import follow
from onptq.cycle.inputs import Inputs
from onptq.cycle.risk import critical_states, score
from onptq.cycle.served import ServedPolicy
from onptq.engine.prefixes import Prefixes
from onptq.engine.sampling import Sampling
from onptq.errors import OnPTQError
from onptq.models.language_model import Side
from onptq.progress import Reporter
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import Codec, Run

SAVE_SECONDS = 20.0  # an update writes down where it is about this often
DENSE_ANSWERS = "final/dense_trajectories.parquet"
HALFWAY = ".calibrate.safetensors"  # an update that has not ended
UPDATE = "update.json"  # how many steps an update took, and which iterate it kept

T = TypeVar("T")
TRAJECTORIES = Codec(write_trajectories, read_trajectories)
STATES = Codec(States.write, States.read)
DISAGREEMENTS = Codec(Disagreements.write, Disagreements.read)
DISAGREED = "disagreements.parquet"  # of a round whose rollouts a server wrote


class Keeper(Protocol):
    """Keeps of a round what those look at who want to see its decisions, beside the bank."""

    def branching(self) -> Seen | None:
        """What the futures of the round's states are shown to."""

    def keep(self, cycle: Cycle, k: int, trajectories: Sequence[Trajectory], states: States) -> None:
        """Keep what is wanted of the selected states, while Q still is that of the round."""


class Cycle:
    """One run of the cycle. Every step is read back if an earlier process finished it, and computed otherwise."""

    def __init__(
        self,
        inputs: Inputs,
        recipe: Recipe,
        run: Run,
        reporter: Reporter,
        keeper: Keeper | None = None,
        served: ServedPolicy | None = None,
    ) -> None:
        """`served` writes the rollouts where the recipe wants a server to."""
        self.inputs, self.recipe, self.run, self.reporter, self.served = inputs, recipe, run, reporter, served
        self.policy, self.prefixes, self.keeper = inputs.policy, inputs.prefixes, keeper

    @property
    def continued_by(self) -> Side:
        """The side that continues both tokens of a decision."""
        return "Q" if self.recipe.branch.policy == "quantized" else "D"

    def rounds(self, theta: Theta) -> Theta:
        """theta^(R), from theta^(0): the algorithm of appendix A."""
        for k in range(self.recipe.rounds):
            committed, halfway = f"rounds/{k}/theta.safetensors", self.run.file(f"rounds/{k}/{HALFWAY}")
            if self.run.ranks.lead(partial(self.run.has, committed)):
                theta = self.run.read(committed, self.policy.load)
                halfway.unlink(missing_ok=True)
                continue
            if self.recipe.settles and not theta.settled:
                theta = self.policy.settle(theta)  # the same Q, without the offsets its codes may have come from
            self.inputs.speak_as(theta)
            if k == 0 or self.recipe.refresh:
                trajectories = self.follow_calibration(k)
                states = self.bank(k, trajectories)
            else:
                trajectories = self.repeat(k, "trajectories.parquet", TRAJECTORIES)
                states = self.repeat(k, "bank.parquet", STATES)
            theta = self.update(k, trajectories, states, theta)
            if self.run.ranks.is_first:
                self.run.write_behind(self.policy.whole(theta).saving(), committed, instead_of=halfway)
        self.inputs.speak_as(theta)
        return theta

    def follow_calibration(self, k: int) -> list[Trajectory]:
        """The round's responses to the calibration prompts, by the side and in the way that the recipe says."""
        cfg, sampling = self.recipe.follow, None
        if cfg.sampling == "model":
            sampling = Sampling.of(self.inputs.generation, order_seed(self.recipe.seed, k))
        if cfg.engine == "vllm":
            return self.follow_served(k, sampling)
        side: Side = "Q" if cfg.policy == "quantized" else "D"
        return self.follow(f"rounds/{k}/trajectories.parquet", f"Follow {k + 1}", self.prefixes, side, sampling)

    def follow_served(self, k: int, sampling: Sampling | None) -> list[Trajectory]:
        """The round's responses, written by a server of the present Q."""

        def compute() -> list[Trajectory]:
            if self.served is None:
                raise OnPTQError(
                    "follow.engine=vllm is for `onptq quantize`; a comparison builds its candidates with follow.engine=own"
                )
            with self.reporter.phase(f"Follow {k + 1}", total=len(self.inputs.prompts), unit="prompts") as bar:
                return self.served.follow(self.inputs, self.run, f"rounds/{k}", sampling, self.reporter, bar.advance)

        return self.run.step(f"rounds/{k}/trajectories.parquet", TRAJECTORIES, compute)

    def follow(
        self, name: str, label: str, prefixes: Prefixes, side: Side = "Q", sampling: Sampling | None = None
    ) -> list[Trajectory]:
        """Rollouts of one side."""

        def compute() -> list[Trajectory]:
            with self.reporter.phase(label, total=len(prefixes.prompts), unit="prompts") as bar:
                return follow(prefixes, side, sampling=sampling, advance=bar.advance)

        return self.run.step(name, TRAJECTORIES, compute)

    def compare(self, name: str, label: str, prefixes: Prefixes, trajectories: Sequence[Trajectory]) -> States:
        """D and Q at every state that the rollouts visited."""

        def compute() -> States:
            with self.reporter.phase(label, total=len(prefixes.prompts), unit="prompts") as bar:
                tol = self.recipe.risk.near_miss_tol
                return compare(prefixes, trajectories, near_miss_tol=tol, advance=bar.advance)

        return self.run.step(name, STATES, compute)

    def bank(self, k: int, trajectories: Sequence[Trajectory]) -> States:
        """The round's states: compared, branched, scored, selected. With gamma = 0 nothing is branched or critical."""
        recipe, compared = self.recipe, f"rounds/{k}/.compared.parquet"

        def compute() -> States:
            states = self.compare(compared, f"Compare {k + 1}", self.prefixes, trajectories)
            if recipe.calibrate.gamma == 0:
                return score(states, recipe.risk)
            if recipe.branches:
                states = self.branch(f"Branch {k + 1}", self.prefixes, trajectories, states, self._looking)
            selected = critical_states(states, recipe, k)
            if self.keeper is not None:
                self.keeper.keep(self, k, trajectories, selected)
            return selected

        states = self.run.step(f"rounds/{k}/bank.parquet", STATES, compute)
        self.run.file(compared).unlink(missing_ok=True)
        figures = bank_figures(states) | self.disagree(k, trajectories, states)
        self.run.log("bank", round=k, **figures)
        if not states.weight.any() and recipe.calibrate.gamma > 0:
            rest = " and the response KL" if recipe.calibrate.response_over == "visited" else " alone"
            self.reporter.warn(f"round {k + 1}: no candidate states, so the update follows the anchor{rest}")
        return states

    def disagree(self, k: int, trajectories: Sequence[Trajectory], states: States) -> dict[str, float]:
        """Figures of where the server chose another token than Q, near ties apart; none where tokens were drawn."""
        cfg = self.recipe.follow
        if cfg.engine == "own" or cfg.sampling != "greedy":
            return {}

        def compute() -> Disagreements:
            with self.reporter.phase(
                f"Compare {k + 1} with vLLM", total=len(self.inputs.prompts), unit="prompts"
            ) as bar:
                return disagreements(self.prefixes, trajectories, states, bar.advance)

        figures = self.run.step(f"rounds/{k}/{DISAGREED}", DISAGREEMENTS, compute).figures(len(states))
        text = sentence(figures | {"states": len(states)})
        if figures["server_clear"] > CLEAR_SHARE * len(states):
            self.reporter.warn(
                f"round {k + 1}: {text}. So the server does not compute what the checkpoint says: its kernels may leave "
                "activations in 16 bits, or its processor give images other pixels (docs/serving.md)"
            )
        else:
            self.reporter.note(f"round {k + 1}: {text}")
        return figures

    @property
    def _looking(self) -> Seen | None:
        return None if self.keeper is None else self.keeper.branching()

    def branch(
        self,
        label: str,
        prefixes: Prefixes,
        trajectories: Sequence[Trajectory],
        states: States,
        seen: Seen | None = None,
    ) -> States:
        """Both tokens of every candidate, forced and continued; of every state where the response KL is weighted by it."""
        cfg = self.recipe.branch
        everywhere = self.recipe.calibrate.consequence > 0
        total = len(states) if everywhere else int(states.candidates.sum())
        if not total:
            return states
        with self.reporter.phase(label, total=total, unit="candidates") as bar:
            return branch(
                prefixes,
                trajectories,
                states,
                horizon=cfg.horizon,
                side=self.continued_by,
                divergence=self.recipe.risk.divergence,
                eos_as_max=cfg.eos_as_max,
                count_forced=cfg.count_forced,
                everywhere=everywhere,
                seen=seen,
                advance=bar.advance,
            )

    def repeat(self, k: int, name: str, codec: Codec[T]) -> T:
        """A file of round 0, committed again as round k's."""
        return self.run.step(f"rounds/{k}/{name}", codec, lambda: self.run.read(f"rounds/0/{name}", codec.read))

    def holdout(self, name: str, label: str) -> Holdout | None:
        """Rollouts and states of the held-out prompts under the present Q."""
        held_out = self.inputs.held_out
        if held_out is None:
            return None
        trajectories = self.follow(f"{name}/holdout_trajectories.parquet", f"Follow {label}", held_out)
        states = self.compare(f"{name}/holdout.parquet", f"Compare {label}", held_out, trajectories)
        return Holdout(held_out.prompts, trajectories, states)

    def answer_holdout(self) -> list[Trajectory]:
        """D's own answers to the held-out prompts, beside which Q's can be read."""
        if self.inputs.held_out is None:
            return []
        return self.follow(DENSE_ANSWERS, "Follow held-out of D", self.inputs.held_out, "D")

    def update(self, k: int, trajectories: Sequence[Trajectory], states: States, theta: Theta) -> Theta:
        cfg, saved = self.recipe.calibrate, f"rounds/{k}/{HALFWAY}"
        holdout = self.holdout(f"rounds/{k}", f"held-out {k + 1}")
        if holdout is not None and self.inputs.held_out is not None and cfg.gamma > 0 and cfg.consequence > 0:
            label = f"Branch held-out {k + 1}"
            branched = self.branch(label, self.inputs.held_out, holdout.trajectories, holdout.states)
            holdout = replace(holdout, states=branched)
        self.inputs.forget("Q")  # the update changes it
        progress = None
        if self.run.ranks.lead(lambda: self.run.has(saved)):
            progress = self.run.read(saved, lambda path: Progress.load(path, self.policy.device))
        steps = cfg.epochs * -(-len(self.inputs.prompts) // cfg.batch)
        last_saved = time.monotonic()

        def save(progress: Progress) -> None:
            nonlocal last_saved
            if self.run.ranks.is_first and time.monotonic() - last_saved > SAVE_SECONDS:
                with self.run.writing(saved) as path:
                    progress.save(path)
                last_saved = time.monotonic()

        with self.reporter.phase(f"Calibrate {k + 1}", total=steps, unit="steps") as bar:
            bar.advance(progress.step if progress else 0)

            def log(record: dict[str, float]) -> None:
                self.run.log("step", round=k, **record)
                bar.advance(1, loss=record["loss"])

            result = calibrate(
                self.policy,
                self.inputs.prompts,
                trajectories,
                states,
                theta,
                cfg,
                holdout=holdout,
                seed=order_seed(self.recipe.seed, k),
                target_budget=self.inputs.budgets.targets,
                batch_budget=self.inputs.update_prompts,
                progress=progress,
                ranks=self.run.ranks,
                save=save,
                log=log,
            )
        self.run.log("calibrated", round=k, best_step=result.best_step, steps=steps)
        self.run.write_json({"steps": steps, "best_step": result.best_step}, f"rounds/{k}/{UPDATE}")
        return result.theta

    def figures(self, k: int) -> dict[str, float]:
        """A finished round in a few numbers: its bank, and `steps` and `best_step` of its update."""
        states, name = self.run.read(f"rounds/{k}/bank.parquet", States.read), f"rounds/{k}/{DISAGREED}"
        differing = self.run.read(name, Disagreements.read).figures(len(states)) if self.run.has(name) else {}
        return bank_figures(states) | differing | read_update(self.run, k)


def read_update(run: Run, k: int) -> dict[str, int]:
    """`steps` and `best_step` of a finished round. Runs of contract 1 have them in their log alone."""
    name = f"rounds/{k}/{UPDATE}"
    if run.has(name):
        update: dict[str, int] = run.read_json(name)
        return update
    logged = [e for e in run.events() if e["event"] == "calibrated" and e["round"] == k and "arm" not in e]
    return {key: logged[-1][key] for key in ("steps", "best_step")}


def bank_figures(states: States) -> dict[str, float]:
    """The figures of a bank."""
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
