"""The columns of a comparison, and the comparison in a terminal and in Markdown.

Columns are made here once and drawn everywhere, the page too. A column that is the same for all rows, or that no row has
a figure for, is left out, so that three runs stay readable; what was left out is said once above the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optforge.compare.comparison import MEASURED, TIES, Comparison, Row
from optforge.compare.load import Entry
from optforge.compare.metrics import LOWER, Metric, text
from optforge.compare.settings import ABSENT
from optforge.report import cost, figures, markdown, view
from optforge.report.terminal import COLOURS, NARROW
from optforge.spec import Ratio

TERMINAL_ROWS = 40
"""Rows of one kind that a terminal shows; a pipe and every file get all of them."""
TOLD = 12
"""Differing settings, and groups of failures, that are listed before the rest is counted."""
VALUES = 4
"""Values of one setting that are listed."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: a key for programs, a head for readers, and the text of a row's cell."""

    key: str
    title: str
    cell: Callable[[Row], str]
    left: bool = False
    narrow: bool = True
    """Whether it stays in a narrow terminal."""


def columns(comparison: Comparison, rows: Sequence[Row]) -> list[Column]:
    """The columns that say something about these rows, all of one kind."""
    measured = bool(rows) and rows[0].kind == MEASURED
    shown = [_figure(metric, rows) for metric in comparison.shown(rows)]
    if not measured:
        where = Column(key="where", title="predicted for", cell=lambda row: view.target_name(row.report), left=True)
        return [*_leading(rows), where, *shown, *_trailing(comparison, rows)]
    ratios = [
        Column(key="reference", title="reference", cell=lambda row: figures.milliseconds(row.reference_ms), narrow=False),
        Column(key="ratio", title="vs reference", cell=ratio),
    ]
    latency = [column for column in shown if column.key == "latency"]
    others = [column for column in shown if column.key != "latency"]
    p90 = Column(key="p90", title="p90", cell=lambda row: figures.milliseconds(row.p90_ms), narrow=False)
    return [*_leading(rows), *latency, p90, *ratios, *others, *_trailing(comparison, rows)]


def _measured_on(row: Row) -> str:
    return row.where.removeprefix("measured on ")


def ratio(row: Row) -> str:
    """How many times better than its reference, in what the recipe is for."""
    return times(row.ratio)


def times(value: Ratio | None, *, interval: bool = True) -> str:
    """A ratio of times, unless it says `memory` or `size`."""
    if value is None or value.unit not in view.WORDS:
        return figures.ratio(value, interval=interval)
    return f"{figures.ratio(value, interval=interval and value.low < value.high)} {value.unit}"


def _leading(rows: Sequence[Row]) -> list[Column]:
    found = [
        Column(key="place", title="#", cell=lambda row: str(row.place) if row.place is not None else ""),
        Column(key="run", title="run", cell=lambda row: row.name, left=True),
    ]
    if rows[0].kind == MEASURED:
        found.append(Column(key="verdict", title="verdict", cell=lambda row: row.report.verdict, left=True))
    if any(row.group for row in rows):
        found.append(Column(key="group", title="conditions", cell=lambda row: row.group, left=True))
    if any(view.is_stand_in(row.report) for row in rows) or len({row.where for row in rows}) > 1:
        found.append(Column(key="where", title="measured on", cell=_measured_on, left=True, narrow=False))
    return [column for column in found if column.key != "where" or rows[0].kind == MEASURED]


def _trailing(comparison: Comparison, rows: Sequence[Row]) -> list[Column]:
    if not any(row.pareto for row in rows) or len(rows) < 2:
        return []
    return [Column(key="pareto", title="front", cell=lambda row: "*" if row.pareto else "", left=True, narrow=False)]


def _figure(metric: Metric, rows: Sequence[Row]) -> Column:
    heads = {
        "latency": "p50",
        "throughput": "speed",
        "size": "weights",
        "cost": _one(rows, lambda row: cost.title(row.report), "cost per million"),
    }
    wide = metric.key in ("throughput", "memory", "size")
    return Column(
        key=metric.key,
        title=heads.get(metric.key, metric.title),
        cell=lambda row: text(metric, row.values.get(metric.key), row.report),
        narrow=not wide,
    )


def _one(rows: Sequence[Row], say: Callable[[Row], str], otherwise: str) -> str:
    """What all rows say, if they say the same."""
    said = {say(row) for row in rows}
    return said.pop() if len(said) == 1 else otherwise


def heading(comparison: Comparison, rows: Sequence[Row]) -> str:
    """`Measured on cpu, by latency` or `Predicted for a100, by latency: never ranked with measured figures`."""
    measured = rows[0].kind == MEASURED
    where = _one(rows, lambda row: row.where, "measured" if measured else "predicted")
    plain = f"{where[:1].upper()}{where[1:]}, {best(comparison.by)} first"
    return plain if measured else f"{plain}; never ranked with measured figures"


def best(metric: Metric) -> str:
    """`lowest latency`, `highest throughput`."""
    return f"{'lowest' if metric.better == LOWER else 'highest'} {metric.title}"


