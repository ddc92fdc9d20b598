"""A change with its 95% interval, from runs or from pairs of processes.

The rounds within one process tell its median to a fraction of a percent, and yet the next process of the same program may
differ by more: memory lies elsewhere, threads land on other cores. So the unit that is counted here is the process, and the
interval comes from how much processes differ. All of it is done on logarithms, where a change is a difference.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
ASSUMED_FREEDOM = 4
"""How many degrees of freedom the assumed spread between runs counts for, beside those of the runs themselves."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure, or a change, with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one run says of a figure."""

    value: float
    error: float = 0.0
    """Standard error within the run, as a fraction of the value; 0 for what is counted and not timed."""


def of_pairs(ratios: Sequence[float]) -> Estimate:
    """The change, as a fraction, that the ratios B/A of several pairs of processes show: Student's interval on their logarithms.

    Raises:
        ValueError: there are fewer than two pairs; one says nothing of its own spread.
    """
    if len(ratios) < 2:
        raise ValueError(f"an interval needs two pairs or more, got {len(ratios)}")
    logs = [math.log(ratio) for ratio in ratios]
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return _change(statistics.fmean(logs), half)


def of_runs(new: Sequence[Figure], base: Sequence[Figure], assumed: float) -> Estimate:
    """The change from `base` to `new`, as a fraction of `base`, for figures above zero.

    The variance between runs is taken from both groups together, with the assumed one among them as if it came from
    ASSUMED_FREEDOM more runs: s^2 = (f0 s0^2 + sum of squares) / (f0 + f) (a moderated variance; Smyth, Statistical
    Applications in Genetics and Molecular Biology 3(1), 2004, section 4). It is never taken for less than the runs' own errors. With
    `assumed` 0, for what is counted and not timed, the runs alone tell.

    Raises:
        ValueError: a group is empty.
    """
    groups = [[math.log(figure.value) for figure in group] for group in (new, base)]
    if not all(groups):
        raise ValueError("a change needs a run on either side")
    squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    freedom = len(new) + len(base) - 2 + (ASSUMED_FREEDOM if assumed else 0)
    within = statistics.fmean(figure.error**2 for figure in (*new, *base))
    variance = max((ASSUMED_FREEDOM * assumed**2 + squares) / freedom if freedom else 0.0, within)
    return _change(statistics.fmean(groups[0]) - statistics.fmean(groups[1]), _half(variance, freedom, len(new), len(base)))


def of_values(values: Sequence[float], error: float = 0.0) -> Estimate:
    """The mean of one figure over runs. `error` is the standard error of one of them, which a single run is judged by."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        half = NORMAL * error
    else:
        half = t_quantile(len(values) - 1) * max(statistics.stdev(values), error) / math.sqrt(len(values))
    return Estimate(value=mean, low=mean - half, high=mean + half)


def difference(new: Sequence[float], base: Sequence[float]) -> Estimate:
    """The difference of the means, for figures that may be zero or below; the interval is of the pooled variance."""
    values = [statistics.fmean(group) for group in (new, base)]
    squares = sum((value - mean) ** 2 for group, mean in zip((new, base), values, strict=True) for value in group)
    freedom = len(new) + len(base) - 2
    variance = squares / freedom if freedom else 0.0
    half = _half(variance, freedom, len(new), len(base))
    found = values[0] - values[1]
    return Estimate(value=found, low=found - half, high=found + half)


def _half(variance: float, freedom: int, first: int, second: int) -> float:
    """Half the interval of a difference between means over so many runs, with their common variance."""
    return t_quantile(freedom) * math.sqrt(variance * (1 / first + 1 / second)) if variance else 0.0


def _change(log: float, half: float) -> Estimate:
    return Estimate(value=math.expm1(log), low=math.expm1(log - half), high=math.expm1(log + half))


NORMAL = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@functools.cache
def t_quantile(freedom: int) -> float:
    """Student's two-sided 95% quantile, by bisection over the closed form of its distribution for whole degrees of freedom."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    # odd: cos + 2/3 cos^3 + (2 4)/(3 5) cos^5 ... ; even: 1 + 1/2 cos^2 + (1 3)/(2 4) cos^4 ...
    for k in range((freedom - 1) // 2 if odd else freedom // 2):
        total += term
        term *= cosine**2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
