"""How many bytes of activations and gradients are alive at the fullest moment of a pass.

Run eagerly, a storage lives until the model's code and autograd let go of it, which the trace saw (`Graph.freed`): names
that a forward method still holds keep their tensors alive well past the last read. Compiled, a storage lives from the kernel
that makes it to the last that reads it, and what stays within one merged kernel never exists; in training, cheap values are
computed again in the backward pass where what they are made of is kept anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from optforge.plan.fusion import NO_REGION, merged, region_of
from optforge.plan.graph import BACKWARD, COPY, EMBEDDING, FORWARD, POINTWISE, Graph, Operator

RECOMPUTED = (POINTWISE, COPY, EMBEDDING)
"""Kinds that PyTorch's partitioner computes again rather than keep (functorch's min-cut; reductions and products are kept)."""

Interval = tuple[int, int]
"""First and last moment, both included, at which a storage exists."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The fullest moment of a pass."""

    activations: int
    """Bytes of values that operators made and of inputs."""
    gradients: int
    """Bytes of gradients that lie on parameters at that moment."""
    at: str
    """Where: operator and module."""


class Lives:
    """When each storage of one pass exists; worked out once, for devices of any share."""

    def __init__(self, graph: Graph, *, compiled: bool = False, regions: Sequence[str] = ("",)) -> None:
        """
        Args:
            graph: from `plan.trace`, or made by hand; without `Graph.freed` values live to their last reader in eager mode too.
            compiled: the modules of `regions` run compiled, the rest eagerly.
            regions: dotted paths of compiled modules; `""` is the whole model.
        """
        self.graph = graph
        self.spans, self.turns = _compiled(graph, regions) if compiled else (_eager(graph), graph.operators)
        """Key -> the turns at which it exists; and the operator that each turn is told by."""

    def peak(self, size: Callable[[int], int] | None = None, kept: frozenset[int] = frozenset()) -> Peak:
        """The fullest moment.

        Args:
            size: bytes of a storage on one device by its key; by default all of it.
            kept: values that are counted elsewhere (a prompt's KV cache).
        """
        measure = size or (lambda key: self.graph.values[key].bytes)
        values, gradients = [0] * (len(self.turns) + 1), [0] * (len(self.turns) + 1)
        for key in self.spans.keys() - kept:
            moments = gradients if self.graph.values[key].role == "gradient" else values
            for first, last in self.spans[key]:
                moments[first] += measure(key)
                moments[last + 1] -= measure(key)
        inputs = sum(value.bytes for value in self.graph.values.values() if value.role == "input")
        now, held, best, fullest = inputs, 0, (inputs, 0), None
        for moment in range(len(self.turns)):
            now, held = now + values[moment], held + gradients[moment]
            if now + held > sum(best):
                best, fullest = (now, held), moment
        return Peak(activations=best[0], gradients=best[1], at="" if fullest is None else _where(self.turns[fullest]))


def outliving(graph: Graph) -> frozenset[int]:
    """Values that an eager pass leaves behind besides what it returns: of a prompt's pass, the KV cache that it filled."""
    made = {access.key for operator in graph.operators for access in operator.writes}
    left = {key for key in made if graph.values[key].role == "value" and key not in graph.freed and key not in graph.outputs}
    return frozenset(left) if graph.freed else frozenset()


def _where(operator: Operator) -> str:
    return f"{operator.name} in {operator.module or ('the backward pass' if operator.phase == BACKWARD else 'the workload itself')}"


def _eager(graph: Graph) -> dict[int, list[Interval]]:
    """Each value from its first access until it was freed."""
    spans = {}
    for key, users in _users(graph).items():
        last = graph.freed.get(key, len(graph.operators)) - 1 if graph.freed else _final(graph, key, users[-1], len(graph.operators))
        spans[key] = [(0 if _accumulates(graph, key) else users[0], max(users[0], last))]
    return spans


def _users(graph: Graph) -> dict[int, list[int]]:
    """Numbers of the operators that touch each value or gradient, in their order."""
    users: dict[int, list[int]] = defaultdict(list)
    for number, operator in enumerate(graph.operators):
        for access in (*operator.reads, *operator.writes):
            if graph.values[access.key].role in ("value", "gradient"):
                users[access.key].append(number)
    return users


def _accumulates(graph: Graph, key: int) -> bool:
    """Whether the gradient is there from the start, since an earlier batch of the same step has left its own."""
    return graph.passes > 1 and graph.values[key].role == "gradient"


