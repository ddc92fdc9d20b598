"""What a report says, in words and rows, before any of it is drawn.

The terminal, the Markdown file and the page must not disagree about the verdict or about what was measured and what
was predicted, so the sentences and the rows are made here once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from optforge.measure import limits as limits_
from optforge.measure import own as own_
from optforge.report import cost, figures
from optforge.spec import Json, Measurement, QualityResult, Ratio, Report, StepReport

BADGES = {
    "ok": "Gain proven",
    "no_gain": "No gain",
    "regression": "Regression",
    "failed_quality": "Quality missed",
    "failed": "Failed",
    "oom": "Out of memory",
    "incomplete": "Incomplete",
}
GOOD, NEUTRAL, BAD = "good", "neutral", "bad"
TONES = {"ok": GOOD, "no_gain": NEUTRAL, "incomplete": NEUTRAL}
"""Every other verdict is bad."""
UNFINISHED = {
    "no_gain": "No measurable gain",
    "failed": "The run failed",
    "oom": "The run ran out of memory",
    "incomplete": "The run is not finished: there is no verdict yet",
}
WORDS = {"memory": ("less peak memory", "more peak memory"), "size": ("smaller", "larger")}
"""unit of a Ratio -> words for better and worse; any other unit is about time: faster, slower."""
QUALITY = {
    "perplexity": "Perplexity",
    "kl": "KL of logits",
    "agreement": "Top-1 agreement with the baseline",
    "top1": "Top-1 accuracy",
    "sqnr_db": "SQNR of logits, dB",
    "metric": "Own metric",
}


def device_name(report: Report) -> str:
    return str(report.device.get("name") or "an unknown device")


def target_name(report: Report) -> str:
    return str(report.target.get("name") or "an unknown target")


def is_stand_in(report: Report) -> bool:
    return report.device.get("is_target") is False


def measured_label(report: Report) -> str:
    """The label of every measured figure: `measured on cpu`."""
    return f"measured on {device_name(report)}"


def predicted_label(report: Report) -> str:
    """The label of every figure that was not measured: `predicted for a100`."""
    return f"predicted for {target_name(report)}"


def provenance(report: Report) -> str:
    """Where the measured figures come from, and what that device stands in for."""
    label = measured_label(report)
    return f"{label}, a stand-in for {target_name(report)}" if is_stand_in(report) else label


def main_ratio(report: Report) -> tuple[Ratio | None, str]:
    """The ratio that the verdict is about, and the name of what it compares with."""
    compiled = report.speedup.get("vs_compiled_baseline")
    if compiled is not None:
        return compiled, "the compiled baseline"
    return report.speedup.get("vs_baseline"), "the baseline as loaded"


def compared(ratio: Ratio) -> str:
    """`1.46x faster` or `1.18x slower`; a ratio below one is told the other way round."""
    better, worse = WORDS.get(ratio.unit, ("faster", "slower"))
    if not figures.exists(ratio.value) or ratio.value <= 0:
        return "not comparable"
    return f"{ratio.value:.2f}x {better}" if ratio.value >= 1 else f"{1 / ratio.value:.2f}x {worse}"


def headline(report: Report) -> str:
    """The verdict in one short plain phrase."""
    ratio, against = main_ratio(report)
    plainly = f"{compared(ratio)} than {against}" if ratio else ""
    if report.verdict == "no_gain" and ratio:
        return f"No measurable gain over {against}: {figures.ratio(ratio)}"
    if report.verdict == "failed_quality":
        return f"A quality limit was missed, though {plainly}" if plainly and ratio and ratio.value > 1 else "A quality limit was missed"
    if report.verdict in ("ok", "regression"):
        return plainly or BADGES[report.verdict]
    return UNFINISHED.get(report.verdict, report.verdict)


def details(report: Report) -> list[str]:
    """What belongs right beside the verdict: quality, interval, where it was measured, why it failed."""
    ratio, _ = main_ratio(report)
    lines = []
    if ratio is not None and report.verdict != "no_gain":
        low, high = (ratio.low, ratio.high) if ratio.value >= 1 or ratio.low <= 0 else (1 / ratio.high, 1 / ratio.low)
        lines.append(f"95% interval {low:.2f}x to {high:.2f}x")
    lines += quality_phrases(report.quality)
    if report.baseline or report.optimized or report.steps:
        lines.append(provenance(report))
    return lines


def quality_phrases(quality: QualityResult | None) -> list[str]:
    """The quality difference in a few words each: `perplexity +0.7%`."""
    if quality is None:
        return ["no quality figures"]
    found = []
    if quality.training is not None and figures.exists(quality.training.difference):
        found.append(f"loss {quality.training.difference:+.4f} nats")
    if figures.exists(quality.perplexity_increase):
        found.append(f"perplexity {figures.percent(quality.perplexity_increase, signed=True)}")
    if quality.top1_drop is not None and figures.exists(quality.top1_drop):
        found.append(f"top-1 {figures.percent(-quality.top1_drop, signed=True)}")
    if not found and figures.exists(quality.agreement):
        found.append(f"{figures.percent(quality.agreement)} of answers agree")
    for name, own in quality.metrics.items():
        drop = own_.drop(own)
        if drop is not None:
            found.append(f"{name} {figures.percent(-drop, signed=True)}{' (worse)' if drop > 0 else ''}")
    return found or ["no quality figures"]


def warnings(report: Report) -> list[str]:
    """Everything to know that changes no verdict, the saved artifact's part too."""
    saved = (report.artifact or {}).get("warnings") or []
    return [*report.warnings, *(str(line) for line in saved if line not in report.warnings)]


