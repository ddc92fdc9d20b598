"""From ratios and limits to verdicts: what a row is compared with, and the one word it earns.

A ratio above 1 is better whatever the goal: time and memory are divided baseline by candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from optforge.measure import timing
from optforge.spec import Measurement, QualityResult, Ratio, Report, Run

BETTER = {"latency": "faster than", "throughput": "faster than", "memory": "less memory than", "size": "smaller than"}
WORSE = {"latency": "the speed of", "throughput": "the speed of", "memory": "as lean in memory as", "size": "as small as"}


def goal_ratio(goal: str, row: Measurement, reference: Measurement) -> Ratio | None:
    """How many times better `row` is than `reference` in what the recipe is for.

    Time is taken from `row`'s own paired samples, which were measured in rounds that alternate with the reference.
    Returns None when either lacks the figure.
    """
    if goal in ("latency", "throughput"):
        if not row.samples_s or not row.baseline_samples_s:
            return None
        return _scaled(timing.ratio(row.samples_s, row.baseline_samples_s), goal, row.batches / reference.batches)
    attribute = "peak_memory_bytes" if goal == "memory" else "weight_bytes"
    before, after = getattr(reference, attribute), getattr(row, attribute)
    if not before or not after:
        return None
    value = before / after
    return Ratio(value=value, low=value, high=value, unit=goal)


def step_ratio(goal: str, row: Measurement, previous: Measurement | None, against_reference: Ratio | None) -> Ratio | None:
    """How many times better a row is than the row before it.

    Both were timed against one reference in rounds of their own, so the drift between the two sets cancels. Without a row
    before it, the reference itself is what came before.
    """
    if previous is None or against_reference is None:
        return against_reference
    if goal in ("latency", "throughput"):
        return _scaled(timing.compare(previous, row), goal, row.batches / previous.batches)
    return goal_ratio(goal, row, previous)


def _scaled(ratio: Ratio, goal: str, batches: float) -> Ratio:
    """A ratio of times as one of rates, where a call of one has `batches` times as many batches in it."""
    if goal != "throughput" or batches == 1:
        return ratio
    return replace(ratio, value=ratio.value * batches, low=ratio.low * batches, high=ratio.high * batches)


def product(first: Ratio | None, second: Ratio | None) -> Ratio | None:
    """The ratio a/c from a/b and b/c; independent errors add in quadrature on the logarithm."""
    if first is None or second is None:
        return None
    value = first.value * second.value
    down = math.hypot(math.log(first.value / first.low), math.log(second.value / second.low))
    up = math.hypot(math.log(first.high / first.value), math.log(second.high / second.value))
    return Ratio(value=value, low=value * math.exp(-down), high=value * math.exp(up), unit=first.unit)


def judge(ratio: Ratio | None, quality: QualityResult | None) -> str:
    """The verdict of a row: quality limits first, then the interval of its ratio."""
    if quality is not None and quality.missed:
        return "failed_quality"
    if ratio is None:
        return "incomplete"
    return timing.verdict(ratio)


def sentence(verdict: str, ratio: Ratio | None, against: str, goal: str, quality: QualityResult | None) -> str:
    """The verdict's reason in one line."""
    parts = []
    if ratio is not None:
        parts.append(f"{ratio.value:.2f}x {(BETTER if ratio.value >= 1 else WORSE)[goal]} {against}")
        parts.append(f"95% interval {ratio.low:.2f} to {ratio.high:.2f}")
    if quality is not None and quality.perplexity_increase is not None:
        parts.append(f"perplexity {quality.perplexity_increase:+.1%}")
    if quality is not None and quality.training is not None and quality.training.difference is not None:
        result = quality.training
        parts.append(
            f"loss {result.difference:+.4f} nats to the baseline's after {len(result.own.losses)} steps, {result.limit:.4f} allowed"
        )
    if quality is not None and quality.missed:
        parts.extend(quality.missed)
    return ", ".join(parts) if parts else f"{verdict}: nothing was measured"


FAIL_ON = ("regression", "no_gain", "downgrade", "stand_in")


def failures(report: Report, run: Run) -> list[str]:
    """What `fail_on` and the quality limits hold against a finished run, as sentences."""
    found = list(report.quality.missed) if report.quality is not None else []
    asked: Sequence[str] = run.fail_on
    if report.verdict in asked:
        found.append(f"verdict {report.verdict}: {report.reason}")
    if "downgrade" in asked:
        found.extend(f"step {d.step}: {d.reason}" for d in report.downgrades)
    if "stand_in" in asked and not report.device.get("is_target", True):
        found.append(f"{report.device.get('name')} is a stand-in for {report.target.get('name')}")
    return found
