"""The one error a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class OnPTQError(Exception):
    """Something the user can fix: it says what was wrong, where, what was expected, and the valid values."""


def did_you_mean(given: str, valid: Iterable[str], likely: Sequence[str] = ()) -> str:
    """The hint " (did you mean X?)" with the `likely` names or else the nearest valid one; empty where none is near."""
    close = likely or difflib.get_close_matches(given, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
