"""The room everybody is examined in: the dense model, loaded for one scheme at a time, and what it encoded once."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import Source
from onptq.data.prompts import Prompt
from onptq.engine.budget import BatchBudget
from onptq.engine.prefixes import Prefixes
from onptq.evaluate.answers import Questions
from onptq.evaluate.items import Item
from onptq.models.encoding import EncodedPrompt, encode
from onptq.models.language_model import LanguageModel
from onptq.models.processing import PromptProcessor
from onptq.progress import Reporter
from onptq.quantizer.policy import Policy
from onptq.recipe import Recipe
from onptq.run import Run
from onptq.schemes import UNQUANTIZED_BITS, Scheme

PREFIX_BYTES = 2 * 2**30  # of the dense model's prompts, kept between candidates


class Hall:
    """Items and prompts are encoded once for every candidate that shares the dense model's embeddings and towers."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        device: torch.device,
        dtype: torch.dtype,
        items: Sequence[Item],
        prompts: Sequence[Prompt],
        calibration: Sequence[Prompt],
        run: Run,
        reporter: Reporter,
    ) -> None:
        self.source, self.recipe, self.device, self.dtype = source, recipe, device, dtype
        self.items, self.prompts, self.calibration, self.run, self.reporter = items, prompts, calibration, run, reporter
        self.room = BatchBudget(recipe.compute.batch_tokens, "tokens", warn=reporter.warn)
        self.processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
        self._policy: Policy | None = None
        self._questions: Questions | None = None
        self._prefixes: Prefixes | None = None
        self._encoded: dict[str, list[EncodedPrompt]] = {}

    def policy(self, scheme: Scheme | None = None) -> Policy:
        """The dense policy of that scheme; without one, of whichever is loaded."""
        if self._policy is None or (scheme is not None and self._policy.scheme != scheme):
            self.rest()
            chosen = scheme or Scheme(UNQUANTIZED_BITS, UNQUANTIZED_BITS)
            with self.reporter.phase("Load", total=1, unit="checkpoint") as bar:
                self._policy = load_policy(self.source, chosen, device=self.device, dtype=self.dtype)
                bar.advance()
            if self._questions is not None:
                self._questions = self._questions.put_to(self._policy)
        return self._policy

    def rest(self) -> None:
        """Give the model's memory back until it is asked for again."""
        if self._policy is not None:
            self._policy.release()
        self._policy = self._prefixes = None
        gc.collect()

    def questions(self) -> Questions:
        if self._questions is None:
            self._questions = self.ask(self.policy(), "Encode items")
        return self._questions

    def ask(self, policy: LanguageModel, label: str) -> Questions:
        with self.reporter.phase(label, total=len(self.items), unit="items") as bar:
            return Questions(policy, self.processor, self.items, batch_tokens=self.room, advance=bar.advance)

    def prefixes(self) -> Prefixes:
        """The held-out prompts under the dense policy."""
        if self._prefixes is None:
            policy = self.policy()
            if "prompts" not in self._encoded:
                self._encoded["prompts"] = self.encode(policy, self.prompts, "Encode prompts")
            self._prefixes = self.batched(policy, self._encoded["prompts"], PREFIX_BYTES)
        return self._prefixes

    def batched(self, policy: LanguageModel, prompts: Sequence[EncodedPrompt], budget: int) -> Prefixes:
        return Prefixes(
            policy,
            prompts,
            max_tokens=self.recipe.follow.max_tokens,
            batch_tokens=self.room,
            budget=budget,
        )

    def known(self, count: int) -> list[EncodedPrompt]:
        """The first calibration prompts, encoded."""
        if "calibration" not in self._encoded:
            self._encoded["calibration"] = self.encode(self.policy(), self.calibration, "Encode calibration")
        return self._encoded["calibration"][:count]

    def encode(self, policy: LanguageModel, prompts: Sequence[Prompt], label: str) -> list[EncodedPrompt]:
        with self.reporter.phase(label, total=len(prompts), unit="prompts") as bar:
            return encode(policy, self.processor.ahead(prompts, self.recipe.follow.max_tokens), advance=bar.advance)
