"""Prompts that were collected for calibration: which are new, which are left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from onptq.data.manifest import SHOWN_ERRORS, without_repeats
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError

REPEATED = "the same text and media are there already"
REMOTE = "media at an address: nothing is downloaded"
UNUSABLE = "cannot be used"


class Excluded(OnPTQError):
    """Its text is the reason for which a prompt is left out; others are left out for the same one."""


@dataclass(frozen=True)
class LeftOut:
    reason: str
    where: str
    why: str = ""  # more than the reason says, about this one

    @classmethod
    def because(cls, error: OnPTQError, where: str) -> LeftOut:
        return cls(str(error), where) if isinstance(error, Excluded) else cls(UNUSABLE, where, str(error))


@dataclass(frozen=True)
class Collected:
    """Prompts of different content, with ordinals from 0 and ids that are unique."""

    read: str  # what was read, in words: "10 images"
    prompts: Sequence[Prompt]
    left_out: Sequence[LeftOut] = ()

    def describe_left_out(self) -> Iterator[str]:
        """Lines: how many are left out, for each reason how many, and which are the first that need a second look."""
        if not self.left_out:
            return
        yield f"left out {len(self.left_out)}:"
        for reason, count in Counter(one.reason for one in self.left_out).most_common():
            yield f"{count:>6}  {reason}"
            explained = [one for one in self.left_out if one.reason == reason and one.why]
            yield from (f"          {_shown(one.where)}: {one.why}" for one in explained[:SHOWN_ERRORS])
            if len(explained) > SHOWN_ERRORS:
                yield "          ..."


def collect(read: str, entries: Iterable[Prompt | LeftOut], nothing: str) -> Collected:
    """The prompts among the entries, no content twice. `nothing` is the error where there is no prompt at all."""
    everything = list(entries)
    prompts = [one for one in everything if isinstance(one, Prompt)]
    left_out = [one for one in everything if isinstance(one, LeftOut)]
    unique = without_repeats(replace(prompt, ordinal=index) for index, prompt in enumerate(prompts))
    ordinals = {prompt.ordinal for prompt in unique}
    left_out += [LeftOut(REPEATED, one.place) for index, one in enumerate(prompts) if index not in ordinals]
    collected = Collected(read, list(_numbered(unique)), left_out)
    if not prompts:
        raise OnPTQError("\n".join((nothing, f"read {read}", *collected.describe_left_out())))
    return collected


def _shown(where: str) -> str:
    """The text as UTF-8 can have it: names of files may be any bytes."""
    return where.encode(errors="backslashreplace").decode()


def _numbered(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """The prompts with their place among them, and with a number after an id that is taken."""
    taken: set[str] = set()
    times: Counter[str] = Counter()
    for ordinal, prompt in enumerate(prompts):
        name = prompt.id
        while name in taken:
            times[prompt.id] += 1
            name = f"{prompt.id}-{times[prompt.id] + 1}"
        taken.add(name)
        yield replace(prompt, ordinal=ordinal, id=name)
