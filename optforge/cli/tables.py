"""Two or three columns for a reader, and the same columns as plain text for a pipe.

A terminal gets wrapped columns; a pipe gets one row a line, so that `grep` and `cut` work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints rows of equal length with aligned columns, the last one free in width."""
    if sys.stdout.isatty():
        _terminal(rows, title)
    else:
        _plain(rows, title)


def _plain(rows: Sequence[Sequence[str]], title: str) -> None:
    if title:
        print(title)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())
    if title:
        print()


def _terminal(rows: Sequence[Sequence[str]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), title=title or None, title_justify="left")
    for index in range(len(rows[0]) if rows else 0):
        table.add_column(no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, because brackets in a description are not markup
    console = Console()
    console.print(table)
    if title:
        console.print()
