"""The tables that commands print, made by rich."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDEST, _LINES = 10_000, 25
"""Columns and lines of the console: no line is wrapped. Unless both are given, rich assumes 80 columns on a dumb terminal."""


def table_lines(
    rows: Sequence[Sequence[str]], *, numbers: Collection[int] = (), boxed: bool = False, gap: int = 2, least: int = 0
) -> list[str]:
    """Return the lines of a table, which are as wide as its cells.

    Args:
        rows: Its cells, the same number in each row. A heading is a row like the others.
        numbers: Indexes of the columns that are aligned to the right.
        boxed: Whether lines are drawn around it and between its columns.
        gap: Spaces between columns without a box.
        least: Least width of the first column.
    """
    if not rows:
        return []
    table = Table(show_header=False, box=HEAVY_HEAD) if boxed else Table.grid(padding=(0, gap, 0, 0))
    for place in range(len(rows[0])):
        table.add_column(
            justify="right" if place in numbers else "left", no_wrap=True, min_width=least if place == 0 else None
        )
    for row in rows:
        table.add_row(*(Text(" ".join(cell.splitlines())) for cell in row))
    console = Console(color_system=None, force_terminal=False, width=_WIDEST, height=_LINES)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
