"""A comparison for programs: csv with one line a row, and strict JSON with everything the page shows.

Figures are numbers in the units that their names carry, unrounded; what does not exist is empty (csv) or null (JSON).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

from optforge.compare.comparison import MEASURED, Comparison, Row
from optforge.compare.load import Entry
from optforge.compare.metrics import OWN, Value
from optforge.report import view
from optforge.spec import Json, Report

SCHEMA_VERSION = 1
QUALITY = ("perplexity_increase", "kl", "agreement", "top1_drop", "sqnr_db", "loss_increase", "relative_error", "metric")


def to_csv(comparison: Comparison) -> str:
    """One line for each measured row, then for each predicted one, then for each run without figures."""
    rows = [*_records(comparison)]
    keys = list(rows[0]) if rows else ["run"]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _records(comparison: Comparison) -> Iterator[dict[str, Json]]:
    for row in comparison.rows:
        yield {**_figures(row), **_own(comparison, row), **_settings(comparison, row.name)}
    for name, entry in comparison.failed:
        nothing = dict.fromkeys([*NUMBERS, *_own_keys(comparison)])
        yield {**_subject(name, "none", entry), **nothing, "reason": entry.reason, "folder": entry.path, **_settings(comparison, name)}


def _settings(comparison: Comparison, name: str) -> dict[str, Json]:
    own = comparison.settings[name]
    return {f"settings.{key}": own.get(key) for key in comparison.differing}


def to_json(comparison: Comparison) -> str:
    """The comparison as JSON text, schema_version 1."""
    values = {
        "schema_version": SCHEMA_VERSION,
        "by": comparison.by.key,
        "front": [axis.key for axis in comparison.axes],
        "quality": comparison.metric("quality").title,
        "rows": [_row(comparison, row) for row in comparison.rows],
        "failed": [
            {**_subject(name, "none", entry), "reason": entry.reason, "folder": entry.path, "settings": comparison.settings[name]}
            for name, entry in comparison.failed
        ],
        "differing": comparison.differing,
        "differences": [{"condition": item.condition, "values": item.values} for item in comparison.differences],
        "notes": comparison.notes,
    }
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def _row(comparison: Comparison, row: Row) -> dict[str, Json]:
    steps = [
        {
            "name": step.name,
            "use": step.use,
            "p50_ms": step.p50_ms,
            "vs_previous": step.vs_previous.value if step.vs_previous else None,
            "verdict": step.verdict or None,
            "kept": step.kept,
        }
        for step in row.steps
    ]
    return {
        **_figures(row),
        **_own(comparison, row),
        "steps": steps,
        "conditions": comparison.conditions[row.name] if row.kind == MEASURED else None,
        "settings": comparison.settings[row.name],
    }


def _subject(name: str, kind: str, entry: Entry) -> dict[str, Json]:
    report = entry.report
    return {
        "run": name,
        "figures": kind,
        "recipe": report.recipe.get("name"),
        "target": report.target.get("name"),
        "device": report.device.get("name"),
        "stand_in": view.is_stand_in(report),
        "model": report.model.get("name"),
        "workload": report.workload.get("name"),
        "verdict": report.verdict,
    }


NUMBERS = (
    "place",
    "front",
    "conditions",
    "latency_ms",
    "latency_low_ms",
    "latency_high_ms",
    "latency_p90_ms",
    "reference_ms",
    "speedup",
    "speedup_low",
    "speedup_high",
    "speedup_of",
    "tokens_per_s",
    "items_per_s",
    "peak_memory_bytes",
    "weight_bytes",
    *QUALITY,
    "cost_per_million",
    "currency",
)


def _figures(row: Row) -> dict[str, Json]:
    """One row, flat: the same keys whatever the row is."""
    report, ratio, values = row.report, row.ratio, row.values
    latency = values["latency"]
    units = str(report.workload.get("unit"))
    rate = _plain(values.get("throughput"))
    numbers = (
        row.place,
        row.pareto,
        row.group or None,
        latency.value,
        latency.low,
        latency.high,
        row.p90_ms,
        row.reference_ms,
        ratio.value if ratio else None,
        ratio.low if ratio else None,
        ratio.high if ratio else None,
        ratio.unit if ratio else None,
        None if units == "items" else rate,
        rate if units == "items" else None,
        _plain(values.get("memory")),
        _plain(values.get("size")),
        *_quality(row, report),
        _plain(values.get("cost")),
        report.target.get("currency"),
    )
    named = dict(zip(NUMBERS, numbers, strict=True))
    reason = report.reason if row.kind == MEASURED else ""
    return {**_subject(row.name, row.kind, row.entry), **named, "reason": reason, "folder": row.entry.path}


def _quality(row: Row, report: Report) -> list[Json]:
    """Quality is measured; a predicted row has none."""
    return [getattr(report.quality, key, None) if row.kind == MEASURED else None for key in QUALITY]


def _own_keys(comparison: Comparison) -> list[str]:
    """Figures of the user's own metric, as `metric.<name>`."""
    return [metric.key for metric in comparison.metrics if metric.key.startswith(f"{OWN}.")]


def _own(comparison: Comparison, row: Row) -> dict[str, Json]:
    return {key: _plain(row.values.get(key)) for key in _own_keys(comparison)}


def _plain(value: Value | None) -> float | None:
    return None if value is None else value.value