def _final(graph: Graph, key: int, last: int, moments: int) -> int:
    """The last moment of a value that is touched last at `last`: the end for what is returned or lies on a parameter."""
    return moments - 1 if key in graph.outputs or graph.values[key].role == "gradient" else last


def _compiled(whole: Graph, regions: Sequence[str]) -> tuple[dict[int, list[Interval]], list[Operator]]:
    """Each value that exists outside merged kernels, by the turns in which the kernels run; and the last operator of each turn."""
    graph, kernels = merged(whole, regions)
    order = _order(graph, kernels)
    turn = {member: position for position, members in enumerate(order) for member in members}
    places = {(operator.module, operator.phase) for operator in graph.operators}
    regions_of = {place: region_of(*place, regions) for place in places}
    homes = [regions_of[operator.module, operator.phase] for operator in graph.operators]
    ends: dict[str, int] = {}
    for number, home in enumerate(homes):
        if home is not NO_REGION:
            ends[home] = max(ends.get(home, 0), turn[number])
    again = _recomputed(graph, homes) if graph.training else frozenset()
    spans: dict[int, list[Interval]] = {}
    for key, users in _users(graph).items():
        moments = [turn[user] for user in users]
        first, last = min(moments), _final(graph, key, max(moments), len(order))
        maker = homes[users[0]]
        if first == last and maker is not NO_REGION and len(users) > 1:
            continue  # it never leaves its kernel
        # who calls a compiled module holds its inputs until it returns
        held = [ends[home] for user in users if (home := homes[user]) not in (NO_REGION, maker, BACKWARD)]
        spans[key] = _twice(graph, users, turn) if key in again else [(first, max([last, *held]))]
        if _accumulates(graph, key):
            spans[key] = [(0, len(order) - 1)]
    return spans, [graph.operators[members[-1]] for members in order]


def _twice(graph: Graph, users: list[int], turn: dict[int, int]) -> list[Interval]:
    """A value that is computed again: alive among its users forward, and again backward, where it leaves its kernel."""
    found = []
    for phase in (FORWARD, BACKWARD):
        here = [user for user in users if graph.operators[user].phase == phase]
        moments = {turn[user] for user in here}
        if len(moments) > 1 or any(graph.operators[user].kind not in RECOMPUTED for user in here):
            found.append((min(moments), max(moments)))
    return found


def _recomputed(graph: Graph, homes: Sequence[str | None]) -> frozenset[int]:
    """Forward values that the backward pass reads and that are not kept: each is cheap, and what it is made of is kept anyway or
    is no larger. Decided from the last to the first, so that chains end at what a product, an attention or a sum made."""
    writers: dict[int, list[int]] = defaultdict(list)
    kept: set[int] = set()
    for number, operator in enumerate(graph.operators):
        for access in operator.writes:
            writers[access.key].append(number)
        if operator.phase == BACKWARD:
            kept |= {access.key for access in operator.reads if graph.values[access.key].role == "value"}
    again = set()
    for number in range(len(graph.operators) - 1, -1, -1):
        operator = graph.operators[number]
        if operator.phase != FORWARD or operator.kind not in RECOMPUTED or homes[number] is NO_REGION:
            continue
        for access in operator.writes:
            if access.key not in kept or len(writers[access.key]) > 1:
                continue
            more = {read.key for read in operator.reads if graph.values[read.key].role == "value"} - kept
            if sum(graph.values[key].bytes for key in more) <= graph.values[access.key].bytes:
                kept = (kept - {access.key}) | more
                again.add(access.key)
    return frozenset(again)


def _order(graph: Graph, kernels: Sequence[list[int]]) -> list[list[int]]:
    """Kernels in an order in which each runs after what it reads and overwrites, the earliest member first."""
    home = {member: number for number, members in enumerate(kernels) for member in members}
    waits: list[set[int]] = [set() for _ in kernels]
    frees: list[set[int]] = [set() for _ in kernels]
    last: dict[int, int] = {}
    for number, operator in enumerate(graph.operators):
        for access in (*operator.reads, *operator.writes):
            before = last.get(access.key)
            if before is not None and before != home[number]:
                waits[home[number]].add(before)
                frees[before].add(home[number])
        for access in operator.writes:
            last[access.key] = home[number]
    ready = [(members[0], number) for number, members in enumerate(kernels) if not waits[number]]
    heapify(ready)
    order: list[list[int]] = []
    while ready:
        _, number = heappop(ready)
        order.append(kernels[number])
        for later in frees[number]:
            waits[later].discard(number)
            if not waits[later]:
                heappush(ready, (kernels[later][0], later))
    assert len(order) == len(kernels), "kernels wait for one another"
    return order
