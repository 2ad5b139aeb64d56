"""The prompts of one run: which calibrate, which are held out, and the record of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from onptq.data.expand import added
from onptq.data.manifest import SHOWN_ERRORS, load_manifest, repeated, without_repeats
from onptq.data.prompt_table import prompt_columns
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError

ON_BAD_PROMPT = ("fail", "skip")
FEW_CALIBRATION, FEW_HELD_OUT = 100, 24  # below which there is a warning


class Sizes(Protocol):
    """How many prompts a run takes: the `data` section of a recipe."""

    @property
    def prompts(self) -> int: ...
    @property
    def holdout(self) -> int: ...
    @property
    def holdout_share(self) -> float: ...
    @property
    def expand(self) -> bool: ...


@dataclass(frozen=True)
class Prompts:
    calibration: Sequence[Prompt]
    holdout: Sequence[Prompt]
    given: int = 0  # prompts to choose from
    skipped: Sequence[str] = field(default=(), compare=False)  # why each bad one was left out
    duplicates: int = field(default=0, compare=False)  # prompts left out, as they are there already
    overlapping: int = field(default=0, compare=False)  # held-out prompts left out, as they calibrate
    from_file: bool = field(default=False, compare=False)  # a manifest's, to which its user can add some
    added: int = field(default=0, compare=False)  # calibration prompts that no manifest has: questions about its images

    @property
    def every(self) -> list[Prompt]:
        return [*self.calibration, *self.holdout]

    def describe(self) -> str:
        """One line: how many calibrate, how many are held out, of how many, with which media."""
        shown = describe_kinds(self.every)
        counts = f"{len(self.calibration)} prompts calibrate and {len(self.holdout)} are held out, of {self.given}"
        if self.added:
            counts += f", and of {self.added} further questions about images of these"
        return f"{counts} ({shown})" if shown else counts

    def warnings(self, calibrated: bool = True) -> list[str]:
        """Facts about these prompts that a user should know, where rounds calibrate on them or not."""
        texts = [describe_skipped(self.skipped)] if self.skipped else []
        if self.duplicates:
            texts.append(f"{self.duplicates} prompts are left out: the same text and media are there already")
        if self.overlapping:
            texts.append(f"{self.overlapping} held-out prompts are left out: they are calibration prompts too")
        calibration, holdout = len(self.calibration), len(self.holdout)
        if calibrated and self.from_file and (calibration < FEW_CALIBRATION or holdout < FEW_HELD_OUT):
            texts.append(
                f"{calibration} calibration and {holdout} held-out prompts are few: calibration may not help, and its figures "
                f"are rough; {FEW_CALIBRATION} and {FEW_HELD_OUT} or more are better"
            )
        return texts


def describe_skipped(bad: Sequence[str]) -> str:
    """How many prompts are skipped, and of the first ones which and why."""
    shown = "".join(f"\n  {why}" for why in bad[:SHOWN_ERRORS])
    many = "1 bad prompt is" if len(bad) == 1 else f"{len(bad)} bad prompts are"
    return f"{many} skipped:{shown}" + ("\n  ..." if len(bad) > SHOWN_ERRORS else "")


def describe_kinds(prompts: Sequence[Prompt]) -> str:
    """How many prompts have which media."""
    kinds = Counter(_kinds(prompt) for prompt in prompts)
    return ", ".join(f"{count} with {kind}" if kind else f"{count} text only" for kind, count in kinds.items())


def _kinds(prompt: Prompt) -> str:
    return " and ".join(kind for kind, media in (("image", prompt.images), ("audio", prompt.audios)) if media)


def check_on_bad_prompt(choice: str) -> None:
    if choice not in ON_BAD_PROMPT:
        raise OnPTQError(f"--on-bad-prompt {choice}: expected one of {', '.join(ON_BAD_PROMPT)}")


def gather_prompts(
    calibration: str | Path | Sequence[Prompt] | None,
    holdout: str | Path | Sequence[Prompt] | None,
    sizes: Sizes,
    modalities: frozenset[str],
    *,
    seed: int | None = 0,
    usable: Callable[[Prompt], object] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Prompts:
    """Which prompts calibrate and which are held out, no content twice; ordinals are unique over both.

    They are drawn by `seed`, of every modality and task alike; without a seed they are the first, as they are. A bad prompt is
    an error. With `usable`, which raises where a model cannot take a prompt, bad prompts are skipped.
    """
    if calibration is None:
        return Prompts((), ())
    bad: list[str] | None = None if usable is None else []

    def read(source: str | Path | Sequence[Prompt], first: int) -> list[Prompt]:
        if isinstance(source, str | Path):
            source = load_manifest(source, modalities=modalities, usable=usable, bad=bad, note=note)
        elif usable is not None and bad is not None:
            source = _keep_usable(source, usable, bad)
        return [replace(prompt, ordinal=first + index) for index, prompt in enumerate(source)]

    candidates = read(calibration, 0)
    if not candidates:
        raise OnPTQError(
            "\n".join(("there are no calibration prompts; expected at least one", *(bad or ())[:SHOWN_ERRORS]))
        )
    from_file = isinstance(calibration, str | Path)
    unique = candidates if seed is None else without_repeats(candidates)
    duplicates = len(candidates) - len(unique)
    if holdout is None:
        chosen, held = split(unique, prompts=sizes.prompts, holdout=sizes.holdout, share=sizes.holdout_share, seed=seed)
        chosen, held, more = *map(in_order, (chosen, held)), _added(chosen, held, sizes, seed)
        given = len(candidates)
        return Prompts(
            [*chosen, *more], held, given, tuple(bad or ()), duplicates, from_file=from_file, added=len(more)
        )
    others = read(holdout, len(candidates))
    held = others if seed is None else without_repeats(others)
    duplicates += len(others) - len(held)
    chosen = in_order(stratified(unique, seed)[: sizes.prompts])
    both = set() if seed is None else {prompt.ordinal for prompt in repeated(held, chosen)}
    held_out = [prompt for prompt in held if prompt.ordinal not in both]
    if held and not held_out:
        raise OnPTQError(f"all {len(held)} held-out prompts are calibration prompts too; expected others")
    given = len(candidates) + len(others)
    more = _added(chosen, held_out, sizes, seed)
    return Prompts([*chosen, *more], held_out, given, tuple(bad or ()), duplicates, len(both), from_file, len(more))


def _added(chosen: Sequence[Prompt], held: Sequence[Prompt], sizes: Sizes, seed: int | None) -> list[Prompt]:
    return added(chosen, held, sizes.prompts, seed or 0) if sizes.expand else []


def _keep_usable(prompts: Sequence[Prompt], usable: Callable[[Prompt], object], bad: list[str]) -> list[Prompt]:
    """The prompts that `usable` does not refuse; why the others are refused is appended to `bad`."""
    usable_prompts: list[Prompt] = []
    for prompt in prompts:
        try:
            usable(prompt)
            usable_prompts.append(prompt)
        except OnPTQError as error:
            bad.append(str(error))
    return usable_prompts


def split(
    manifest: Sequence[Prompt], /, *, prompts: int, holdout: int, share: float, seed: int | None = 0
) -> tuple[list[Prompt], list[Prompt]]:
    """Calibration and held-out prompts in the order of the draw: held out are spare ones, else at most `share`."""
    count = len(manifest)
    spare = count - min(count, prompts)
    held = min(holdout, max(spare, math.floor(share * count)))
    calibration = min(prompts, count - held)
    drawn = stratified(manifest, seed)
    return drawn[:calibration], drawn[calibration : calibration + held]


def in_order(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts as they follow one another in their manifest."""
    return sorted(prompts, key=lambda prompt: prompt.ordinal)


