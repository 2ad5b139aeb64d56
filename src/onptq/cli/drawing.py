"""What `onptq compare` asks and calibrates with: embedded items and prompts, or those of manifests."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.data.prompts import Prompt
    from onptq.evaluate.candidates import Candidate
    from onptq.evaluate.items import Item
    from onptq.progress import Reporter
    from onptq.recipe import DataConfig

NO_TASKS = "none"
WHOLE_SPLIT = 0  # items per task: as many as the task's test split has


def draw_items(family: str, tasks: str | None, per_task: int | None, split: str, reporter: Reporter) -> list[Item]:
    """`per_task` of every task; None shares out a few among them."""
    from onptq.zoo.materials import ITEMS
    from onptq.zoo.suite import SIDES, TASKS, items, tasks_of

    if tasks == NO_TASKS or (tasks is None and family not in SIDES):
        return []
    known = tasks_of(family)
    chosen = known if tasks is None else list(dict.fromkeys(task.strip() for task in tasks.split(",")))
    for task in chosen:
        if task not in known:
            raise OnPTQError(
                f"--tasks: unknown task {task!r} for {family}; expected {NO_TASKS}, or of {', '.join(known)}"
            )
    share = max(1, ITEMS // len(chosen)) if per_task is None else per_task
    counts = {task: TASKS[task].test_items if share == WHOLE_SPLIT else share for task in chosen}
    drawn = []
    with reporter.phase("Draw items", total=sum(counts.values()), unit="items") as bar:
        for task, count in counts.items():
            for item in items(family, task, split, count):
                drawn.append(item)
                bar.advance()
    return drawn


def draw_prompts(
    family: str,
    manifest: Path | None,
    count: int,
    split: str,
    spent: int,
    reporter: Reporter,
    usable: Callable[[Prompt], object] | None = None,
) -> list[Prompt]:
    """`spent` held-out prompts choose the best iterate of what is built, so they cannot judge it."""
    if manifest is not None:
        return _load(manifest, reporter, usable, count)
    from onptq.zoo.suite import SIDES, prompts

    if not count or family not in SIDES:
        return []
    first = spent if split == "held-out" else 0
    with reporter.phase("Draw prompts", total=count, unit="prompts") as bar:
        drawn = prompts(family, split, first + count)[first:]
        bar.advance(count)
    return drawn


def origin(items: Sized, prompts: Sized, split: str, manifest: Path | None = None) -> str:
    """Where the two come from, for the report."""
    drawn = {"items": len(items), "prompts": len(prompts) if manifest is None else 0}
    own = [what for what, count in drawn.items() if count]
    said = [f"embedded {' and '.join(own)} of the {split} split"] if own else []
    if manifest is not None and len(prompts):
        said.append(f"prompts of {manifest.name}")
    return "; ".join(said)


def draw_calibration(
    family: str,
    manifest: Path | None,
    data: DataConfig,
    of_the_zoo: bool,
    reporter: Reporter,
    usable: Callable[[Prompt], object] | None = None,
) -> tuple[list[Prompt], list[Prompt]]:
    """As many prompts as the most demanding candidate wants, and those that choose its best iterate."""
    if manifest is not None:
        from onptq.data.calibration import split as divide

        return divide(
            _load(manifest, reporter, usable), prompts=data.prompts, holdout=data.holdout, share=data.holdout_share
        )
    if not of_the_zoo:
        raise OnPTQError("candidates that are built here need --calibration PROMPTS, a .jsonl or .parquet manifest")
    from onptq.zoo import materials

    return materials.draw_prompts(family, data, reporter)


def usable_by(dense: str, max_new: int) -> Callable[[Prompt], object]:
    """A function that raises where the dense model cannot be given a prompt."""
    from onptq.checkpoint.source import find_source
    from onptq.models.processing import PromptProcessor

    source = find_source(dense)
    return partial(PromptProcessor.from_folder(source.folder, source.family, source.config).check, max_new=max_new)


def _load(
    manifest: Path, reporter: Reporter, usable: Callable[[Prompt], object] | None, limit: int | None = None
) -> list[Prompt]:
    """The prompts of a manifest; with `usable` bad ones are skipped, which a warning says."""
    from onptq.data.calibration import describe_skipped
    from onptq.data.manifest import load_manifest

    bad: list[str] | None = None if usable is None else []
    prompts = load_manifest(manifest, limit=limit, usable=usable, bad=bad, note=reporter.note)
    if bad:
        reporter.warn(describe_skipped(bad))
    return prompts


def warn_of_repeats(prompts: Sequence[Prompt], calibration: Sequence[Prompt], reporter: Reporter) -> None:
    """Warn where candidates are compared on prompts that they were calibrated with."""
    from onptq.data.manifest import repeated

    if both := repeated(prompts, calibration):
        reporter.warn(
            f"{len(both)} of {len(prompts)} prompts that behaviour is compared on are calibration prompts too, e.g. "
            f"{both[0]}: candidates built here look better on them than they are"
        )


def largest_data(candidates: list[Candidate], base: DataConfig) -> DataConfig:
    from onptq.evaluate.candidates import Built

    wanted = [base, *(one.recipe.data for one in candidates if isinstance(one, Built))]
    most = {name: max(getattr(one, name) for one in wanted) for name in ("prompts", "holdout")}
    return base.model_copy(update=most)


def needs_calibration(candidates: list[Candidate]) -> bool:
    from onptq.evaluate.candidates import Built

    return any(isinstance(one, Built) and one.method != "rtn" for one in candidates)
