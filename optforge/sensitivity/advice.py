"""The layers to leave out, as few as the limits ask for: single ones, the costliest first, or whole kinds, which is a shorter list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from optforge.sensitivity.findings import Layer
from optforge.transforms.choose import knapsack, search
from optforge.transforms.choose.knapsack import Option

Strain = Callable[[Sequence[str]], float]
"""Measures the model with these layers rounded: at most 1 is within the limits."""


def rounded(layers: Sequence[Layer], scheme: str, strain: Strain) -> list[str] | None:
    """As many layers as may be rounded under `scheme`; None where not even one may."""
    costs = {one.name: one.figures[scheme].cost for one in layers if scheme in one.figures}
    return _furthest({name: ([name], 1.0, cost) for name, cost in costs.items()}, strain)


def rounded_kinds(layers: Sequence[Layer], scheme: str, strain: Strain) -> list[str] | None:
    """The same with layers of one name in different blocks (`down_proj`) kept together: as many bytes as may be rounded."""
    kinds: dict[str, list[Layer]] = {}
    for one in layers:
        if scheme in one.figures:
            kinds.setdefault(one.name.rpartition(".")[2], []).append(one)
    saved = {kind: float(sum(max(one.figures[scheme].saved_bytes, 1) for one in own)) for kind, own in kinds.items()}
    costs = {kind: sum(one.figures[scheme].cost for one in own) for kind, own in kinds.items()}
    return _furthest({kind: ([one.name for one in own], saved[kind], costs[kind]) for kind, own in kinds.items()}, strain)


def _furthest(units: Mapping[str, tuple[list[str], float, float]], strain: Strain) -> list[str] | None:
    """Layers of the units (layers, gain, cost) that go together within the limits, by gain per cost."""
    moves = knapsack.path({unit: [Option(scheme="", gain=gain, cost=cost)] for unit, (_, gain, cost) in units.items()})

    def names(count: int) -> list[str]:
        return [name for move in moves[:count] for name in units[move.layer][0]]

    count = search.furthest(moves, lambda count: strain(names(count)))
    return names(count) if count else None


def selectors(left_out: Sequence[str], every: Sequence[str]) -> list[str]:
    """The shortest entries of an `ignore` list that cover `left_out` and nothing else of `every`, in the order of the model.

    A name without its block's number (`down_proj`) serves where all layers of that name are left out, else the whole path.
    """
    out, found = set(left_out), []
    covered: set[str] = set()
    for name in left_out:
        if name in covered:
            continue
        entry = next(entry for entry in _tails(name) if _covers(entry, every) <= out)
        covered |= _covers(entry, every)
        found.append(entry)
    return found


def _tails(name: str) -> list[str]:
    """`c`, `b.c`, `a.b.c` of `a.b.c`, the shortest first. A number says nothing alone."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1) if not parts[-count].isdigit()] or [name]


def _covers(entry: str, every: Sequence[str]) -> set[str]:
    """Names that a plain selector covers: whole components at the end of a path, and what lies beneath."""
    dotted = f".{entry}."
    return {name for name in every if dotted in f".{name}."}
