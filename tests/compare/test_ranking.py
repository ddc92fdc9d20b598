"""Places and fronts against definitions spelled out by brute force."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from optforge.compare.metrics import LATENCY, MEMORY, THROUGHPUT, Metric, Value, interval
from optforge.compare.ranking import front, ranks


def _better(first: float, second: float, metric: Metric) -> bool:
    return first > second if metric.better == "higher" else first < second


def _dominates(a: tuple[float, float], b: tuple[float, float], axes: tuple[Metric, Metric]) -> bool:
    pairs = list(zip(a, b, axes, strict=True))
    return all(not _better(theirs, ours, axis) for ours, theirs, axis in pairs) and any(
        _better(ours, theirs, axis) for ours, theirs, axis in pairs
    )


@pytest.mark.parametrize("axes", list(itertools.permutations((LATENCY, THROUGHPUT, MEMORY), 2)), ids=lambda axes: axes[0].key + axes[1].key)
def test_the_front_is_what_nobody_dominates(axes: tuple[Metric, Metric]) -> None:
    chosen = random.Random(3)
    for _ in range(60):
        points = {index: (float(chosen.randint(0, 9)), float(chosen.randint(0, 9))) for index in range(chosen.randint(1, 25))}
        expected = {key for key, point in points.items() if not any(_dominates(other, point, axes) for other in points.values())}
        assert front(points, *axes) == expected


def test_places_are_shared_where_intervals_reach_the_first_of_them() -> None:
    values = {
        "a": Value(value=10, low=9.5, high=10.5),
        "b": Value(value=10.2, low=9.9, high=10.6),
        "c": Value(value=10.55, low=10.4, high=10.9),  # reaches a
        "d": Value(value=10.8, low=10.55, high=11.0),  # reaches b and c, not a
        "e": Value(value=12),
    }
    assert ranks(values, LATENCY) == {"a": 1, "b": 1, "c": 1, "d": 4, "e": 5}
    assert ranks({"slow": Value(value=1), "fast": Value(value=2), "also": Value(value=2)}, THROUGHPUT) == {"fast": 1, "also": 1, "slow": 3}


@pytest.mark.parametrize("count", [6, 8, 9, 12, 20, 48, 100, 257])
def test_the_interval_of_a_median_holds_it_95_times_in_100(count: int) -> None:
    """Exact coverage from the binomial distribution: the median is outside only if too many samples lie on one side of it."""
    low, high = interval([float(index) for index in range(1, count + 1)])  # samples are their own ranks
    outside = sum(math.comb(count, below) for below in range(count + 1) if not low <= below < high) / 2**count
    assert 1 - outside >= 0.95
    assert low + high == count + 1


def test_five_samples_hold_no_95_percent_interval() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
