"""Which layer takes which scheme: the multiple-choice knapsack, solved along its Lagrangian path.

Each layer takes one of its candidates or stays as it is; gains add up, costs add up, and the sum of costs is limited. For a price
per unit of cost each layer by itself takes what it gains most by, net of the price. As the price falls, the layers move one after
another along the upper convex hulls of their candidates, in the order of gain per cost (Everett, Generalized Lagrange multiplier
method, Operations Research 11, 1963; Sinha and Zoltners, The multiple-choice knapsack problem, Operations Research 27, 1979).

Every point of that path is the best there is for its own cost. Between two points at most one move's gain is given up, of a
hundred and more, in exchange for a path that can be walked with the true quality measured at each stop: the costs need only be
right in proportion, and a wrong scale does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

FREE = 1e-12
"""Cost below which a candidate counts as free of cost, so that a ratio exists."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a layer gains by one scheme, and what that costs; both against the layer as it is."""

    scheme: str
    gain: float
    cost: float


@dataclass(frozen=True, kw_only=True)
class Move:
    """One layer going over to `scheme`, from as it is or from the scheme of an earlier move; gain and cost are the increments."""

    layer: str
    scheme: str
    gain: float
    cost: float


def path(options: Mapping[str, Sequence[Option]]) -> list[Move]:
    """All moves that gain, by gain per cost, the best first; ties in the order of the layers.

    A prefix of the list is an assignment (`assignment`): the moves of one layer stand in the order of its hull.
    """
    moves = [move for layer, own in options.items() for move in _hull(layer, own)]
    return sorted(moves, key=lambda move: -move.gain / move.cost)


def assignment(moves: Sequence[Move]) -> dict[str, str]:
    """Layer -> scheme after these moves; a layer that is missing stays as it is."""
    return {move.layer: move.scheme for move in moves}


def _hull(layer: str, options: Sequence[Option]) -> list[Move]:
    """Moves along the upper convex hull from no gain at no cost: gain per cost falls from each to the next."""
    corners: list[Option] = [Option(scheme="", gain=0.0, cost=0.0)]
    for one in sorted(options, key=lambda option: (option.cost, -option.gain)):
        if one.gain <= corners[-1].gain:
            continue
        while len(corners) > 1 and _slope(corners[-2], one) >= _slope(corners[-2], corners[-1]):
            corners.pop()
        corners.append(one)
    return [
        Move(layer=layer, scheme=after.scheme, gain=after.gain - before.gain, cost=max(after.cost - before.cost, FREE))
        for before, after in pairwise(corners)
    ]


def _slope(before: Option, after: Option) -> float:
    return (after.gain - before.gain) / max(after.cost - before.cost, FREE)