def exports(report: Report) -> list[str]:
    """Each export in a line: format, size, how close it is in its own engine, folder."""
    return [_export(record) for record in report.exports]


def _export(record: Mapping[str, Json]) -> str:
    check = record.get("check") or {}
    versions = ", ".join(f"{name} {version}" for name, version in (check.get("versions") or {}).items())
    error, allowed = (figures.significant(check.get(key) or 0) for key in ("relative_error", "allowed"))
    checked = f"relative error {error} of {allowed} allowed in a fresh process ({versions})"
    return f"{record.get('format')}, {figures.nbytes(record.get('bytes'))}, {checked}: {record.get('path')}"


def reasons(report: Report) -> list[str]:
    """What explains the verdict beyond its figures: limits that were missed, what stopped the run."""
    missed = list(report.quality.missed) if report.quality else []
    judged = main_ratio(report)[0] is not None or bool(missed)  # then `reason` repeats the figures
    return missed if judged or not report.reason else [report.reason]


def verdict_line(report: Report) -> str:
    """The verdict in one line, as the terminal ends with it."""
    return "; ".join([", ".join([headline(report), *details(report)]), *reasons(report)])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured row: a baseline or a step, in the order they build on each other."""

    name: str
    use: str
    verdict: str = ""
    reason: str = ""
    measured: Measurement | None = None
    vs_previous: Ratio | None = None
    vs_reference: Ratio | None = None
    quality: QualityResult | None = None
    kept: bool = True
    seconds: float | None = None

    @property
    def p50_ms(self) -> float | None:
        value = self.measured.latency_ms.get("p50") if self.measured else None
        return value if figures.exists(value) else None

    @property
    def speed(self) -> str:
        return speed(self.measured)


def speed(measured: Measurement | None) -> str:
    """Throughput with its unit, or n/a."""
    if measured is None:
        return figures.NONE
    for value, unit in ((measured.tokens_per_s, "tok/s"), (measured.items_per_s, "items/s")):
        if value is not None and figures.exists(value):
            return f"{figures.rounded(value)} {unit}"
    return figures.NONE


def row_cost(report: Report, row: Row) -> str:
    """Cost of a million tokens or items at a row's measured throughput, n/a on a stand-in."""
    return cost.text(report, cost.measured(report, row.measured))


def rows(report: Report) -> list[Row]:
    """Baseline, then each step; the compiled baseline is the row of the compile step, or one of its own."""
    found = [Row(name="baseline", use="the model as loaded", measured=report.baseline, reason=report.baseline_reason or "")]
    if report.compiled_baseline is not None and not any(step.kind == "compile" and step.measured for step in report.steps):
        found.append(Row(name="compiled baseline", use="the same model, compiled", measured=report.compiled_baseline))
    return found + [_step_row(step) for step in report.steps]


