"""Prompts of a comparison: those of manifests, or embedded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING

from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.data.prompts import Prompt
    from onptq.progress import Reporter
    from onptq.recipe import DataConfig

Usable = Callable[["Prompt"], object]
EMBEDDED = "zoo:"  # before the kind of embedded prompts, e.g. zoo:captions
EMBEDDED_DEFAULT = "zoo:mix"


def embedded_kind(manifest: Path | None) -> str | None:
    """The kind of embedded prompts that is named in place of a manifest; None where a manifest is named."""
    text = EMBEDDED_DEFAULT if manifest is None else str(manifest)
    return text.removeprefix(EMBEDDED) if text.startswith(EMBEDDED) else None


def behaviour_prompts(
    family: str,
    manifest: Path | None,
    count: int,
    split: str,
    spent: int,
    reporter: Reporter,
    usable: Usable | None = None,
) -> list[Prompt]:
    """The prompts that behaviour is compared on; the first `spent` held-out ones choose iterates, so they cannot judge them."""
    kind = embedded_kind(manifest)
    if manifest is not None and kind is None:
        return _once(_load(manifest, reporter, usable, count), manifest, reporter) if count else []
    from onptq.zoo.materials import draw_prompts

    return draw_prompts(family, split, count, reporter, spent if split == "held-out" else 0, kind or "mix")


def calibration_prompts(
    family: str,
    manifest: Path | None,
    data: DataConfig,
    cataloged: bool,
    reporter: Reporter,
    usable: Usable | None = None,
    seed: int = 0,
) -> tuple[list[Prompt], list[Prompt]]:
    """Calibration prompts for the most demanding candidate, and held-out prompts that choose its best iterate."""
    kind = embedded_kind(manifest)
    if manifest is not None and kind is None:
        from onptq.data.calibration import split as divide
        from onptq.data.expand import added

        loaded = _once(_load(manifest, reporter, usable), manifest, reporter)
        chosen, held = divide(loaded, prompts=data.prompts, holdout=data.holdout, share=data.holdout_share, seed=seed)
        return chosen + (added(chosen, held, data.prompts, seed) if data.expand else []), held
    if manifest is None and not cataloged:
        raise OnPTQError("candidates that are built here need --calibration PROMPTS, a .jsonl or .parquet manifest")
    from onptq.zoo.materials import draw_calibration

    return draw_calibration(family, data, reporter, kind or "mix")


def origin(items: Sized, prompts: Sized, split: str, manifest: Path | None = None) -> str:
    """The origin of items and prompts, in words."""
    drawn = {"items": len(items), "prompts": len(prompts) if manifest is None else 0}
    embedded = [what for what, count in drawn.items() if count]
    texts = [f"embedded {' and '.join(embedded)} of the {split} split"] if embedded else []
    if manifest is not None and len(prompts):
        texts.append(f"prompts of {manifest.name}")
    return "; ".join(texts)


def _load(manifest: Path, reporter: Reporter, usable: Usable | None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a manifest; with `usable` bad ones are skipped, which a warning says."""
    from onptq.data.calibration import describe_skipped
    from onptq.data.manifest import load_manifest

    bad: list[str] | None = None if usable is None else []
    prompts = load_manifest(manifest, limit=limit, usable=usable, bad=bad, note=reporter.note)
    if bad:
        reporter.warn(describe_skipped(bad))
    return prompts


def _once(prompts: Sequence[Prompt], manifest: Path, reporter: Reporter) -> list[Prompt]:
    """The prompts, each content once."""
    from onptq.data.manifest import without_repeats

    unique = without_repeats(prompts)
    if twice := len(prompts) - len(unique):
        reporter.note(f"{twice} of {len(prompts)} prompts of {manifest.name} repeat an earlier one and are used once")
    return unique
