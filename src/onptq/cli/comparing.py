"""Comparisons of a dense model with candidates, as `onptq compare` and `onptq diff` have them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onptq.checkpoint.catalogs import is_cataloged
from onptq.cli.drawing import Usable, behaviour_prompts, calibration_prompts, origin
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.checkpoint.source import Source
    from onptq.data.prompts import Prompt
    from onptq.evaluate.candidates import Candidate
    from onptq.evaluate.summary import Report
    from onptq.progress import Reporter
    from onptq.recipe import DataConfig, Recipe

TEST = "test"  # the split of embedded items and prompts that judges


def parse_models(texts: Sequence[str], recipe: Recipe, changes: Sequence[str] | None) -> list[Candidate]:
    """The candidates that a command names; a run's folder stands for its checkpoint."""
    from onptq.evaluate.candidates import parse_candidates
    from onptq.page.places import as_candidate

    return parse_candidates([as_candidate(one) for one in texts], recipe, changes or ())


def compare_candidates(
    dense: str,
    candidates: Sequence[Candidate],
    folder: Path,
    recipe: Recipe,
    reporter: Reporter,
    *,
    manifest: Path | None,
    prompts: int,
    calibration: Path | None,
    tasks: str | None = "none",
    items: int | None = None,
    split: str = TEST,
    on_bad_prompt: str = "fail",
    critical: bool = False,
    seed: int = 0,
    seeds: int = 1,
) -> Report:
    """The report on the candidates, on embedded items of `tasks` and on prompts of the manifest or embedded ones.

    What calibrates a candidate judges none."""
    from onptq.checkpoint.source import choose_device, find_source
    from onptq.evaluate.comparison import compare_models
    from onptq.run import check_place
    from onptq.zoo.materials import draw_items

    source = find_source(dense)
    family = source.family.name
    choose_device(recipe.compute.device)
    check_place(folder)
    usable = _usable_by(source, recipe) if on_bad_prompt == "skip" else None
    data = _largest_data(candidates, recipe.data)
    calibrating, held_out = (
        calibration_prompts(family, calibration, data, is_cataloged(dense), reporter, usable, seed)
        if calibration is not None or _needs_calibration(candidates)
        else ([], [])
    )
    questions = draw_items(family, tasks, items, split, reporter)
    followed = behaviour_prompts(family, manifest, prompts, split, data.holdout, reporter, usable)
    followed = _unseen(followed, [*calibrating, *held_out], reporter)
    return compare_models(
        source,
        candidates,
        folder,
        items=questions,
        prompts=followed,
        origin=origin(questions, followed, split, manifest),
        calibration=calibrating,
        holdout=held_out,
        recipe=recipe,
        critical=critical,
        seeds=seeds,
        reporter=reporter,
    )


def _usable_by(source: Source, recipe: Recipe) -> Usable:
    """A function that raises where the dense model cannot be given a prompt."""
    from onptq.models.processing import PromptProcessor

    special = recipe.data.special_tokens
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config, special)
    return partial(processor.check, max_new=recipe.follow.max_tokens)


def _unseen(prompts: Sequence[Prompt], calibration: Sequence[Prompt], reporter: Reporter) -> list[Prompt]:
    """The prompts that are no calibration prompts: on those, candidates built here would look better than they are."""
    from onptq.data.manifest import repeated

    seen = repeated(prompts, calibration)
    if not seen:
        return list(prompts)
    if len(seen) == len(prompts):
        raise OnPTQError(
            f"all {len(prompts)} prompts that behaviour is compared on are calibration prompts too; expected others, by "
            "--manifest"
        )
    reporter.warn(
        f"{len(seen)} of {len(prompts)} prompts that behaviour is compared on are calibration prompts too, e.g. {seen[0]}: "
        "they are left out"
    )
    taken = {prompt.ordinal for prompt in seen}
    return [prompt for prompt in prompts if prompt.ordinal not in taken]


def _largest_data(candidates: Sequence[Candidate], base: DataConfig) -> DataConfig:
    """The most prompts that any candidate wants."""
    from onptq.evaluate.candidates import MethodCandidate

    wanted = [base, *(one.recipe.data for one in candidates if isinstance(one, MethodCandidate))]
    most = {name: max(getattr(one, name) for one in wanted) for name in ("prompts", "holdout")}
    return base.model_copy(update=most)


def _needs_calibration(candidates: Sequence[Candidate]) -> bool:
    from onptq.evaluate.candidates import MethodCandidate

    return any(isinstance(one, MethodCandidate) and one.recipe.needs_prompts for one in candidates)
