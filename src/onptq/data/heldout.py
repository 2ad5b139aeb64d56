"""Prompts that are held out from others, so that nothing of them is in the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from onptq.data.calibration import stratified
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError


def divide(
    prompts: Sequence[Prompt], *, holdout: int | None = None, share: float | None = None, seed: int = 0
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts that remain and those held out: `holdout` of them, or at most this share; drawn by the seed.

    Prompts with the same image, audio clip or beginning stay together. So there may be fewer held out than were asked for.
    """
    if holdout is not None and share is not None:
        raise OnPTQError("expected one of --holdout and --holdout-share, got both")
    if holdout is None and share is None:
        return list(prompts), []
    wanted = math.floor(share * len(prompts)) if share is not None else holdout or 0
    given = f"--holdout-share {share:g}" if share is not None else f"--holdout {holdout}"
    if not 0 < wanted < len(prompts):
        raise OnPTQError(
            f"{given}: {wanted} of {len(prompts)} prompts would be held out; expected at least 1, and not all"
        )
    held: set[int] = set()
    together = {members[0].ordinal: members for members in linked(prompts)}
    for first in stratified([members[0] for members in together.values()], seed):
        members = together[first.ordinal]
        if len(held) + len(members) <= wanted:
            held.update(prompt.ordinal for prompt in members)
    if not held:
        smallest = min(map(len, together.values()))
        raise OnPTQError(
            f"{given}: no {wanted} prompts can be held out, as at least {smallest} share an image, an audio clip or their "
            f"beginning and stay together; expected a larger number, or prompts of more images or conversations"
        )
    return [one for one in prompts if one.ordinal not in held], [one for one in prompts if one.ordinal in held]


def linked(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Groups of prompts that share something, each in order."""
    parents: dict[str, str] = {}

    def root(key: str) -> str:
        while parents.setdefault(key, key) != key:
            parents[key] = key = parents[parents[key]]
        return key

    for prompt in prompts:
        first, *others = _shared(prompt)
        for other in others:
            parents[root(other)] = root(first)
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(root(next(_shared(prompt))), []).append(prompt)
    return list(groups.values())


def _shared(prompt: Prompt) -> Iterator[str]:
    """What no prompt of the other side may have: the media, and the text of the first turn where it is text alone.

    Turns of one conversation share their first. The same question about different images is no overlap.
    """
    turns: list[list[Any]] = [message["content"] for message in prompt.messages if message["role"] == "user"]
    if all(part["type"] == "text" for part in turns[0]):
        yield "text/" + "".join(part["text"] for part in turns[0])
    yield from (f"media/{media.sha256}" for media in (*prompt.images, *prompt.audios))