def legend(comparison: Comparison, rows: Sequence[Row]) -> str:
    """What the marks of the table mean."""
    x, y = comparison.axes
    parts = [TIES[rows[0].kind]] if len(rows) > 1 else []
    if any(column.key == "pareto" for column in columns(comparison, rows)):
        parts.append(f"Front *: no other of these runs is as good in both {x.title} and {y.title}.")
    if rows[0].kind == MEASURED:
        parts.append("Reference: the same model compiled, or as loaded where the recipe does not compile. In brackets the 95% interval.")
    return " ".join(parts)


def about(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """What there is to know beside the rows: (`warning`, conditions that differ), (`note`, ...), (`differ`, settings)."""
    for item in comparison.differences:
        yield "warning", f"{item.condition} differs: {item}"
    for note in comparison.notes:
        yield "note", note
    for key in comparison.deciding[:TOLD]:
        values = list(dict.fromkeys(own.get(key, ABSENT) for own in comparison.settings.values()))
        yield "differ", f"{key}: {', '.join(values[:VALUES])}{_more(values)}"
    if len(comparison.deciding) > TOLD:
        yield "differ", f"and {len(comparison.deciding) - TOLD} more settings"
    rest = len(comparison.differing) - len(comparison.deciding)
    if rest:
        yield "differ", "1 more setting, which follows from those" if rest == 1 else f"{rest} more settings, which follow from those"


def failures(failed: Sequence[tuple[str, Entry]]) -> list[tuple[str, list[str]]]:
    """Why runs brought no figures, and which: the commonest reason first."""
    found: dict[str, list[str]] = {}
    for name, entry in failed:
        found.setdefault(f"{entry.report.verdict}: {entry.reason}", []).append(name)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def show(comparison: Comparison, console: Console) -> None:
    """The comparison in a terminal, or in plain lines where the output is a pipe."""
    for rows in (comparison.measured, comparison.predicted):
        if rows:
            _show_rows(comparison, rows, console)
    reasons = failures(comparison.failed)
    for reason, names in reasons[:TOLD]:
        _line(console, "red", f"{len(names)} without figures", f"{reason} ({', '.join(names[:VALUES])}{_more(names)})")
    if len(reasons) > TOLD:
        _line(console, "red", "failed", f"and {sum(len(names) for _, names in reasons[TOLD:])} more runs for other reasons")
    for kind, line in about(comparison):
        _line(console, {"warning": "yellow", "note": "cyan", "differ": "cyan"}[kind], kind, line)


def _show_rows(comparison: Comparison, rows: Sequence[Row], console: Console) -> None:
    narrow = console.is_terminal and console.width < NARROW
    shown = rows[:TERMINAL_ROWS] if console.is_terminal else rows
    console.print(f"[bold]{escape(heading(comparison, rows))}[/bold]", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    used = [column for column in columns(comparison, rows) if column.narrow or not narrow]
    for column in used:
        table.add_column(column.title, justify="left" if column.left else "right", no_wrap=column.key != "run", overflow="fold")
    for row in shown:
        table.add_row(*(_styled(column, row) for column in used))
    console.print(table)
    if len(shown) < len(rows):
        console.print(f"[dim]and {len(rows) - len(shown)} more rows, in the page and in --csv[/dim]", highlight=False)
    console.print(f"[dim]{escape(legend(comparison, rows))}[/dim]\n", highlight=False)


def _styled(column: Column, row: Row) -> str:
    cell = escape(column.cell(row))
    if column.key == "verdict":
        return f"[{COLOURS[view.TONES.get(row.report.verdict, view.BAD)]}]{cell}[/]"
    return cell if row.kind == MEASURED or column.key in ("place", "run", "where") or cell == figures.NONE else f"({cell})"


def _line(console: Console, colour: str, label: str, line: str) -> None:
    console.print(f"[{colour}]{label}:[/] {escape(line)}", highlight=False, soft_wrap=not console.is_terminal)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - VALUES} more" if len(names) > VALUES else ""


def to_markdown(comparison: Comparison) -> str:
    """The whole comparison as Markdown, for pull requests."""
    parts = [f"# Comparison of {len(comparison.settings)} runs"]
    for rows in (comparison.measured, comparison.predicted):
        if rows:
            used = columns(comparison, rows)
            cells = [[column.cell(row) for column in used] for row in rows]
            titles = [column.title for column in used]
            parts += [
                f"## {markdown.escaped(heading(comparison, rows))}",
                markdown.table(titles, cells, [column.left for column in used]),
                markdown.escaped(legend(comparison, rows)),
            ]
    told = [f"{len(names)} without figures: {reason} ({', '.join(names)})" for reason, names in failures(comparison.failed)]
    lines = [*told, *(f"{kind}: {line}" for kind, line in about(comparison))]
    parts.append("\n".join(f"- {markdown.escaped(line)}" for line in lines))
    return "\n\n".join(part for part in parts if part) + "\n"
