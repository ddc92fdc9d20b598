"""What benchmarks/prediction.py makes of its points: errors, how many are within the aims, bands for the calibration, a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optforge.plan.calibration import Band

LEAST_OF_DTYPE = 3
"""Points of one dtype from which its own error is recorded beside that of all."""

AIMS = {"median_error": 0.09, "error": 0.25, "memory_kept": 0.05, "memory_total": 0.15}
"""What the errors should stay within; the table says how many did."""


@dataclass(kw_only=True)
class Result:
    """A prediction beside its measurement; an error is predicted / measured - 1."""

    name: str
    workload: str
    dtype: str
    mode: str
    predicted_ms: float | None = None
    measured_ms: float | None = None
    fastest_ms: float | None = None
    """The 10th percentile of the samples: on a machine that others share, nearer to what the program takes than the median."""
    spread: float | None = None
    """(p90 - p50) / p50 of the measured samples."""
    error: float | None = None
    drift: dict[str, float] = field(default_factory=dict)
    """Points timed again next to the row over their times in the calibration: how many, the median, and the host's overheads."""
    drifted_ms: float | None = None
    """The prediction from the points as timed then."""
    drifted_error: float | None = None
    ideal_ms: float | None = None
    bound: str | None = None
    kept: dict[str, float | None] = field(default_factory=dict)
    """Bytes of weights and KV cache: predicted, measured, error."""
    total: dict[str, float | None] = field(default_factory=dict)
    """Peak bytes: predicted, measured (the allocator's), error. Empty where nothing counts allocations."""
    compile_s: float | None = None
    failed: str | None = None


def remember(pair: dict[str, float | None], **values: float | None) -> None:
    """Adds the values, and the error once both are there."""
    pair.update(values)
    predicted, measured = pair.get("predicted"), pair.get("measured")
    if predicted and measured:
        pair["error"] = predicted / measured - 1


def bands(results: Sequence[Result], source: str) -> list[Band]:
    """The errors of each kind of workload, all dtypes together and each that has points enough."""
    found = []
    done = [result for result in results if result.error is not None]
    for workload in dict.fromkeys(result.workload for result in done):
        of_kind = [result for result in done if result.workload == workload]
        for dtype in ("", *dict.fromkeys(result.dtype for result in of_kind)):
            chosen = [result for result in of_kind if dtype in ("", result.dtype)]
            if not dtype or LEAST_OF_DTYPE <= len(chosen) < len(of_kind):
                found.append(_band(workload, dtype, chosen, source))
    return found


def _band(workload: str, dtype: str, results: Sequence[Result], source: str) -> Band:
    errors = [abs(result.error) for result in results if result.error is not None]
    median, p90 = np.quantile(errors, (0.5, 0.9))
    return Band(workload=workload, dtype=dtype, points=len(errors), median_error=float(median), p90_error=float(p90), source=source)


def statistics(results: Sequence[Result]) -> dict[str, Any]:
    """Over all points: how many, median and p90 of the errors, how many within the aims."""

    def of(errors: list[float], within: float) -> dict[str, Any]:
        if not errors:
            return {"points": 0}
        median, p90 = np.quantile(errors, (0.5, 0.9))
        inside = sum(error <= within for error in errors)
        return {
            "points": len(errors),
            "median": float(median),
            "p90": float(p90),
            "largest": max(errors),
            "aim": within,
            "within_aim": inside,
        }

    def absolute(values: Iterator[float | None]) -> list[float]:
        return [abs(value) for value in values if value is not None]

    return {
        "latency": of(absolute(result.error for result in results), AIMS["error"]),
        "latency_at_the_machine's_speed": of(absolute(result.drifted_error for result in results), AIMS["error"]),
        "latency_against_the_fastest_tenth": of(absolute(map(_against_fastest, results)), AIMS["error"]),
        "weights_and_cache": of(absolute(result.kept.get("error") for result in results), AIMS["memory_kept"]),
        "total_memory": of(absolute(result.total.get("error") for result in results), AIMS["memory_total"]),
        "failed": sum(result.failed is not None for result in results),
    }


def _against_fastest(result: Result) -> float | None:
    return result.predicted_ms / result.fastest_ms - 1 if result.predicted_ms and result.fastest_ms else None


def markdown(document: dict[str, Any]) -> str:
    """The result as a table with its statistics."""
    lines = [
        f"# Predictions against measurements, {document['target']}, {document['date']}",
        "",
        f"    {document['command']}",
        "",
        f"{document['calibration']}. Validation points are whole models, calibration points single operators: no point is both.",
        "",
        "| point | mode | predicted ms | measured ms | p90 / p50 - 1 | error | at the machine's speed | weights + cache | total memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["results"]:
        if row["failed"]:
            lines.append(f"| {row['name']} | {row['mode']} | {number(row['predicted_ms'])} | failed: {row['failed']} | | | | | |")
            continue
        memory = [percent(row[part].get("error")) for part in ("kept", "total")]
        cells = [number(row["predicted_ms"]), number(row["measured_ms"]), percent(row["spread"]), percent(row["error"])]
        cells += [percent(row["drifted_error"]), *memory]
        lines.append(f"| {row['name']} | {row['mode']} | {' | '.join(cells)} |")
    lines += ["", "| error of | points | median | p90 | largest | aim | within it |", "|---|---|---|---|---|---|---|"]
    for name in ("latency", "latency_at_the_machine's_speed", "latency_against_the_fastest_tenth", "weights_and_cache", "total_memory"):
        found = document["statistics"][name]
        if found["points"]:
            figures = [f"{found[key]:.1%}" for key in ("median", "p90", "largest", "aim")]
            lines.append(f"| {name.replace('_', ' ')} | {found['points']} | {' | '.join(figures)} | {found['within_aim']} |")
    lines += ["", f"The median error of latency is to stay within {AIMS['median_error']:.0%}."]
    versions = document["environment"]["versions"]
    tail = (
        f"torch {versions['torch']}, transformers {versions['transformers']}, optforge {versions['optforge']}, {document['seconds']:.0f} s"
    )
    return "\n".join([*lines, "", f"{tail}, load average {document['load_average']:.1f} before the first point.", ""])


def number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.1%}"
