"""Tables without lines, as commands print them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def make_table(*heads: str) -> Table:
    """Columns by their heads; those that end with > are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        right = head.endswith(" >")
        table.add_column(head.removesuffix(" >"), justify="right" if right else "left", overflow="fold")
    return table
