"""The policy and the prompts of a run, with the caches that its rounds share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from onptq.engine.budget import BatchBudget, Budgets
from onptq.engine.prefixes import Prefixes
from onptq.engine.prompts import EncodedPrompts
from onptq.models.encoding import EncodedPrompt
from onptq.models.language_model import Side
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import Run

FITS = "room.json"  # the tokens and prompts that fit into memory at once, where that is less than the recipe says


class Inputs:
    """Calibration and held-out prompts under one policy. Prefixes of D are cached for good, those of Q until it changes.

    A prompt with several responses is there several times. `generation` is the model's generation config."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        holdout: Sequence[EncodedPrompt],
        recipe: Recipe,
        run: Run,
        warn: Callable[[str], None] = lambda text: None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        self.policy, self.ranks = policy, run.ranks
        budgets = run.ranks.lead(lambda: asdict(Budgets.of(policy, recipe)))
        self.budgets = Budgets(**budgets)  # the same on all ranks, so that Q is, to the last bit
        self.tokens = batch_budget(run, "tokens", recipe.compute.batch_tokens, warn)
        self.update_prompts = batch_budget(run, "prompts", recipe.calibrate.micro_batch, warn)
        prompts, holdout = EncodedPrompts.of(prompts), EncodedPrompts.of(holdout)
        self.generation = generation or {}
        stride = 1 + max((*prompts.ordinals, *holdout.ordinals), default=0)
        self.prefixes = self._prefixes(prompts.repeated(recipe.follow.responses, stride), recipe.follow.max_tokens)
        self.held_out = self._prefixes(holdout, recipe.follow.max_tokens) if len(holdout) else None
        self.prompts = self.prefixes.prompts

    def speak_as(self, theta: Theta) -> None:
        """Make Q what theta folds to."""
        if self.budgets.keep == "nothing":
            self.policy.attach(theta)
        else:
            self.policy.freeze(theta, keep=self.budgets.keep)
        self.forget("Q")

    def forget(self, side: Side) -> None:
        """Free the memory of one side's prefixes."""
        for prefixes in (self.prefixes, self.held_out):
            if prefixes is not None:
                prefixes.forget(side)

    def _prefixes(self, prompts: Sequence[EncodedPrompt], max_tokens: int) -> Prefixes:
        budget = self.budgets.prefixes
        return Prefixes(
            self.policy, prompts, max_tokens=max_tokens, batch_tokens=self.tokens, budget=budget, ranks=self.ranks
        )


def batch_budget(run: Run, unit: str, size: int, warn: Callable[[str], None]) -> BatchBudget:
    """A batch budget of `size`, or of what fitted into memory when the run was last worked on."""

    def fitting() -> dict[str, int]:
        return run.read_json(FITS) if run.has(FITS) else {}

    def keep(size: int) -> None:
        run.write_json(fitting() | {unit: size}, FITS)

    return BatchBudget(min(size, fitting().get(unit, size)), unit, warn=warn, keep=keep)
