"""More prompts from few: other questions about the same images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onptq.data.collected import Collected, collect
from onptq.data.manifest import load_manifest, repeated
from onptq.data.prompts import Media, Prompt
from onptq.data.questions import QUESTIONS, pair_with_questions
from onptq.errors import OnPTQError


def expand(prompts: Sequence[Prompt], wanted: int, seed: int, questions: Sequence[str] = QUESTIONS) -> list[Prompt]:
    """The prompts, and where they are fewer than `wanted` after them questions about their images, up to that many.

    No question is asked about an image that a prompt with this image holds already. There may be too few for `wanted`.
    """
    images: dict[str, tuple[Media, str]] = {}
    for prompt in prompts:
        for image in prompt.images:
            images.setdefault(image.sha256, (image, prompt.id))
    there = {(image.sha256, text) for prompt in prompts for image in prompt.images for text in _texts(prompt)}
    ids = {prompt.id for prompt in prompts}
    expanded = list(prompts)
    ordinal = max((prompt.ordinal for prompt in prompts), default=-1)
    distinct = list(images.values())
    for place, question in pair_with_questions(len(distinct), questions, seed):
        if len(expanded) >= wanted:
            break
        image, origin = distinct[place]
        if (image.sha256, question) not in there:
            ordinal += 1
            name = next(name for name in (f"{origin}+{n}" for n in itertools.count(1)) if name not in ids)
            ids.add(name)
            expanded.append(image_prompt(ordinal, name, image, question))
    return expanded


def added(calibration: Sequence[Prompt], holdout: Sequence[Prompt], wanted: int, seed: int) -> list[Prompt]:
    """Questions about the images of `calibration`, as many as it lacks of `wanted` or fewer; none that is held out. Their
    ordinals follow all others."""
    lacking = max(0, wanted - len(calibration))
    more = expand(calibration, wanted + len(holdout), seed)[len(calibration) :] if lacking else []
    held = {prompt.ordinal for prompt in repeated(more, holdout)}
    first = 1 + max((prompt.ordinal for prompt in (*calibration, *holdout)), default=-1)
    kept = [prompt for prompt in more if prompt.ordinal not in held][:lacking]
    return [replace(prompt, ordinal=first + place) for place, prompt in enumerate(kept)]


def expanded(manifest: Path, wanted: int, seed: int = 0, questions: Sequence[str] = QUESTIONS) -> Collected:
    """The prompts of a manifest, no content twice, and as many more as are wanted and can be made."""
    prompts = load_manifest(manifest)
    given = collect(f"{len(prompts)} prompts of {manifest}", prompts, f"{manifest} has no prompts")
    if len(given.prompts) >= wanted:
        raise OnPTQError(
            f"--to {wanted}: {manifest} has {len(given.prompts)} different prompts; expected a larger number"
        )
    more = expand(given.prompts, wanted, seed, questions)
    if len(more) == len(given.prompts):
        raise OnPTQError(f"{manifest} has no image that a question could be added for: expected prompts with images")
    added = f"{len(more) - len(given.prompts)} of {wanted - len(given.prompts)} questions"
    return replace(given, read=f"{given.read}, added {added} about their images", prompts=more)


def image_prompt(ordinal: int, name: str, image: Media, question: str, place: str = "") -> Prompt:
    """One question about one image."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return Prompt(ordinal, name, [{"role": "user", "content": content}], (image,), place=place)


def _texts(prompt: Prompt) -> list[str]:
    return [
        part["text"].strip() for message in prompt.messages for part in message["content"] if part["type"] == "text"
    ]
