"""Writes the table of docs/reproduction.md from the committed results: python -m tools.docs.reproduction"""

from __future__ import annotations

from pathlib import Path

from onptq.reproduce.page import read_results, summary

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "reproduction.md", ROOT / "results" / "reproduce"
HEAD, NEXT = "## What was measured\n\n", "## What holds and what does not\n"


def with_table(page: str) -> str:
    """The page with the claims of all results in the place of those that it has."""
    before, _, behind = page.partition(HEAD)
    _, mark, rest = behind.partition(NEXT)
    if not mark:
        raise ValueError(f"{PAGE} has no {HEAD.strip()!r} before {NEXT.strip()!r}")
    return before + HEAD + summary(read_results(RESULTS), "../results/reproduce/") + "\n" + mark + rest


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
