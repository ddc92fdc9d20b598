"""A figure by its path, from a report or from samples, with the error that one run knows of itself.

A time is taken as its ratio to the run's own reference, the model without the recipe's rewrites, whose rounds alternate with
it: a busy machine slows both. Everything else is read as it stands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from optforge.gate.statistics import NORMAL, Figure
from optforge.spec import Json, Measurement, QualityResult, Ratio, Report

Values = NDArray[np.float64]
RESAMPLES = 1000
TIMES = ("latency_ms.p50", "latency_ms.p90", "latency_ms.mean", "tokens_per_s", "items_per_s")
"""Figures that follow from the samples of the optimized model."""
REFERENCE = "reference_ms.p50"
"""The raw time of the reference itself, which the ratio cannot see."""
ALONE = ("compile_time_s", "energy_j")
"""Times and energies that a run takes once, so that it knows nothing of their spread."""
ASSUMED_ALONE = 0.1
"""Standard deviation between runs assumed for those."""
SPEEDUP, QUALITY, METRIC = "speedup", "quality", "metric"


def statistic(path: str) -> Callable[[Values], Values]:
    """What `path` is of samples along the last axis."""
    if path.endswith(".p90"):
        return lambda values: np.asarray(np.quantile(values, 0.9, axis=-1))
    if path.endswith(".mean"):
        return lambda values: np.asarray(values.mean(axis=-1))
    return lambda values: np.asarray(np.median(values, axis=-1))


def against_reference(report: Report, path: str) -> Figure | None:
    """A time of the optimized model over its reference's from the same rounds; None where it was timed alone."""
    row = report.optimized
    if row is None or not row.samples_s or len(row.samples_s) != len(row.baseline_samples_s):
        return None
    return _inverted(_sampled(np.asarray(row.samples_s) / np.asarray(row.baseline_samples_s), path), path)


def raw(report: Report, path: str) -> Figure | None:
    """A time as it was measured: milliseconds, or units per second."""
    row = report.optimized
    samples = [] if row is None else row.baseline_samples_s if path == REFERENCE else row.samples_s
    if not samples:
        return None
    scale = 1e3 if path.endswith(("p50", "p90", "mean")) else 1 / float(report.workload.get("units") or 1)
    return _inverted(_sampled(scale * np.asarray(samples, dtype=np.float64), path), path)


def reference_of(report: Report) -> str:
    """What the reference of a run is, as a reader calls it."""
    return (
        "the compiled baseline"
        if report.compiled_baseline is not None and report.speedup.get("vs_compiled_baseline")
        else "the model as loaded"
    )


def plain(report: Report, path: str) -> Figure | None:
    """Any other figure; None where the report does not have it."""
    if path == REFERENCE or path in TIMES:
        return raw(report, path)
    value = _looked_up(report, path)
    if isinstance(value, Ratio):
        return Figure(value=value.value, error=math.log(value.high / value.low) / (2 * NORMAL) if value.low > 0 else math.inf)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return Figure(value=float(value))


def known(report: Report) -> list[str]:
    """Every path that this report has a figure for."""
    named = {f"{QUALITY}.{METRIC}.{name}" for name in report.quality.metrics} if report.quality is not None else set()
    return sorted(path for path in {*TIMES, REFERENCE, *_paths(), *named} if plain(report, path) is not None)


def _paths() -> Iterator[str]:
    yield from (f"{SPEEDUP}.vs_baseline", f"{SPEEDUP}.vs_compiled_baseline")
    yield from (f"{QUALITY}.{field.name}" for field in dataclasses.fields(QualityResult))
    yield from (field.name for field in dataclasses.fields(Measurement))


def _looked_up(report: Report, path: str) -> Json:
    """`speedup.X` and `quality.X` of the report, anything else of its optimized row. `quality.metric.f1` is what the user's own
    metric calls f1."""
    head, _, rest = path.partition(".")
    if head == SPEEDUP:
        return report.speedup.get(rest)
    if head == QUALITY and rest.startswith(f"{METRIC}."):
        named = report.quality.metrics.get(rest.partition(".")[2]) if report.quality is not None else None
        return named["value"] if named is not None else None
    found: Json = report.quality if head == QUALITY else report.optimized
    for part in (rest if head == QUALITY else path).split("."):
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    return found


def _sampled(values: Values, path: str) -> Figure:
    """A statistic of samples with its bootstrap error, relative to it."""
    of_samples = statistic(path)
    value = float(of_samples(values))
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    return Figure(value=value, error=float(of_samples(values[draws]).std(ddof=1)) / value if len(values) > 1 else math.inf)


def _inverted(figure: Figure, path: str) -> Figure:
    """A time as a rate, where the path is one; to first order the relative error stays."""
    return Figure(value=1 / figure.value, error=figure.error) if path.endswith("_per_s") else figure
