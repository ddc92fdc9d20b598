"""What a sweep says while it runs, and the one table at its end.

A terminal shows the running jobs with the last line of their own output; a pipe gets a line when a job starts and when
it ends. A failure is told when it happens, with the end of the job's log, not after the last job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from optforge import processes
from optforge.report import figures
from optforge.spec import Report
from optforge.sweep import outcome
from optforge.sweep.definition import finished
from optforge.sweep.store import DONE, ENDED_BADLY, RUNNING, Job, Sweep

COLOURS = {"done": "green", "failed": "red", "oom": "red", "timeout": "red", "interrupted": "yellow", "not_started": "yellow"}
REFRESH_S = 0.5
PIPE_WIDTH = 220
"""Columns of the last table where there is no terminal: a row stays one line."""
_NOTE = 100


class Display:
    """Shows one sweep; use as a context manager around it. Progress goes to `console`, which is stderr."""

    def __init__(self, sweep: Sweep, folder: Path, console: Console | None = None, *, slots: int = 1) -> None:
        self.sweep, self.folder, self.slots = sweep, folder, slots
        self.console = console or Console(stderr=True)
        self._starts: dict[int, float] = {}
        self._seconds: list[float] = []
        self._shown = 0.0
        self._waiting = 0
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, job: Job) -> None:
        self._starts[job.index] = time.monotonic()
        if self._live is None:
            self._line(f"[dim]start   {self._count(job)} {escape(job.folder)}{_on(job)}[/dim]")

    def kept(self, job: Job) -> None:
        """A job whose result is there already."""
        self._line(f"[dim]kept    {self._count(job)} {escape(job.folder)}[/dim]")

    def ended(self, job: Job) -> None:
        self._starts.pop(job.index, None)
        self._seconds.append(job.seconds or 0.0)
        colour = COLOURS.get(job.status, "default")
        self._line(f"[{colour}]{job.status:<11}[/] {self._count(job)} {escape(job.folder)} [dim]{figures.seconds(job.seconds)}[/dim]")
        if job.status in ENDED_BADLY:
            log = self.folder / job.folder / job.log
            self._line(f"        {escape(job.error or '')}")
            for line in processes.tail(log, outcome.TAIL_LINES):
                self._line(f"        [dim]| {escape(line)}[/dim]")
            self._line(f"        [dim]log: {escape(str(log))}[/dim]")

    def refresh(self, waiting: int) -> None:
        """Draws the running jobs anew, a few times a second."""
        self._waiting = waiting
        now = time.monotonic()
        if self._live is not None and now - self._shown >= REFRESH_S:
            self._shown = now
            self._live.update(self._running(), refresh=True)

    def remaining_s(self) -> float | None:
        """Seconds until the last known job ends, if the others take as long as those before them; None before the first end."""
        if not self._seconds:
            return None
        mean = sum(self._seconds) / len(self._seconds)
        now = time.monotonic()
        left = sum(max(mean - (now - start), 0.0) for start in self._starts.values())
        return (left + mean * self._waiting) / self.slots

    def _running(self) -> Group:
        ended = sum(job.ended for job in self.sweep.jobs)
        failed = sum(job.status in ENDED_BADLY for job in self.sweep.jobs)
        head = f"{ended} of {len(self.sweep.jobs)} jobs have ended, {failed or 'none'} badly"
        remaining = self.remaining_s()
        if remaining is not None:
            head += f"; about {figures.seconds(remaining)} left"
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for job in (job for job in self.sweep.jobs if job.status == RUNNING):
            last = processes.tail(self.folder / job.folder / job.log, 1)
            seconds = time.monotonic() - self._starts.get(job.index, time.monotonic())
            table.add_row(Text(f"{job.folder}{_on(job)}"), figures.seconds(seconds), Text((last or [""])[-1][:_NOTE], style="dim"))
        return Group(Text(head, style="bold"), table)

    def _count(self, job: Job) -> str:
        return f"{job.index + 1}/{len(self.sweep.jobs)}"

    def _line(self, markup: str) -> None:
        self.console.print(markup, highlight=False, soft_wrap=True)


def _on(job: Job) -> str:
    return f" on device {job.device}" if job.device is not None else ""


WIDE = ("job", "status", "verdict", "p50", "vs baseline", "vs compiled", "peak memory", "took", "note")
NARROW = ("job", "status", "verdict", "p50", "took")
NARROW_COLUMNS = 140
"""Columns of a terminal below which the table keeps what says how each job ended; the notes then follow, a line each."""


def print_table(sweep: Sweep, folder: Path, console: Console | None = None) -> None:
    """Every job in one table: how it ended, its verdict, its figures, and why it failed."""
    console = console or _stdout()
    head = NARROW if console.width < NARROW_COLUMNS else WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in head:
        table.add_column(name, justify="left" if name in ("job", "status", "verdict", "note") else "right")
    for job in sweep.jobs:
        cells = _cells(job, finished(folder / job.folder) if job.status == DONE else None)
        table.add_row(*(cells[name] for name in head))
    console.print(f"sweep {escape(str(folder))}", highlight=False, soft_wrap=True)
    console.print(table)
    for job in sweep.jobs if head is NARROW else ():
        if job.error:
            console.print(f"{job.index}: {escape(job.error)}", highlight=False, soft_wrap=True)
    console.print(summary(sweep.jobs), highlight=False)


def _stdout() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _cells(job: Job, report: Report | None) -> dict[str, Text | str]:
    measured = report.optimized if report is not None else None
    speedup = report.speedup if report is not None else {}
    return {
        "job": Text(job.folder),
        "status": Text(job.status, style=COLOURS.get(job.status, "")),
        "verdict": (job.verdict or "") if job.status == DONE else "",
        "p50": figures.milliseconds(measured.latency_ms.get("p50") if measured else None),
        "vs baseline": figures.ratio(speedup.get("vs_baseline"), interval=False),
        "vs compiled": figures.ratio(speedup.get("vs_compiled_baseline"), interval=False),
        "peak memory": figures.nbytes(measured.peak_memory_bytes if measured else None),
        "took": figures.seconds(job.seconds),
        "note": Text((job.error or "")[:_NOTE]),
    }


def summary(jobs: Sequence[Job]) -> str:
    """`12 jobs: 8 done, 2 failed, 1 oom, 1 timeout`."""
    counts: dict[str, int] = {}
    for job in jobs:
        counts[job.status] = counts.get(job.status, 0) + 1
    parts = [f"{count} {status.replace('_', ' ')}" for status, count in counts.items()]
    return f"{len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}: {', '.join(parts)}"
