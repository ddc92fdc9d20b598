"""The figures that runs are compared by: where each stands in a report, its unit, and which way is better.

Every figure is read off the report as it is; what a report does not have is None and is shown as n/a. A measured time
carries the 95% interval of its median, since two medians alone do not say which run is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optforge.report import cost, figures
from optforge.spec import Json, Measurement, QualityResult, Report

LOWER, HIGHER = "lower", "higher"
Z = 1.959964
"""Two-sided 95% point of the normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure: its key, its name for a reader, which way is better, and the name that `report.figures` formats it by."""

    key: str
    title: str
    better: str
    unit: str


LATENCY = Metric(key="latency", title="latency", better=LOWER, unit="latency_ms")
THROUGHPUT = Metric(key="throughput", title="throughput", better=HIGHER, unit="per_s")
MEMORY = Metric(key="memory", title="peak memory", better=LOWER, unit="bytes")
SIZE = Metric(key="size", title="weight size", better=LOWER, unit="bytes")
COST = Metric(key="cost", title="cost per million", better=LOWER, unit="cost")
QUALITIES = (
    Metric(key="perplexity_increase", title="perplexity increase", better=LOWER, unit="share"),
    Metric(key="top1_drop", title="top-1 drop", better=LOWER, unit="share"),
    Metric(key="loss_increase", title="loss increase", better=LOWER, unit="share"),
    Metric(key="kl", title="KL of logits", better=LOWER, unit="kl"),
    Metric(key="relative_error", title="relative error", better=LOWER, unit="relative_error"),
    Metric(key="metric", title="own metric", better=HIGHER, unit="metric"),
    Metric(key="sqnr_db", title="SQNR, dB", better=HIGHER, unit="sqnr_db"),
)
"""What `quality` can mean; a comparison takes the first that most of its runs have."""
OWN = "metric"
KEYS = ("latency", "throughput", "memory", "size", "quality", "cost")
"""What `--by` and the page's axes take."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One figure of one run, with the ends of its interval where it has one: 95% of a median, the error band of a prediction."""

    value: float
    low: float | None = None
    high: float | None = None


Values = dict[str, Value]


def quality_metric(reports: Sequence[Report]) -> Metric:
    """The quality figure that most of the reports have; the first of QUALITIES among equals."""
    counts = [sum(_quality(report.quality, metric) is not None for report in reports) for metric in QUALITIES]
    return QUALITIES[counts.index(max(counts))]


def metrics(quality: Metric, own: Sequence[Metric] = ()) -> tuple[Metric, ...]:
    """All figures in the order of KEYS; `quality` keeps its name and answers to the key `quality`. `own` stands beside it."""
    named = Metric(key="quality", title=quality.title, better=quality.better, unit=quality.unit)
    return (LATENCY, THROUGHPUT, MEMORY, SIZE, named, *own, COST)


def own_metrics(reports: Sequence[Report]) -> tuple[Metric, ...]:
    """The figures that the user's own metric names in any report, each under the key `metric.<name>`.

    Where runs disagree on the direction that is better, the first says it.
    """
    found: dict[str, Metric] = {}
    for report in reports:
        for name, own in (report.quality.metrics if report.quality is not None else {}).items():
            found.setdefault(name, Metric(key=f"{OWN}.{name}", title=name, better=str(own["better"]), unit="metric"))
    return tuple(found.values())


def measured(report: Report, quality: Metric) -> Values:
    """The figures of the optimized model as they were measured; empty where there is no such row."""
    row = report.optimized
    if row is None or not figures.exists(row.latency_ms.get("p50")):
        return {}
    latency = _latency(row)
    found: dict[str, Value | None] = {
        "latency": latency,
        "throughput": _throughput(row.tokens_per_s if row.tokens_per_s is not None else row.items_per_s, latency),
        "memory": _value(row.peak_memory_bytes),
        "size": _value(row.weight_bytes),
        "quality": _value(_quality(report.quality, quality)),
        "cost": _value(cost.measured(report, row)),
    }
    if report.quality is not None:
        found |= {f"{OWN}.{name}": _value(own["value"]) for name, own in report.quality.metrics.items()}
    return {key: value for key, value in found.items() if value is not None}


def predicted(report: Report) -> Values:
    """The figures that the plan predicts for the target with the whole recipe; empty where it predicts no time."""
    values = report.predicted.get("optimized")
    if not isinstance(values, dict) or not figures.exists(values.get("latency_ms")):
        return {}
    latency = Value(value=float(values["latency_ms"]), low=values.get("low_ms"), high=values.get("high_ms"))
    rate = values.get("tokens_per_s") if values.get("tokens_per_s") is not None else values.get("items_per_s")
    found = {
        "latency": latency,
        "throughput": _throughput(rate, latency),
        "memory": _value(values.get("peak_memory_bytes")),
        "size": _value(values.get("weight_bytes")),
        "cost": _value(cost.predicted(report, values)),
    }
    return {key: value for key, value in found.items() if value is not None}


def text(metric: Metric, value: Value | None, report: Report) -> str:
    """A figure as a reader expects it, with its unit."""
    if value is None:
        return figures.NONE
    if metric.key == "throughput":
        unit = {"tokens": "tok", "items": "items"}.get(str(report.workload.get("unit")), "units")
        return f"{figures.rounded(value.value)} {unit}/s"
    if metric.key == "cost":
        return cost.text(report, value.value)
    if metric.unit == "share":
        return figures.percent(value.value, signed=True)
    return figures.named(metric.unit, value.value)


def interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Ends of a 95% interval of the median that assumes no distribution; None for fewer than six samples.

    Order statistics with ranks n/2 -+ z sqrt(n)/2 (Hahn and Meeker, Statistical Intervals, 1991, section 5.2); the least
    and the greatest of six samples hold the median with 97%.
    """
    count = len(samples)
    if count < 6:
        return None
    ordered = sorted(samples)
    below = max(1, math.floor((count - Z * math.sqrt(count)) / 2))
    return ordered[below - 1], ordered[count - below]


def _latency(row: Measurement) -> Value:
    p50 = row.latency_ms["p50"]
    assert p50 is not None
    ends = interval(row.samples_s)
    if ends is None:
        return Value(value=float(p50))
    return Value(value=float(p50), low=min(ends[0] * 1e3, p50), high=max(ends[1] * 1e3, p50))


def _throughput(rate: Json, latency: Value) -> Value | None:
    """A rate with the interval of the time that it follows from."""
    if not figures.exists(rate):
        return None
    if latency.low is None or latency.high is None:
        return Value(value=rate)
    return Value(value=rate, low=rate * latency.value / latency.high, high=rate * latency.value / latency.low)


def _quality(quality: QualityResult | None, metric: Metric) -> Json:
    value = getattr(quality, metric.key, None)
    return value if figures.exists(value) else None


def _value(value: Json) -> Value | None:
    return Value(value=float(value)) if figures.exists(value) and isinstance(value, int | float) else None
