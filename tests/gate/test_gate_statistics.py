"""Intervals against SciPy, against hand arithmetic, and against the coverage that they claim."""

from __future__ import annotations

import math
import random

import pytest

from optforge.gate import statistics
from optforge.gate.statistics import Figure

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 30: 2.0423}
"""Student's two-sided 95% points, as printed in any table."""


@pytest.mark.parametrize(("freedom", "quantile"), TABLE.items())
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert statistics.t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_pairs_are_students_interval_on_logarithms() -> None:
    ratios = [1.02, 1.04, 1.03, 1.05, 1.01]
    stats = pytest.importorskip("scipy.stats")
    logs = [math.log(ratio) for ratio in ratios]
    low, high = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    found = statistics.of_pairs(ratios)
    assert (found.low, found.high) == pytest.approx((math.expm1(low), math.expm1(high)))
    with pytest.raises(ValueError, match="two pairs"):
        statistics.of_pairs([1.0])


def test_runs_without_an_assumption_are_the_two_sample_interval() -> None:
    new, base = [1.10, 1.12, 1.11], [1.0, 1.02, 0.99, 1.01]
    stats = pytest.importorskip("scipy.stats")
    low, high = stats.ttest_ind([math.log(v) for v in new], [math.log(v) for v in base]).confidence_interval(0.95)
    found = statistics.of_runs([Figure(value=value) for value in new], [Figure(value=value) for value in base], assumed=0.0)
    assert (found.low, found.high) == pytest.approx((math.expm1(low), math.expm1(high)))


def test_one_run_against_one_rests_on_the_assumption() -> None:
    """By hand: t with 4 degrees of freedom, times 2%, times the square root of 2."""
    found = statistics.of_runs([Figure(value=1.1)], [Figure(value=1.0)], assumed=0.02)
    half = 2.7764 * 0.02 * math.sqrt(2)
    assert found.value == pytest.approx(0.1)
    assert (found.low, found.high) == pytest.approx((1.1 * math.exp(-half) - 1, 1.1 * math.exp(half) - 1), abs=1e-5)


def test_a_run_that_is_unsure_of_itself_widens_the_interval() -> None:
    sure, unsure = Figure(value=1.0, error=0.001), Figure(value=1.0, error=0.2)
    narrow = statistics.of_runs([sure], [sure], assumed=0.01)
    wide = statistics.of_runs([unsure], [sure], assumed=0.01)
    assert wide.high > 3 * narrow.high > 0


def test_what_is_counted_has_no_width() -> None:
    found = statistics.of_runs([Figure(value=105.0)], [Figure(value=100.0)], assumed=0.0)
    assert found.low == found.high == pytest.approx(0.05)


@pytest.mark.parametrize(("base", "new"), [(1, 1), (3, 1), (5, 2)])
def test_intervals_of_runs_hold_the_truth_as_often_as_they_say(base: int, new: int) -> None:
    """Runs that differ by just what is assumed: the interval must hold no change in 95 of 100, or more, since it knows more."""
    generator = random.Random(7)

    def runs(count: int) -> list[Figure]:
        return [Figure(value=math.exp(generator.gauss(0.0, 0.02))) for _ in range(count)]

    found = [statistics.of_runs(runs(new), runs(base), assumed=0.02) for _ in range(2000)]
    held = sum(one.low <= 0.0 <= one.high for one in found) / len(found)
    assert held >= 0.94


def test_intervals_of_pairs_hold_the_truth_as_often_as_they_say() -> None:
    generator = random.Random(3)
    found = [statistics.of_pairs([1.03 * math.exp(generator.gauss(0.0, 0.01)) for _ in range(5)]) for _ in range(4000)]
    held = sum(one.low <= 0.03 <= one.high for one in found) / len(found)
    assert held == pytest.approx(0.95, abs=0.012)  # three standard errors of 4,000 draws
