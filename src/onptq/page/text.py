"""Text that models and users wrote, made safe to be shown: no control character, no markup."""

from __future__ import annotations

import re

JOINERS = "\u200c\u200d"  # of scripts and emoji; without them letters fall apart
ESCAPED = re.compile(r"([\\`*_{}\[\]()#!|~$])")  # what Markdown and its dialects give a meaning within a line
ELLIPSIS = "…"


def visible(text: str) -> str:
    """The text with spaces of every kind as blanks, and what cannot be printed, terminal escapes above all, spelled out."""
    return "".join(
        " "
        if letter.isspace()
        else letter
        if letter.isprintable() or letter in JOINERS
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def one_line(text: str, most: int | None = None) -> str:
    """The text in one line, cut behind so many characters."""
    line = " ".join(visible(text).split())
    return line if most is None or len(line) <= most else line[: max(0, most - 1)].rstrip() + ELLIPSIS


def in_markdown(text: str, most: int | None = None) -> str:
    """The text in one line that every Markdown reader shows as it is."""
    line = one_line(text, most).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return ESCAPED.sub(r"\\\1", line)
