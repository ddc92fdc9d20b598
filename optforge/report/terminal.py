"""The plan, the progress and the report in a terminal; the same as plain lines where the output is a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from optforge.report import cost, figures, losses, view
from optforge.spec import Report

COLOURS = {view.GOOD: "green", view.NEUTRAL: "yellow", view.BAD: "red"}
NARROW = 110
"""Columns below which the step table keeps only what the verdict needs."""


class _Done(ProgressColumn):
    """`3/8` for a stage of known length, nothing for one that only spins."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


class Progress:
    """Names the stage that runs, with its elapsed time; one line per finished stage where there is no terminal.

    Use as a context manager around the whole run.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._live = self.console.is_terminal
        self._current: list[TaskID] = []
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _Done(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._bars.stop()

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[None]:
        """Shows `name` while the block runs: a bar over `total` parts, or a spinner where that is unknown."""
        start = time.perf_counter()
        task = self._bars.add_task(escape(name), total=total) if self._live else None
        if task is not None:
            self._current.append(task)
        mark = "[red]failed[/red]"
        try:
            yield
            mark = "[green]done[/green]"
        finally:
            if task is not None:
                self._current.remove(task)
                self._bars.remove_task(task)
            self._line(f"{mark} {escape(name)} [dim]{figures.seconds(time.perf_counter() - start)}[/dim]")

    def advance(self, count: int = 1) -> None:
        """`count` more parts of the innermost stage are done."""
        if self._current:
            self._bars.advance(self._current[-1], count)

    def note(self, text: str) -> None:
        """A line of its own."""
        self._line(f"     [dim]{escape(text)}[/dim]")

    def _line(self, markup: str) -> None:
        self.console.print(markup, soft_wrap=not self._live, highlight=False)


def print_plan(plan: Mapping[str, Any], console: Console) -> None:
    """What will run, on what, in which order; missing keys are left out."""
    target, device = plan.get("target") or {}, plan.get("device") or {}
    where = f"on {device.get('name', '?')}"
    if device.get("is_target") is False:
        where += f", a stand-in for {target.get('name', '?')}"
    _print(console, f"[bold]Plan[/bold] for {escape(str(target.get('name', '?')))}, measured {escape(where)}")
    selected = {item.get("step"): item for item in plan.get("selected") or []}
    sizes = {item.get("step"): item.get("weight_bytes") for item in plan.get("bytes") or []}
    table = _table(("step", "use", "changes", "skips", "weights after", "predicted"))
    predictions = {item.get("name"): item for item in (plan.get("predicted") or {}).get("steps") or []}
    if "baseline" in sizes:
        table.add_row(
            "baseline", "", "", "", figures.nbytes(sizes["baseline"]), _predicted_ms((plan.get("predicted") or {}).get("baseline"))
        )
    for item in plan.get("order") or []:
        name = item.get("name")
        found = selected.get(name) or {}
        skips = (found.get("skipped") or 0) + (found.get("ignored") or 0)
        table.add_row(
            escape(str(name)),
            escape(str(item.get("use", ""))),
            figures.named("touched", found.get("touched")),
            str(skips) if skips else "",
            figures.nbytes(sizes[name]) if name in sizes else "",
            _predicted_ms(predictions.get(name)),
        )
    console.print(table)
    moved = [f"step {item.get('name')} was moved: {item['moved']}" for item in plan.get("order") or [] if item.get("moved")]
    _lines(console, "moved", moved)
    _lines(console, "downgrade", [_downgrade(item) for item in plan.get("downgrades") or []])
    _lines(console, "warning", plan.get("warnings") or [])


def _predicted_ms(values: Mapping[str, Any] | None) -> str:
    """A predicted time, in brackets so that nobody takes it for a measured one."""
    value = (values or {}).get("latency_ms")
    return f"({figures.milliseconds(value)})" if isinstance(value, int | float) else ""


def _downgrade(item: Mapping[str, Any]) -> str:
    return f"step {item.get('step')}: {item.get('reason')}"


def print_report(report: Report, console: Console) -> None:
    """The verdict in one line, the steps, quality, what to know, and the folder."""
    colour = COLOURS[view.TONES.get(report.verdict, view.BAD)]
    badge = view.BADGES.get(report.verdict, report.verdict)
    console.print()
    _print(console, f"[bold {colour}]{escape(badge)}[/]: {escape(view.verdict_line(report))}")
    console.print(_steps(report, narrow=console.width < NARROW))
    _quality(report, console)
    _lines(console, "loss", losses.sentences(report))
    _lines(console, "memory", [_memory(row) for row in losses.memory_rows(report)])
    _lines(console, "downgrade", [_downgrade(vars(item)) for item in report.downgrades])
    ranked = [
        f"{item.get('use')} ({_times(item.get('predicted_speedup'))} {view.predicted_label(report)})" for item in view.alternatives(report)
    ]
    if ranked:
        _lines(console, "instead", ranked[:3])
    _lines(console, "warning", view.warnings(report))
    _lines(console, "export", view.exports(report))
    if report.error:
        _lines(console, "error", [f"{report.error.get('type')}: {report.error.get('message')}"])
    if report.folder:
        _print(console, f"[dim]report:[/dim] {escape(report.folder)}")


def _memory(row: Sequence[str]) -> str:
    """`baseline: peak 2.1 GB, weights 538 MB, ...`."""
    return f"{row[0]}: " + ", ".join(f"{name} {size}" for name, size in zip(losses.MEMORY_HEAD[1:], row[1:], strict=True))


def _times(value: object) -> str:
    return figures.named("predicted_speedup", value)


def _steps(report: Report, *, narrow: bool) -> Table:
    head = NARROWED if narrow else WIDE
    money = [cost.title(report)] if cost.priced(report) else []
    table = _table([*head[:-1], *money, head[-1]], title=view.measured_label(report))
    for row in view.rows(report):
        cells = _cells(row, narrow=narrow)
        table.add_row(*cells[:-1], *([escape(view.row_cost(report, row))] if money else []), cells[-1])
    return table


NARROWED = ("row", "p50", "speed", "vs previous", "verdict")
WIDE = ("row", "use", "p50", "p90", "speed", "vs previous", "vs reference", "peak memory", "weights", "verdict")


def _cells(row: view.Row, *, narrow: bool) -> list[str]:
    latency = row.measured.latency_ms if row.measured else {}
    colour = COLOURS[view.TONES.get(row.verdict, view.BAD)] if row.verdict else "default"
    name, p50 = escape(row.name), figures.milliseconds(latency.get("p50"))
    verdict = f"[{colour}]{escape(row.verdict)}[/]" + ("" if row.kept else " [dim](dropped)[/dim]")
    if narrow:
        return [name, p50, row.speed, figures.ratio(row.vs_previous, interval=False), verdict]
    memory = figures.nbytes(row.measured.peak_memory_bytes if row.measured else None)
    weights = figures.nbytes(row.measured.weight_bytes if row.measured else None)
    ratios = [figures.ratio(row.vs_previous, interval=False), figures.ratio(row.vs_reference)]
    return [name, escape(row.use), p50, figures.milliseconds(latency.get("p90")), row.speed, *ratios, memory, weights, verdict]


def _quality(report: Report, console: Console) -> None:
    for line in view.quality_lines(report.quality):
        change = " -> ".join(part for part in (line.baseline, line.optimized) if part)
        _print(console, f"[dim]quality:[/dim] {escape(line.name)} {change} {line.difference}".rstrip())
    for limit in view.limits(report):
        mark = "[red]missed[/red]" if limit.missed else "held" if limit.used is not None else "not measured"
        _print(console, f"[dim]limit:[/dim] {escape(limit.name)} {limit.value}, {limit.bound}: {mark}")


def _table(head: Sequence[str], title: str | None = None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="dim", header_style="bold")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 or name in ("use", "verdict") else "right", no_wrap=index == 0)
    return table


def _lines(console: Console, label: str, lines: Iterable[object]) -> None:
    colour = {"warning": "yellow", "downgrade": "yellow", "error": "red"}.get(label, "cyan")
    for line in lines:
        _print(console, f"[{colour}]{label}:[/] {escape(str(line))}")


def _print(console: Console, markup: str) -> None:
    console.print(markup, highlight=False, soft_wrap=not console.is_terminal)
