"""The loss curves of a training in words, in a few rows, and as a drawing; the page, Markdown and the terminal take them from here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optforge.report import charts, figures, view
from optforge.spec import LossCurve, Report, TrainingResult

SHOWN = 6
"""Steps that a table shows."""
PARTS = ("weights", "gradients", "optimizer", "rest")


def result(report: Report) -> TrainingResult | None:
    """The curves of the whole recipe, where the run was a training and they were compared."""
    return report.quality.training if report.quality is not None else None


def sentences(report: Report) -> list[str]:
    """What the losses say of the recipe, a line each; empty where the run compared none."""
    found = result(report)
    if found is None:
        return []
    own, baseline = found.own, found.baseline
    lines = [f"{len(own.losses)} steps over the same data in the same order (seed {own.seed}), from the weights as loaded"]
    if own.held_out is not None and baseline.held_out is not None:
        lines.append(
            f"loss on held-out data: {_nats(own.held_out_before)} before, {_nats(own.held_out)} after; "
            f"the baseline's after: {_nats(baseline.held_out)}"
        )
    lines.append(
        f"difference to the baseline {_signed(found.difference)} nats, allowed {_nats(found.limit)}; "
        f"two seeds of the baseline lie {_nats(found.band)} apart"
    )
    return lines


HEAD = ("step", "baseline", "baseline, other seed", "recipe")


def rows(report: Report) -> list[tuple[str, ...]]:
    """Losses of a few steps, first and last among them; the other seed sees other batches in each."""
    found = result(report)
    if found is None:
        return []
    count = len(found.own.losses)
    steps = sorted({round(index * (count - 1) / (SHOWN - 1)) for index in range(SHOWN)}) if count else []
    curves = (found.baseline, found.other_seed, found.own)
    return [(str(step + 1), *(_at(curve, step) for curve in curves)) for step in steps]


def memory_rows(report: Report) -> list[tuple[str, ...]]:
    """Peak memory of each measured row by what it is for; empty where the run was no training."""
    found = []
    for row in view.rows(report):
        parts = row.measured.memory_parts if row.measured is not None else {}
        if parts and row.measured is not None:
            found.append((row.name, figures.nbytes(row.measured.peak_memory_bytes), *(figures.nbytes(parts.get(name)) for name in PARTS)))
    return found


MEMORY_HEAD = ("row", "peak", "weights", "gradients", "optimizer states", "activations and the rest")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve in the drawing's coordinates."""

    name: str
    points: str
    style: str


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Loss over steps."""

    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def drawing(report: Report) -> Drawing | None:
    """The curves as polylines; None where there are none to draw."""
    found = result(report)
    if found is None or len(found.own.losses) < 2:
        return None
    curves = (("baseline, other seed", found.other_seed, "other"), ("baseline", found.baseline, "before"), ("recipe", found.own, "after"))
    values = [loss for _, curve, _ in curves for loss in curve.losses if math.isfinite(loss)]
    if not values:
        return None
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high, steps = low - margin, high + margin, len(found.own.losses)

    def at(step: float, loss: float) -> tuple[float, float]:
        across, up = (step - 1) / (steps - 1), (loss - low) / (high - low)
        x = charts.LEFT + across * (charts.WIDTH - charts.LEFT - charts.RIGHT)
        y = charts.HEIGHT - charts.BOTTOM - up * (charts.HEIGHT - charts.BOTTOM - charts.TOP)
        return round(x, 1), round(y, 1)

    lines = [Line(name=name, points=_points(curve.losses, at), style=style) for name, curve, style in curves]
    ticks = sorted({1, (1 + steps) // 2, steps})
    marks = [low + margin + share * (high - low - 2 * margin) for share in (0.0, 0.5, 1.0)]
    return Drawing(
        lines=lines,
        x_ticks=[(at(step, low)[0], str(step)) for step in ticks],
        y_ticks=[(at(1, mark)[1], figures.significant(mark)) for mark in marks],
    )


def _points(losses: Sequence[float], at: object) -> str:
    assert callable(at)
    pairs = (at(step, loss) for step, loss in enumerate(losses, start=1) if math.isfinite(loss))
    return " ".join(f"{x},{y}" for x, y in pairs)


def _at(curve: LossCurve, step: int) -> str:
    return _nats(curve.losses[step]) if step < len(curve.losses) else figures.NONE


def _nats(value: float | None) -> str:
    return f"{value:.4f}" if value is not None and figures.exists(value) else figures.NONE


def _signed(value: float | None) -> str:
    return f"{value:+.4f}" if value is not None and figures.exists(value) else figures.NONE
