"""The work of a recipe: prompts, tokens, batches, rounds. Every assumption about data is here."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from onptq.checkpoint.source import Source
from onptq.data.calibration import Prompts
from onptq.methods import default_steps
from onptq.methods.layerwise import RESPONSE_TOKENS
from onptq.methods.signround import BATCH
from onptq.models.family import TEXT
from onptq.models.processing import PromptProcessor, context_length
from onptq.recipe import Recipe

IMAGE_TOKENS = 336  # an image of about 512 x 512 pixels in patches of 28
AUDIO_TOKENS = 250  # ten seconds
TEXT_TOKENS = 64
# Near misses count from the first lost hundredth of a logit, so about half of the states that agree are candidates too.
CANDIDATES = 0.6
INIT_EVALUATIONS = 4  # of each block's error over all prompts, where an init learns how weights are rounded


@dataclass(frozen=True)
class Work:
    """The work of a recipe on so many prompts; their tokens are averages."""

    prompts: int
    holdout: int
    prompt_tokens: int
    media_tokens: int  # of which come from a tower
    recipe: Recipe
    longest_prompt: int | None = None  # where lengths were counted
    gpus: int = 1  # with a process each, which share it

    @property
    def phases(self) -> tuple[str, ...]:
        rollouts = ("Follow", "Compare") if self.banks or self.holdout else ()
        branch = ("Branch",) if self.banks and self.candidates else ()
        calibrate = ("Calibrate",) if self.banks else ()
        return ("Load", "Encode", "Initialize", *rollouts, *branch, *calibrate, "Export", "Verify")

    @property
    def response_tokens(self) -> int:
        return self.recipe.follow.max_tokens

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def longest(self) -> int:
        return (self.longest_prompt or self.prompt_tokens) + self.response_tokens

    @property
    def every(self) -> int:
        return self.prompts + self.holdout

    @property
    def followed(self) -> int:
        """Responses to calibration prompts in a bank."""
        return self.prompts * self.recipe.follow.responses

    @property
    def answered(self) -> int:
        """Tokens of a prompt and the dense model's own response, from which the init learns."""
        return self.prompt_tokens + RESPONSE_TOKENS

    @property
    def init_prompts(self) -> int:
        """Calibration prompts that the init sees."""
        return min(self.prompts, self.recipe.data.init_prompts)

    @property
    def start_rounds(self) -> bool:
        """Whether the init learns how each weight is rounded, block by block."""
        return bool(self.prompts) and default_steps(self.recipe.init) is not None

    @property
    def start_rows(self) -> int:
        """Prompts in one of its updates."""
        return min(self.init_prompts, BATCH)

    @property
    def start_steps(self) -> int:
        """Updates of each block."""
        steps = default_steps(self.recipe.init) or 0
        return self.recipe.init_steps or steps

    @property
    def start_evaluations(self) -> int:
        """Evaluations of each block's error over all prompts."""
        return min(INIT_EVALUATIONS, 1 + self.start_steps)

    @property
    def rows(self) -> int:
        """Responses in one batch of Follow, Compare and Branch."""
        return max(1, min(max(self.followed, self.holdout), self.recipe.compute.batch_tokens // self.length))

    @property
    def banks(self) -> int:
        """The number of passes of Follow, Compare and Branch over the calibration prompts."""
        rounds = self.recipe.rounds
        return rounds if self.recipe.refresh else min(rounds, 1)

    @property
    def held_out_passes(self) -> int:
        """The number of passes over held-out prompts: before every round, at the end, and under plain rounding."""
        return self.recipe.rounds + 1 + (self.recipe.method != "rtn")

    @property
    def candidates(self) -> int:
        """States that Branch forks in one round."""
        if not self.recipe.branches:
            return 0
        share = 1.0 if self.recipe.calibrate.consequence else CANDIDATES
        return ceil(share * self.followed * self.response_tokens)

    @property
    def decisions(self) -> int:
        """States at which the objective reads logits."""
        calibrate, select, visited = self.recipe.calibrate, self.recipe.select, self.followed * self.response_tokens
        if calibrate.gamma and calibrate.response_over == "visited":
            return visited
        most = self.candidates if select.rule != "all" else visited
        return min(most, select.budget if select.per_prompt is None else select.per_prompt * self.followed)

    @property
    def batch(self) -> int:
        """Prompts of one step of an update."""
        return min(self.recipe.calibrate.batch, max(1, self.followed))

    @property
    def micro_batch(self) -> int:
        """Prompts with a response in one forward of an update."""
        return self._together(self.batch)

    @property
    def target_share(self) -> float:
        """The part of the calibration prompts that one process may come across in an update, which it deals out anew in every
        epoch."""
        return min(1.0, self.recipe.calibrate.epochs * self.dealt(self.batch))

    def batches(self, prompts: int) -> int:
        """Batches of Follow, Compare and Branch that so many prompts make."""
        return ceil(prompts / self.rows)

    def share(self, pieces: int) -> float:
        """The part of so many equal pieces of work that the busiest process has."""
        return ceil(pieces / self.gpus) / max(1, pieces)

    def dealt(self, prompts: int) -> float:
        """The part of so many prompts of an update that the busiest process has."""
        return self.share(ceil(prompts / self._together(prompts)))

    def _together(self, prompts: int) -> int:
        return max(1, min(self.recipe.calibrate.micro_batch, ceil(prompts / self.gpus)))

    @property
    def judged(self) -> int:
        """Held-out prompts that one round reads to choose the iterate: under its first theta and later ones."""
        calibrate = self.recipe.calibrate
        return (calibrate.evaluations + 1) * self.holdout if calibrate.keep == "best" else 0


def work_of(recipe: Recipe, source: Source, prompt_tokens: int | None = None) -> Work:
    """The work on prompts that nobody has seen.

    `prompt_tokens` is the length of one with its media; by default a usual one."""
    takes = source.family.modalities
    media = IMAGE_TOKENS if "image" in takes else AUDIO_TOKENS if "audio" in takes else 0
    length, context = media + TEXT_TOKENS if prompt_tokens is None else prompt_tokens, context_length(source.config)
    if prompt_tokens is None and context is not None:
        length = max(1, min(length, context - recipe.follow.max_tokens))
    prompts, holdout = (recipe.data.prompts, recipe.data.holdout) if recipe.needs_prompts else (0, 0)
    return Work(prompts, holdout, length, max(0, min(media, length - TEXT_TOKENS)), recipe)


def count_work(recipe: Recipe, processor: PromptProcessor, prompts: Prompts) -> Work:
    """The work on these prompts, as long as the checkpoint's processor makes them. Raises where one is unusable."""
    counted = [
        (inputs.length, int((inputs.modality != TEXT).sum()))
        for inputs in processor.ahead(prompts.every, recipe.follow.max_tokens)
    ]
    length, media = (round(sum(column) / len(counted)) for column in zip(*counted, strict=True))
    return Work(
        len(prompts.calibration), len(prompts.holdout), length, media, recipe, max(length for length, _ in counted)
    )
