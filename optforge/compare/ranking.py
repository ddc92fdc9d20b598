"""Who is better: ranks with ties, and the runs that no other run beats in two figures at once.

Both are taken over rows of one kind only: callers pass the measured rows or the predicted ones, never the two together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from optforge.compare.metrics import HIGHER, Metric, Value

Key = TypeVar("Key", bound=Hashable)


def ranks(values: Mapping[Key, Value], metric: Metric) -> dict[Key, int]:
    """Place of each row, best first, from 1. Rows share a place while their interval reaches that of the first who holds it."""
    ordered = sorted(values, key=lambda key: _cost(values[key].value, metric))
    found: dict[Key, int] = {}
    leader: Value | None = None
    place = 0
    for position, key in enumerate(ordered, 1):
        value = values[key]
        if leader is None or not _overlap(leader, value):
            leader, place = value, position
        found[key] = place
    return found


def _overlap(a: Value, b: Value) -> bool:
    return _low(a) <= _high(b) and _low(b) <= _high(a)


def _low(value: Value) -> float:
    return value.value if value.low is None else value.low


def _high(value: Value) -> float:
    return value.value if value.high is None else value.high


def front(values: Mapping[Key, tuple[float, float]], x: Metric, y: Metric) -> set[Key]:
    """Rows on the Pareto front: no other row is at least as good in both figures and better in one."""
    ordered = sorted(values, key=lambda key: (_cost(values[key][0], x), _cost(values[key][1], y)))
    found: set[Key] = set()
    best: float | None = None
    edge: tuple[float, float] | None = None
    for key in ordered:
        across, up = _cost(values[key][0], x), _cost(values[key][1], y)
        if best is None or up < best or (across, up) == edge:
            found.add(key)
            best, edge = up, (across, up)
    return found


def _cost(value: float, metric: Metric) -> float:
    """`value` turned so that less is better."""
    return -value if metric.better == HIGHER else value
