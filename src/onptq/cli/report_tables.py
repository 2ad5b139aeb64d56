"""A report's tables on a terminal of any width: header words may go below each other, no number is ever cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from onptq.evaluate.report import ReportTable
    from onptq.evaluate.summary import Report

GAP = 2  # blanks beside a column
LEFT_OUT = "The intervals are in the report, they do not fit here."


def print_report(report: Report) -> None:
    from rich.console import Console

    from onptq.evaluate.report import notes, sentences, tables

    console = Console(highlight=False)
    for table in tables(report):
        print_table(console, table)
    console.print()
    for sentence in sentences(report):
        console.print(f"- {sentence}", markup=False)
    console.print()
    for note in notes(report):
        console.print(note, style="dim", markup=False)


def print_table(console: Console, table: ReportTable) -> None:
    if not console.is_terminal:  # a file has no width, and must not lose digits to a guessed one
        console.width = max(console.width, sum(_widths(table, whole_headers=True)))
    for part in fit(table, console.width):
        console.print()
        console.print(rendered(part, console.width))
    console.print(part.note, style="dim", markup=False)


def fit(table: ReportTable, width: int) -> list[ReportTable]:
    """The table; where that is too wide, with intervals below their values; else without them, in as many parts as it takes."""
    for shown in (table, _with_figures(table, lambda cell: cell.replace(" [", "\n["))):
        if sum(_widths(shown)) <= width:
            return [shown]
    bare = _with_figures(table, lambda cell: cell.partition(" [")[0])
    if bare.rows != table.rows:
        bare = replace(bare, note=f"{table.note} {LEFT_OUT}")
    return _parts(bare, width)


def rendered(table: ReportTable, width: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    natural, narrow = _widths(table, whole_headers=True), _widths(table)
    widths = natural if sum(natural) <= width else [min(narrow[0], width // 2), *narrow[1:]]
    rendered = Table(title=table.title, title_justify="left", title_style="bold", box=None, header_style="bold")
    for number, (column, wide) in enumerate(zip(table.header, widths, strict=True)):
        rendered.add_column(column, justify="right" if number else "left", width=wide - GAP, overflow="fold")
    for row in table.rows:
        rendered.add_row(*map(Text, row))
    return rendered


def _parts(table: ReportTable, width: int) -> list[ReportTable]:
    """Every part with the candidates' names and as many columns as fit beside them."""
    name, *columns = _widths(table)
    parts: list[list[int]] = []
    room = 0
    for number, wide in enumerate(columns, start=1):
        if wide > room or not parts:
            parts.append([0])
            room = width - min(name, width // 2)
        parts[-1].append(number)
        room -= wide
    return [
        replace(
            table,
            title=table.title if part is parts[0] else f"{table.title}, continued",
            header=[table.header[number] for number in part],
            rows=[[row[number] for number in part] for row in table.rows],
        )
        for part in parts
    ]


def _widths(table: ReportTable, whole_headers: bool = False) -> list[int]:
    from rich.cells import cell_len

    widths = []
    for number, title in enumerate(table.header):
        lines = [line for row in table.rows for line in row[number].splitlines()]
        lines += [title] if whole_headers else title.split()
        widths.append(GAP + max(map(cell_len, lines), default=0))
    return widths


def _with_figures(table: ReportTable, change: Callable[[str], str]) -> ReportTable:
    return replace(table, rows=[[row[0], *map(change, row[1:])] for row in table.rows])