def stratified(prompts: Sequence[Prompt], seed: int | None) -> list[Prompt]:
    """All prompts in a random order of which every part has each modality and task (column `task`) in its share.

    Without a seed they keep their order."""
    if seed is None:
        return list(prompts)
    strata: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        strata.setdefault(f"{_kinds(prompt)}/{prompt.extra.get('task', '')}", []).append(prompt)
    placed: list[tuple[float, int, Prompt]] = []
    for name, members in strata.items():
        rng = Random(f"{seed}/{name}")
        rng.shuffle(members)
        offset = rng.random()
        placed += [((place + offset) / len(members), one.ordinal, one) for place, one in enumerate(members)]
    return [prompt for *_, prompt in sorted(placed, key=lambda entry: entry[:2])]


def write_run_prompts(prompts: Prompts, input_ids: Sequence[Sequence[int]], path: Path) -> None:
    """Write `prompts.parquet`: of every prompt its tokens, what it was made from, and its media."""
    roles = ["calibration"] * len(prompts.calibration) + ["holdout"] * len(prompts.holdout)
    tokens = {"role": pa.array(roles, pa.string()), "input_ids": pa.array(list(input_ids), pa.list_(pa.int32()))}
    pq.write_table(pa.table(prompt_columns(prompts.every) | tokens), path)
