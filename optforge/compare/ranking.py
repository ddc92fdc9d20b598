"""Who is better: ranks with ties, and the runs that no other run beats in two figures at once.

Both are taken over rows of one kind only: callers pass the measured rows or the predicted ones, never the two together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from operator import le
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
    return set(undominated({key: (_cost(across, x), _cost(up, y)) for key, (across, up) in values.items()}))


def undominated(costs: Mapping[Key, tuple[float, ...]]) -> list[Key]:
    """Those of which no other one costs as little in everything and less in something, by their costs in order."""
    found: list[Key] = []
    for key in sorted(costs, key=lambda key: costs[key]):  # whoever dominates one stands before it, and so does one of the front
        own = costs[key]
        if not any(costs[other] != own and all(map(le, costs[other], own)) for other in found):
            found.append(key)
    return found


def _cost(value: float, metric: Metric) -> float:
    """`value` turned so that less is better."""
    return -value if metric.better == HIGHER else value
