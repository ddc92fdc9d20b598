"""How far along the path an assignment can go: the last prefix whose measured quality is within the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from optforge.transforms.choose.knapsack import Move

MOST = 8
"""Prefixes that are measured at most; each is a pass over all samples."""
AIM = 0.97
"""Share of the limits that interpolation aims at: to land just within, and not just beyond."""


def furthest(moves: Sequence[Move], strain: Callable[[int], float]) -> int:
    """The largest number of moves that was measured within the limits, 0 where none was.

    Strain is taken to rise with the moves. The estimated costs say where to look: between a prefix within and one beyond, strain is
    taken as linear in the sum of costs, so that a scale that is wrong corrects itself at the first look.

    Args:
        strain: measures a prefix: at most 1 is within the limits.
    """
    if not moves:
        return 0
    costs = [0.0, *accumulate(move.cost for move in moves)]
    low, high = 0, len(moves)
    least, most = 0.0, strain(high)
    if most <= 1.0:
        return high
    for _ in range(MOST - 1):
        if high - low <= 1:
            break
        middle = _between(costs, low, high, least, most)
        found = strain(middle)
        if found <= 1.0:
            low, least = middle, found
        else:
            high, most = middle, found
        if least >= AIM:
            break
    return low


def _between(costs: Sequence[float], low: int, high: int, least: float, most: float) -> int:
    """The prefix strictly between two where strain should reach `AIM`; the middle one where that is unknown."""
    if not least < AIM < most < float("inf"):
        return (low + high) // 2
    wanted = costs[low] + (costs[high] - costs[low]) * (AIM - least) / (most - least)
    found = max((index for index in range(low, high + 1) if costs[index] <= wanted), default=low)
    return min(max(found, low + 1), high - 1)
