"""The geometry of the page's charts: where bars, intervals and points lie; the template draws them.

Charts are inline SVG and CSS of a few kilobytes. A plotting library would add some four megabytes of script to every
report, and a page with script cannot be opened everywhere a report is sent to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optforge.report import figures, view
from optforge.spec import Json, Report

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 440, 300, 48, 40, 14, 26
NO_PEAK = "n/a: no published peak for this device"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of the waterfall; positions are percent of the chart's width, from zero."""

    row: view.Row
    width: float
    change_left: float
    change_width: float
    tone: str
    low: float | None
    high: float | None

    @property
    def measured(self) -> bool:
        return self.width > 0


def waterfall(report: Report) -> list[Bar]:
    """Time per call, row after row, with what each step took away or added and the 95% interval of its ratio.

    The interval is that of the ratio to the row before, on this row's time.
    """
    rows = view.rows(report)
    times = [row.p50_ms for row in rows]
    top = max((time for time in times if time is not None), default=0) * 1.06
    bars: list[Bar] = []
    previous: float | None = None
    for row, time in zip(rows, times, strict=True):
        bars.append(_bar(row, time, previous, top))
        if time is not None and row.kept:
            previous = time
    return bars


def _bar(row: view.Row, time: float | None, previous: float | None, top: float) -> Bar:
    if time is None or not top:
        return Bar(row=row, width=0, change_left=0, change_width=0, tone=view.NEUTRAL, low=None, high=None)
    before = time if previous is None else previous
    ratio = row.vs_previous
    interval = ratio if ratio and ratio.unit == "latency" and figures.exists(ratio.low) and ratio.low > 0 else None
    return Bar(
        row=row,
        width=_percent(time, top),
        change_left=_percent(min(time, before), top),
        change_width=_percent(abs(time - before), top),
        tone=view.GOOD if time <= before else view.BAD,
        low=_percent(time * ratio.value / interval.high, top) if ratio and interval else None,
        high=_percent(time * ratio.value / interval.low, top) if ratio and interval else None,
    )


def _percent(value: float, top: float) -> float:
    return round(min(100.0, 100 * value / top), 2)


@dataclass(frozen=True, kw_only=True)
class Amount:
    """One bar of bytes; `share` is percent of the longest bar of its group."""

    name: str
    text: str
    share: float


def amounts(report: Report, attribute: str) -> list[Amount]:
    """Bytes of one kind (`weight_bytes`, `peak_memory_bytes`) before and after."""
    rows = (("baseline", report.baseline), ("compiled baseline", report.compiled_baseline), ("optimized", report.optimized))
    found = [(name, getattr(row, attribute) if row else None) for name, row in rows if row is not None or name != "compiled baseline"]
    top = max((value for _, value in found if value), default=0)
    return [Amount(name=name, text=figures.nbytes(value), share=_percent(value or 0, top) if top else 0) for name, value in found]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row on the roofline, in the drawing's coordinates."""

    x: float
    y: float
    name: str
    text: str
    predicted: bool = False


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A log-log drawing: the roof, its name, the points under it, and the ticks of both axes."""

    label: str
    roof: str
    peak: str
    bandwidth: str
    points: list[Point]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def rooflines(report: Report) -> list[Roofline | str]:
    """The measured rows under the device's roof, then the predictions under the target's; a sentence where there is none."""
    counted = _counts(report)
    rows = [("baseline", report.baseline), ("optimized", report.optimized)]
    measured = [(name, counted[name], (row.latency_ms.get("p50") or 0) / 1000) for name, row in rows if row is not None and name in counted]
    drawings: list[Roofline | str] = [_drawing(report, report.device, measured, view.measured_label(report), predicted=False)]
    times = [(name, (report.predicted.get(name) or {}).get("latency_ms")) for name in counted]
    predicted = [(name, counted[name], time / 1000) for name, time in times if isinstance(time, int | float) and time > 0]
    if predicted and (report.target.get("peak_flops") or not view.is_stand_in(report)):
        facts = report.target if report.target.get("peak_flops") else report.device
        drawings.append(_drawing(report, facts, predicted, view.predicted_label(report), predicted=True))
    return drawings


def _counts(report: Report) -> dict[str, tuple[float, float]]:
    """FLOP and bytes of one call before and after, as the plan counted them: they do not depend on the device."""
    found = {}
    for name in ("baseline", "optimized"):
        values = report.predicted.get(name)
        values = values if isinstance(values, dict) else {}
        flops, moved = values.get("flops"), values.get("bytes")
        if flops and moved:
            found[name] = (float(flops), float(moved))
    return found


def _drawing(
    report: Report, facts: dict[str, Json], rows: list[tuple[str, tuple[float, float], float]], label: str, *, predicted: bool
) -> Roofline | str:
    peaks, bandwidth = facts.get("peak_flops") or {}, facts.get("bandwidth_bytes_per_s")
    dtype = str(report.model.get("dtype") or "fp32")
    peak = peaks.get(dtype)
    if not peak or not bandwidth:
        return NO_PEAK
    rows = [(name, work, seconds) for name, work, seconds in rows if seconds > 0]
    if not rows:
        return "n/a: the work of one call was not counted"
    places = [(name, flops / moved, flops / seconds) for name, (flops, moved), seconds in rows]
    ridge = peak / bandwidth
    x_low, x_high = _decades([ridge, *(x for _, x, _ in places)])
    y_low, y_high = _decades([peak, *(y for _, _, y in places)])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_low) / (x_high - x_low)
        up = (math.log10(y) - y_low) / (y_high - y_low)
        return round(LEFT + across * (WIDTH - LEFT - RIGHT), 1), round(HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP), 1)

    start = max(10**x_low, 10**y_low / bandwidth)
    corners = [at(start, start * bandwidth), at(ridge, peak), at(10**x_high, peak)]
    return Roofline(
        label=label,
        roof=" ".join(f"{x},{y}" for x, y in corners),
        peak=f"{dtype} peak {figures.rate(peak, 'FLOP/s')}",
        bandwidth=f"memory {figures.rate(bandwidth, 'B/s')}",
        points=[
            Point(x=at(x, y)[0], y=at(x, y)[1], name=name, text=figures.rate(y, "FLOP/s"), predicted=predicted) for name, x, y in places
        ],
        x_ticks=[(at(10.0**e, 10.0**y_low)[0], figures.significant(10.0**e, 1)) for e in range(x_low, x_high + 1)],
        y_ticks=[(at(10.0**x_low, 10.0**e)[1], figures.prefixed(10.0**e, 1)) for e in range(y_low, y_high + 1)],
    )


def _decades(values: list[float]) -> tuple[int, int]:
    """Whole decades around `values`, at least two."""
    low, high = math.floor(math.log10(min(values)) - 0.2), math.ceil(math.log10(max(values)) + 0.2)
    return low, max(high, low + 2)
