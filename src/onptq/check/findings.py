"""What checks return: findings of what is wrong, and one row per check for `onptq verify`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """A defect of a checkpoint, or, as a `note`, a property worth knowing."""

    name: str
    what: str
    why: str
    fixable: bool = False  # whether `--fix` corrects it
    note: bool = False


@dataclass(frozen=True)
class Check:
    """One check with its outcome."""

    name: str
    passed: bool
    seen: str


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