def _step_row(step: StepReport) -> Row:
    return Row(
        name=step.name,
        use=step.use,
        verdict=step.verdict or "",
        reason=step.reason,
        measured=step.measured,
        vs_previous=step.vs_previous,
        vs_reference=step.vs_compiled_baseline or step.vs_baseline,
        quality=step.quality,
        kept=step.kept,
        seconds=step.seconds,
    )


@dataclass(frozen=True, kw_only=True)
class QualityLine:
    """One quality figure beside the baseline's."""

    name: str
    baseline: str
    optimized: str
    difference: str = ""


def quality_lines(quality: QualityResult | None) -> list[QualityLine]:
    """Every quality figure that exists."""
    if quality is None:
        return []
    differences = {
        "perplexity": figures.percent(quality.perplexity_increase, signed=True),
        "top1": figures.percent(None if quality.top1_drop is None else -quality.top1_drop, signed=True),
    }
    found = [] if quality.training is None else [_loss_line(quality)]
    for key, name in QUALITY.items():
        value = getattr(quality, key)
        if figures.exists(value):
            before = figures.named(key, getattr(quality, f"baseline_{key}", None)) if hasattr(quality, f"baseline_{key}") else ""
            kind = f" ({quality.kl_kind})" if key == "kl" and quality.kl_kind else ""
            found.append(
                QualityLine(name=name + kind, baseline=before, optimized=figures.named(key, value), difference=differences.get(key, ""))
            )
    return [*found, *(_own_line(name, own) for name, own in quality.metrics.items())]


def _loss_line(quality: QualityResult) -> QualityLine:
    """The loss that a training ended with."""
    baseline, own = (
        f"{value:.4f}" if value is not None and figures.exists(value) else figures.NONE
        for value in (quality.baseline_cross_entropy, quality.cross_entropy)
    )
    change = figures.percent(quality.loss_increase, signed=True)
    return QualityLine(name="Loss after the training, nats", baseline=baseline, optimized=own, difference=change)


def _own_line(name: str, own: Mapping[str, Json]) -> QualityLine:
    """A figure of the user's own metric; the difference is plus where it is better."""
    drop = own_.drop(own)
    change = figures.percent(None if drop is None else -drop, signed=True)
    better = "" if drop in (None, 0) else (" (better)" if drop < 0 else " (worse)")
    before = figures.named("metric", own["baseline"])
    label = f"{name} ({own['better']} is better)"
    return QualityLine(name=label, baseline=before, optimized=figures.named("metric", own["value"]), difference=change + better)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit of the recipe against what was measured. `used` is the share of the limit that is used up (1 = at it)."""

    name: str
    bound: str
    value: str
    used: float | None
    missed: bool


def limits(report: Report) -> list[Limit]:
    """Each `max_*` and `min_*` limit of the recipe; the value is n/a where it was not measured."""
    return [_limit(str(key), bound, report.quality) for key, bound in dict(report.recipe.get("limits") or {}).items()]


def _limit(key: str, bound: float, quality: QualityResult | None) -> Limit:
    side, name = key.split("_", 1) if "_" in key else ("", key)
    own = name.partition(".")[2]
    title = own or QUALITY.get(name) or name.replace("_", " ").capitalize()
    if key.partition(".")[0] in limits_.METRICS:
        value = limits_.value_of(quality, key) if quality is not None else None
    else:
        value = getattr(quality, name, None) if quality is not None else None
    text = figures.named(name, value)
    if not isinstance(value, int | float) or not figures.exists(value):
        return Limit(name=title, bound=_bound(side, name, bound), value=text, used=None, missed=False)
    at_least = side == "min"
    used = (bound / value if value > 0 else 2.0) if at_least else (max(value, 0.0) / bound if bound > 0 else 2.0 * (value > bound))
    missed = value < bound if at_least else value > bound
    return Limit(name=title, bound=_bound(side, name, bound), value=text, used=used, missed=missed)


def _bound(side: str, name: str, bound: float) -> str:
    words = {"max": "at most", "min": "at least"}.get(side, "limit")
    return f"{words} {figures.named(name, bound)}"


def zeros(report: Report) -> list[str]:
    """What is left of pruning after each step."""
    return [
        f"after {step.name}: {step.sparsity:.1%} of the weights in pruned layers are exactly zero"
        for step in report.steps
        if step.sparsity is not None
    ]


def energy_per_token_j(measured: Measurement | None) -> float | None:
    """Joules per token; `energy_j` is that of one call, and a call's tokens are its throughput times its time."""
    if measured is None or measured.energy_j is None or measured.tokens_per_s is None:
        return None
    p50 = measured.latency_ms.get("p50")
    tokens = measured.tokens_per_s * p50 / 1000 if p50 else 0
    return measured.energy_j / tokens if tokens > 0 else None


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of one measured row."""

    name: str
    per_token: str
    per_call: str


def energy_rows(report: Report) -> list[Energy]:
    """Energy of every row for which the device's counter answered."""
    found = []
    for row in rows(report):
        if row.measured is not None and figures.exists(row.measured.energy_j):
            per_token = energy_per_token_j(row.measured)
            text = f"{figures.significant(per_token * 1000)} mJ" if per_token is not None else figures.NONE
            found.append(Energy(name=row.name, per_token=text, per_call=f"{figures.significant(row.measured.energy_j or 0)} J"))
    return found


