"""A comparison in progress: the dense model, one scheme at a time, and everything encoded once for all candidates."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import torch

from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import Source
from onptq.cycle.inputs import Inputs
from onptq.data.calibration import in_order
from onptq.data.prompts import Prompt
from onptq.engine.agreement import check_agreement
from onptq.engine.budget import BatchBudget, cached_bytes
from onptq.engine.memory import free_memory
from onptq.engine.prefixes import Prefixes
from onptq.engine.prompts import EncodedPrompts
from onptq.evaluate.answers import EncodedItems
from onptq.evaluate.candidates import folder_name
from onptq.evaluate.tasks import Item
from onptq.models.encoding import EncodedPrompt, encode_each
from onptq.models.language_model import LanguageModel
from onptq.models.processing import PromptProcessor
from onptq.progress import LoggedReporter, Reporter
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import Run
from onptq.schemes import UNQUANTIZED_BITS, Scheme

PREFIX_BYTES = 2 * 2**30  # of the dense model's prompts, cached between candidates


class Session:
    """A comparison in progress. Candidates that share the dense model's embeddings and towers share what these encoded."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        device: torch.device,
        dtype: torch.dtype,
        items: Sequence[Item],
        prompts: Sequence[Prompt],
        calibration: Sequence[Prompt],
        holdout: Sequence[Prompt],
        run: Run,
        reporter: Reporter,
    ) -> None:
        self.source, self.recipe, self.device, self.dtype, self.run = source, recipe, device, dtype, run
        self.items, self.prompts, self.calibration, self.holdout = items, prompts, calibration, holdout
        self.plain_reporter, self.reporter = reporter, LoggedReporter(reporter, run.log)
        self.batch_tokens = BatchBudget(recipe.compute.batch_tokens, "tokens", warn=reporter.warn)
        self.processor = PromptProcessor.from_folder(
            source.folder, source.family, source.config, recipe.data.special_tokens
        )
        self._policy: Policy | None = None
        self._encoded_items: EncodedItems | None = None
        self._prefixes: Prefixes | None = None
        self._inputs: dict[tuple[int, ...], Inputs] = {}
        self._prompts: EncodedPrompts | None = None
        self._calibration: dict[tuple[int, int], EncodedPrompts] = {}

    def policy(self, scheme: Scheme | None = None) -> Policy:
        """The dense policy of that scheme; without one, of whichever is loaded."""
        if self._policy is None or (scheme is not None and self._policy.scheme != scheme):
            self.release()
            chosen = scheme or Scheme(UNQUANTIZED_BITS, UNQUANTIZED_BITS)
            with self.reporter.phase("Load", total=1, unit="checkpoint") as bar:
                self._policy = load_policy(self.source, chosen, device=self.device, dtype=self.dtype)
                bar.advance()
            check_agreement(self._policy, self.processor, self.prompts)
            if self._encoded_items is not None:
                self._encoded_items = self._encoded_items.with_model(self._policy)
        return self._policy

    def release(self) -> None:
        """Give the model's memory back; it is loaded again when it is needed."""
        if self._policy is not None:
            self._policy.release()
        self._policy = self._prefixes = None
        self._inputs.clear()
        gc.collect()

    def speak_as(self, theta: Theta) -> None:
        """Make Q of the loaded policy what theta folds to."""
        self.policy().freeze(theta, keep="floats")
        if self._prefixes is not None:
            self._prefixes.forget("Q")

    def encoded_items(self) -> EncodedItems:
        """The items, encoded by the dense model."""
        if self._encoded_items is None:
            self._encoded_items = self.encode_items(self.policy(), "Encode items")
        return self._encoded_items

    def encode_items(self, model: LanguageModel, label: str) -> EncodedItems:
        with self.reporter.phase(label, total=len(self.items), unit="items") as bar:
            return EncodedItems(model, self.processor, self.items, batch_tokens=self.batch_tokens, advance=bar.advance)

    def prefixes(self) -> Prefixes:
        """The prompts on which behaviour is compared, under the dense policy."""
        if self._prefixes is None:
            policy = self.policy()
            if self._prompts is None:
                self._prompts = self.encode_prompts(policy, self.prompts, "Encode prompts")
            self._prefixes = self.batched(policy, self._prompts, PREFIX_BYTES)
        return self._prefixes

    def batched(self, model: LanguageModel, prompts: Sequence[EncodedPrompt], budget: int) -> Prefixes:
        tokens = self.recipe.follow.max_tokens
        return Prefixes(model, prompts, max_tokens=tokens, batch_tokens=self.batch_tokens, budget=budget)

    def calibration_prompts(self, recipe: Recipe) -> tuple[EncodedPrompts, EncodedPrompts]:
        """Calibration and held-out prompts of a recipe, encoded together as its run would encode them."""
        used = in_order(self.calibration[: recipe.data.prompts])
        held_out = in_order(self.holdout[: recipe.data.holdout])
        counts = len(used), len(held_out)
        if counts not in self._calibration:
            prompts = [*used, *held_out]
            if len({prompt.ordinal for prompt in prompts}) < len(prompts):  # of two sources, each counted from 0
                prompts = [replace(prompt, ordinal=place) for place, prompt in enumerate(prompts)]
            self._calibration[counts] = self.encode_prompts(self.policy(), prompts, "Encode calibration")
        encoded = self._calibration[counts]
        return encoded[: len(used)], encoded[len(used) :]

    def inputs(self, recipe: Recipe, run: Run) -> Inputs:
        """The inputs of rounds by `recipe`; D's caches serve every candidate with as many prompts."""
        policy = self.policy(Scheme.parse(recipe.scheme))
        prompts, held_out = self.calibration_prompts(recipe)
        sizes = recipe.follow.max_tokens, recipe.compute.batch_tokens, recipe.calibrate.micro_batch
        key = len(prompts), len(held_out), recipe.follow.responses, *sizes
        if key not in self._inputs:
            self._inputs.clear()  # one set of caches at a time
            generation = self.source.generation
            self._inputs[key] = Inputs(policy, prompts, held_out, recipe, run, self.reporter.warn, generation)
        return self._inputs[key]

    def encode_prompts(self, model: LanguageModel, prompts: Sequence[Prompt], label: str) -> EncodedPrompts:
        with self.reporter.phase(label, total=len(prompts), unit="prompts") as bar:
            inputs = self.processor.ahead(prompts, self.recipe.follow.max_tokens)
            each = encode_each(model, inputs, [prompt.ordinal for prompt in prompts], bar.advance)
            folder = self.run.scratch(f"{folder_name(label)}-{len(prompts)}")
            budget = cached_bytes(free_memory(self.device), self.recipe.compute.cache_gib)
            return EncodedPrompts.of(each, budget=budget, folder=folder)
