"""The one error a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class OnPTQError(Exception):
    """Something the user can fix: it says what was wrong, where, what was expected, and the valid values."""


class RaisedElsewhereError(OnPTQError):
    """The error of another process of the same job, which shows it."""


def printable(text: str, also: str = "") -> str:
    """The text with control characters, which steer a terminal, written out, but for those in `also`."""
    return "".join(letter if letter.isprintable() or letter in also else repr(letter)[1:-1] for letter in text)


def did_you_mean(given: str, valid: Iterable[str], likely: Sequence[str] = ()) -> str:
    """The hint " (did you mean X?)" with the `likely` names or else the nearest valid one; empty where none is near."""
    close = likely or difflib.get_close_matches(given, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