def reference(report: Report) -> str:
    """What `vs reference` compares with."""
    return "the compiled baseline" if report.compiled_baseline is not None else "the baseline as loaded"


def receipt_lists(receipt: Mapping[str, Json]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The lists of a receipt that are not empty, as titled pairs."""
    touched = [(str(item.get("name")), _became(item)) for item in receipt.get("touched") or []]
    renamed = {new: "stands for " + ", ".join(old) for new, old in (receipt.get("renamed") or {}).items()}
    lists = {
        "Skipped": [(str(name), str(why)) for name, why in (receipt.get("skipped") or {}).items()],
        "Ignored, as the recipe says": [(str(name), "") for name in receipt.get("ignored") or []],
        "Matched nothing": [(str(name), "") for name in receipt.get("unmatched") or []],
        "Operators put in": [(str(name), f"{number} times") for name, number in (receipt.get("kernels") or {}).items()],
        "Renamed": list(renamed.items()),
        "Changed": touched,
    }
    yield from ((title, pairs) for title, pairs in lists.items() if pairs)


def _became(item: Mapping[str, Json]) -> str:
    sizes = f", {figures.nbytes(item['bytes_before'])} to {figures.nbytes(item['bytes_after'])}" if item.get("bytes_before") else ""
    return f"{item.get('what')}{sizes}"


def alternatives(report: Report) -> list[dict[str, Json]]:
    """What could run instead of what was downgraded, best prediction first, each once."""
    found: dict[str, dict[str, Json]] = {}
    for downgrade in report.downgrades:
        for item in downgrade.alternatives:
            found.setdefault(str(item.get("use")), {**item, "step": downgrade.step})
    return sorted(found.values(), key=lambda item: -(item.get("predicted_speedup") or 0))


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One row of the target's roofline. None of its figures was measured."""

    name: str
    time: str
    speed: str
    bound: str
    weights: str
    cost: str


def predicted_rows(report: Report) -> list[Predicted]:
    """The target's roofline for the baseline and after each step, where it could be made."""
    named = [("baseline", report.predicted.get("baseline"))]
    named += [(str(step.get("name")), step) for step in report.predicted.get("steps") or []]
    return [_predicted_row(report, name, values) for name, values in named if isinstance(values, Mapping)]


def _predicted_row(report: Report, name: str, values: Mapping[str, Json]) -> Predicted:
    rates = [figures.named(key, values[key]) for key in ("tokens_per_s", "items_per_s") if values.get(key) is not None]
    return Predicted(
        name=name,
        time=figures.milliseconds(values.get("latency_ms")),
        speed=rates[0] if rates else figures.NONE,
        bound=str(values.get("bound") or figures.NONE),
        weights=figures.nbytes(values.get("weight_bytes")),
        cost=cost.text(report, cost.predicted(report, values)),
    )


def predicted_notes(report: Report) -> list[str]:
    """How the prediction was made, and why it is missing where it is."""
    values = report.predicted.get("baseline")
    values = values if isinstance(values, Mapping) else {}
    return [str(note) for note in (values.get("basis"), values.get("reason"), *(values.get("notes") or [])) if note]


def flat(values: Mapping[str, Json], path: str = "") -> Iterator[tuple[str, Json]]:
    """Dotted key and value of every leaf of a nested mapping; lists of mappings are numbered."""
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from flat(value, name)
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from flat({str(index + 1): item for index, item in enumerate(value)}, name)
        else:
            yield name, value
