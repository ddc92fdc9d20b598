"""The findings in a terminal: what to leave out, then the most sensitive layers."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from optforge.sensitivity import record
from optforge.sensitivity.findings import Sensitivity

LONG = 40
"""Entries of a list that a terminal still prints."""
NARROW = 100
"""Columns below which the estimates of perplexity and the layers' own SQNR are left to the files."""


def show(found: Sensitivity, console: Console, folder: str) -> None:
    """Prints the advice, ready to paste, a table for each scheme, and where the files are."""
    _line(console, f"[bold]Sensitivity of {escape(found.model)}[/bold]")
    for sentence in record.lead(found):
        if sentence:
            _line(console, f"[dim]{escape(sentence)}[/dim]")
    for scheme in found.schemes:
        console.print()
        console.print(_table(found, scheme, console.width))
    for one in found.advice:
        console.print()
        colour = "green" if one.within else "yellow" if one.best is not None else "red"
        _line(console, f"[{colour}]{escape(one.scheme)}[/{colour}]: {escape(record.said(one))}")
        for left, words in record.choices(one):
            _line(console, f"  {escape(words)}")
            long = len(left.ignore) > LONG
            _line(console, "  [dim]a long list, in the files below[/dim]" if long else f"  {escape(record.ignore(left))}")
    console.print()
    _line(console, f"[dim]table, plot, csv and json:[/dim] {escape(folder)}")


def _line(console: Console, markup: str) -> None:
    """One line that a terminal folds and a pipe does not: a list to paste must not be broken."""
    console.print(markup, soft_wrap=True, highlight=False)


def _table(found: Sensitivity, scheme: str, width: int) -> Table:
    hidden = {"est. ppl", "SQNR dB", "meas. ppl"} if width < NARROW else set()
    cells = list(record.rows(found, scheme))
    hidden |= {head for index, head in enumerate(record.HEADS) if all(row[index] in ("", "n/a") for row in cells)}
    shown = [index for index, head in enumerate(record.HEADS) if head not in hidden]
    rest = len(cells) - record.SHOWN
    title = f"{scheme}, the most sensitive of {len(cells)} layers" if rest > 0 else scheme
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index in shown:
        table.add_column(record.HEADS[index], justify="left" if index in (0, len(record.HEADS) - 1) else "right", overflow="fold")
    for row in cells[: record.SHOWN]:
        table.add_row(*(Text(row[index]) for index in shown))
    return table
