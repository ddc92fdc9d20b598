"""A plan in a terminal: the sections, and last, where the eye rests, the verdict and the command to run next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from optforge.plan.document import REFUSED, PlanFile, Study
from optforge.report import plan_sections as sections
from optforge.report import plan_view as view

COLOURS = {"gain": "green", "no_gain": "yellow", "regression": "red", "does_not_fit": "red", "unknown": "yellow"}
LABELS = {
    "downgrade": "yellow",
    "warning": "yellow",
    "missed": "red",
    "unknown": "yellow",
    "refused": "red",
    "over shared memory": "red",
    "to fit": "cyan",
    "instead": "cyan",
}
NARROW = 120
"""Columns below which tables keep only what the verdict needs."""


def show(file: PlanFile, console: Console, folder: str) -> None:
    """One plan in full, or several as one table."""
    if len(file.plans) == 1:
        _one(file.plans[0], console)
    else:
        _several(file.plans, console)
    _say(console, f"[dim]plan:[/dim] {escape(folder)}")


def _one(study: Study, console: Console) -> None:
    _say(console, f"[bold]Plan[/bold] {escape(view.title(study))}")
    _say(console, f"[dim]{view.LABEL}[/dim]")
    _head(console, "1 Steps, in the order in which they run")
    _table(console, sections.step_table(study))
    _lines(console, sections.step_lines(study))
    if study.fit is not None:
        _head(
            console,
            f"2 Memory, predicted for each of {study.fit.devices} devices"
            if study.fit.devices > 1
            else "2 Memory, predicted for one device",
        )
        _table(console, sections.fit_table(study.fit))
        if study.fit.fits is False:
            _table(console, sections.degree_table(study.fit))
        _lines(console, sections.fit_lines(study.fit))
    if study.speed is not None:
        _head(console, f"3 Speed, predicted for {study.target.get('name')}")
        _table(console, sections.speed_table(study.speed))
        if study.speed.top:
            _say(console, "[dim]The ten costliest kernels of the whole recipe:[/dim]")
            _table(console, sections.top_table(study.speed))
        _lines(console, sections.speed_lines(study.speed))
    if study.kernels is not None:
        _head(console, f"4 Kernels, compiled here for {study.target.get('arch')}")
        _table(console, sections.kernel_table(study.kernels))
        _lines(console, sections.kernel_lines(study.kernels))
    if study.xla is not None:
        _head(console, f"4 The program of one pass, compiled here by XLA for {study.target.get('arch')}")
        _table(console, sections.xla_table(study))
        _lines(console, sections.xla_lines(study.xla))
    colour = COLOURS[study.verdict.outcome]
    _say(console, f"\n[bold]5 Verdict: [{colour}]{view.headline(study)}[/][/bold]")
    _lines(console, view.verdict_lines(study))
    _next(console, study)


def _next(console: Console, study: Study) -> None:
    """Commands are never wrapped, so that they can be pasted."""
    verdict = study.verdict
    if verdict.why:
        _lines(console, [("note", verdict.why)])
    if verdict.command:
        console.print(f"[cyan]next[/]          {escape(verdict.command)}", highlight=False, soft_wrap=True)
    if verdict.instead:
        _lines(console, [("or", f"predicted to be faster; quality risk {verdict.instead_quality}:")])
        console.print(f"              {escape(verdict.instead)}", highlight=False, soft_wrap=True)


def _several(studies: Sequence[Study], console: Console) -> None:
    first = next((study for study in studies if study.status != REFUSED), studies[0])
    _say(console, f"[bold]{len(studies)} plans[/bold], {escape(str(first.model.get('name')))}, {escape(view.workload(first))}")
    _say(console, f"[dim]{view.LABEL}[/dim]\n")
    _table(console, view.comparison(studies))
    _lines(console, [("refused", f"{who}: {why}") for who, why in view.refusals(studies)])
    for study in studies:
        if study.verdict.command:
            console.print(f"[cyan]next[/]          {escape(study.verdict.command)}", highlight=False, soft_wrap=True)


def _head(console: Console, text: str) -> None:
    _say(console, f"\n[bold]{escape(text)}[/bold]")


def _table(console: Console, table: sections.Table) -> None:
    if not table.rows:
        return
    if console.width < NARROW:
        table = table.narrowed()
    drawn = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(table.head):
        drawn.add_column(name, justify="left" if name in table.left else "right", no_wrap=index == 0)
    for number, row in enumerate(table.rows):
        cells = []
        for name, cell in zip(table.head, row, strict=True):
            colour = COLOURS.get(table.marks.get((number, name), ""))
            cells.append(f"[{colour}]{escape(cell)}[/]" if colour else escape(cell))
        drawn.add_row(*cells)
    console.print(drawn)


def _lines(console: Console, lines: Iterable[sections.Line]) -> None:
    """Label and text in two columns, so that a long text stays beside its label."""
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=12)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(f"[{LABELS.get(label, 'dim')}]{escape(label)}[/]", escape(text))
    if grid.row_count:
        console.print(grid, highlight=False)


def _say(console: Console, markup: str) -> None:
    console.print(markup, highlight=False, soft_wrap=not console.is_terminal)
