"""The comparison of a run's arms as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

NAMES = {"rtn": "RTN", "onptq": "OnPTQ"}
ABSENT = "-"


def print_comparison(comparison: Mapping[str, Any], held_out: str) -> None:
    """`held_out`: the prompts that mismatch and KL come from, in words; none where there are none."""
    from rich.console import Console

    console = Console(highlight=False)
    table = comparison_table(comparison)
    if not console.is_terminal:  # a file has no width, and must not lose digits to a guessed one
        console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print()
    console.print(table)
    console.print(explanation(comparison, held_out), style="dim", markup=False)


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """One row per arm: its score on every task, their average, and how it departs from the dense model."""
    from rich.table import Table

    arms: Mapping[str, Any] = comparison["arms"]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for task, score in arms["dense"]["tasks"].items():
        table.add_column(f"{task} WER" if score["measure"] == "word errors" else task, justify="right")
    for name in ("average", "flips", "mismatch", "KL"):
        table.add_column(name, justify="right")
    for name, arm in arms.items():
        scores = [_shown(score["percent"], "{:.1f}") for score in arm["tasks"].values()]
        on_policy = arm.get("on_policy") or {}
        table.add_row(
            NAMES.get(name, name),
            *scores,
            _shown(arm["average_percent"], "{:.1f}"),
            _shown((arm.get("flips") or {}).get("percent"), "{:.1f}%"),
            _shown(on_policy.get("mismatch_percent"), "{:.1f}%"),
            _shown(on_policy.get("kl"), "{:.4f}"),
        )
    return table


def explanation(comparison: Mapping[str, Any], held_out: str) -> str:
    tasks = comparison["arms"]["dense"]["tasks"].values()
    sizes = sorted({score["items"] for score in tasks})
    per_task = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    errors = " (WER: lower is better, not in the average)" if any(s["measure"] == "word errors" for s in tasks) else ""
    text = f"Scores in % on {per_task} test items per task{errors}. flips: answers that turned right or wrong against dense."
    if not held_out:
        return text
    return (
        f"{text} mismatch, KL: next-token decisions and distributions against dense, on the model's own rollouts from "
        f"{held_out}."
    )


def _shown(value: float | None, form: str) -> str:
    return ABSENT if value is None else form.format(value)
