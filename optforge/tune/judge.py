"""Decides from figures alone: what a report says of time, which limits are missed, who leads, who goes on.

Nothing here has state, so that every decision of a search can be checked by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from optforge import verdicts
from optforge.compare.ranking import undominated
from optforge.measure.limits import words_of
from optforge.spec import Measurement, QualityResult, Ratio, Report
from optforge.tune.candidate import HAND_WRITTEN, MEASURED, Candidate, Figures, Foreseen
from optforge.tune.options import FIGURE_LIMITS, Limits, TuneOptions

LOSSES = ("kl", "loss_increase", "relative_error")
"""What stands for the difference from the baseline, the first that was measured; smaller is better."""


def figures(report: Report) -> Figures:
    """The figures of a finished job's last row."""
    row, quality = report.optimized, report.quality
    if row is None:
        return Figures()
    values = {} if quality is None else {key: value for key, value in asdict(quality).items() if isinstance(value, float)}
    reason = next((text for text in report.warnings if text.startswith("no quality was measured")), None)
    return replace(_of(row), ratio=time_ratio(report), quality=values, quality_reason=reason)


def baseline_figures(report: Report) -> Figures | None:
    """The figures of the model as loaded."""
    if report.baseline is None:
        return None
    return replace(_of(report.baseline), ratio=Ratio(value=1.0, low=1.0, high=1.0), quality=dict.fromkeys(LOSSES, 0.0))


def _of(row: Measurement) -> Figures:
    p50 = row.latency_ms.get("p50")
    return Figures(
        latency_ms=None if p50 is None else float(p50),
        tokens_per_s=row.tokens_per_s,
        items_per_s=row.items_per_s,
        peak_memory_bytes=row.peak_memory_bytes,
        weight_bytes=row.weight_bytes,
    )


def time_ratio(report: Report) -> Ratio | None:
    """How many times faster the whole recipe is than the model as loaded, whatever the recipe's goal is.

    A row under compile is timed against the compiled baseline, and that against the model as loaded: the ratios multiply.
    """
    row, base, compiled = report.optimized, report.baseline, report.compiled_baseline
    if row is None or base is None:
        return None
    first = verdicts.goal_ratio("latency", row, base)
    if compiled is None or row == compiled:
        return first
    return verdicts.product(first, verdicts.goal_ratio("latency", compiled, base))


def missed(found: Figures, quality: QualityResult | None, limits: Limits, *, judged: bool = True) -> list[str]:
    """Every limit that a measured candidate misses, as sentences with both numbers.

    Limits of quality were held against the run itself (its recipe carries them); a figure that does not exist is missed.

    Args:
        judged: this was the measurement that had to settle quality.
    """
    sentences = list(quality.missed) if quality is not None else []
    if quality is None and judged:
        sentences += [f"{words_of(key)} could not be measured here, and {key} is set" for key in limits.quality]
    for key, bound in limits.figures.items():
        limit = FIGURE_LIMITS[key]
        value = getattr(found, limit.field)
        if value is None:
            sentences.append(f"{limit.words} could not be measured here, and {key} is set")
        elif (value < bound) if limit.least else (value > bound):
            side = "under" if limit.least else "over"
            sentences.append(f"{limit.words} {value:.4g} is {side} {key} {bound:.4g}")
    return sentences


def value(candidate: Candidate, objective: str) -> float:
    """What is to be small; infinite where it was not measured."""
    found = candidate.figures
    if found is None:
        return math.inf
    if objective == "latency":
        ratio = candidate.ratio
        figure = 1.0 / ratio.value if ratio is not None and ratio.value > 0 else found.latency_ms
    elif objective == "quality":
        figure = next((found.quality[name] for name in LOSSES if name in found.quality), None)
    else:
        figure = {"memory": found.peak_memory_bytes, "size": found.weight_bytes}[objective]
    return math.inf if figure is None else float(figure)


def values(candidate: Candidate, objectives: Sequence[str]) -> tuple[float, ...]:
    return tuple(value(candidate, objective) for objective in objectives)


def ranked(candidates: Sequence[Candidate], objectives: Sequence[str]) -> list[Candidate]:
    """Those that were measured and miss no limit, best first: by Pareto front, within one by the first objective."""
    left = [one for one in candidates if one.state == MEASURED]
    ordered: list[Candidate] = []
    while left:
        front = front_of(left, objectives)
        ordered += front
        left = [one for one in left if one not in front]
    return ordered


def front_of(candidates: Sequence[Candidate], objectives: Sequence[str]) -> list[Candidate]:
    """The Pareto front: those that no other one equals or beats in every objective and beats in one, best first."""
    return [candidates[index] for index in undominated({index: values(one, objectives) for index, one in enumerate(candidates)})]


def promoted(candidates: Sequence[Candidate], objectives: Sequence[str], *, eta: int, rungs: int) -> Candidate | None:
    """Who is measured longer next: asynchronous successive halving.

    Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2: from the highest rung down,
    the best of a rung that is among its best 1/eta and has not gone on yet.
    """
    for rung in reversed(range(rungs - 1)):
        reached = [one for one in candidates if one.state == MEASURED and any(result.rung == rung for result in one.results)]
        best = ranked(reached, objectives)[: len(reached) // eta]
        for one in best:
            if one.tried == rung:
                return one
    return None


def finalists(candidates: Sequence[Candidate], objectives: Sequence[str], count: int) -> list[Candidate]:
    """The best few, the best hand-written one always among them: what a search found must beat what was there."""
    best = ranked(candidates, objectives)
    chosen = best[:count]
    written = next((one for one in best if one.origin == HAND_WRITTEN), None)
    if written is not None and written not in chosen:
        chosen = [*chosen[: max(count - 1, 1)], written]
    return chosen


def why_not(foreseen: Foreseen, best: Candidate | None, options: TuneOptions, limits: Limits) -> str:
    """Why the plan alone rules a candidate out; empty where it does not.

    A time counts only with the error band of a calibration, and only where time is the one objective.
    """
    if foreseen.fits is False:
        need = f"{(foreseen.total_bytes or 0) / 1e9:.1f} of {(foreseen.memory_bytes or 0) / 1e9:.1f} GB"
        return f"predicted not to fit: {need}"
    most = limits.figures.get("max_weight_bytes")
    if most is not None and foreseen.weight_bytes is not None and foreseen.weight_bytes > most:
        return f"{foreseen.weight_bytes / 1e6:.1f} MB of weights are over max_weight_bytes"
    slowest = limits.figures.get("max_latency_ms")
    if slowest is not None and foreseen.low_ms is not None and foreseen.low_ms > slowest:
        return f"predicted to take {foreseen.low_ms:.3g} ms at least, over max_latency_ms"
    measured = best.figures.latency_ms if best is not None and best.figures is not None else None
    if options.objectives == ("latency",) and foreseen.low_ms is not None and measured is not None and foreseen.low_ms > measured:
        return f"predicted to take {foreseen.low_ms:.3g} ms at least; {best.name if best else ''} was measured at {measured:.3g}"
    return ""


def strictest(limits: Sequence[dict[str, float]]) -> dict[str, float]:
    """For each limit the bound that is hardest to meet."""
    found: dict[str, float] = {}
    for one in limits:
        for key, bound in one.items():
            pick = max if key.startswith("min_") else min
            found[key] = pick(found.get(key, bound), bound)
    return found
