"""Which operator of a graph needs what another one makes, and how many elements each one makes.

Values are storages, so that a write in place is a new version of its value: it waits for those who read the old one.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod

from optforge.plan.graph import EMBEDDING, REDUCTION, Graph, Operator

SHARED_BYTES = 10
"""Bytes that two kernels without a value between them must both read to be merged: Inductor's `score_fusion_memory_threshold`."""

PERSISTENT = ("parameter", "buffer", "input", "cache", "gradient")
"""Roles of values that outlive the kernel that writes them."""

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "uint8": 1, "bool": 1, "int32": 4, "int64": 8, "float64": 8}


class Flow:
    """Who needs whom: by number of operator."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = len(graph.operators)
        self.elements = [elements(operator) for operator in graph.operators]
        """Elements of each one's result."""
        self.sources: list[set[int]] = [set() for _ in range(count)]
        """What must run before: it makes a value that is read, or reads or makes what is written over."""
        self.readers: list[set[int]] = [set() for _ in range(count)]
        """Who reads the results, before they are written over."""
        self.sharing: list[list[int]] = [[] for _ in range(count)]
        """The last one before it that reads the same value."""
        self.maker: dict[tuple[int, int], int] = {}
        """(operator, value it reads) -> who made the value within the pass."""
        self._walk(graph)

    def _walk(self, graph: Graph) -> None:
        last: dict[int, int] = {}
        readers: dict[int, list[int]] = defaultdict(list)
        for number, operator in enumerate(graph.operators):
            for access in operator.reads:
                if access.key in last:
                    made = last[access.key]
                    self.sources[number].add(made)
                    self.readers[made].add(number)
                    self.maker[number, access.key] = made
                if readers[access.key] and readers[access.key][-1] != number and access.bytes > SHARED_BYTES:
                    self.sharing[number].append(readers[access.key][-1])
                readers[access.key].append(number)
            for access in operator.writes:
                self.sources[number].update(readers.pop(access.key, ()))
                if access.key in last:
                    self.sources[number].add(last[access.key])
                last[access.key] = number
            self.sources[number].discard(number)

    def persists(self, number: int) -> bool:
        """Whether what an operator writes outlives the pass."""
        keys = [access.key for access in self.graph.operators[number].writes]
        return any(self.graph.values[key].role in PERSISTENT or key in self.graph.outputs for key in keys)


def elements(operator: Operator) -> int:
    """Elements of what an operator writes; of an in-place write into a cache, those written and not the cache's."""
    written = max((access.bytes for access in operator.writes), default=0.0)
    width = ELEMENT_BYTES.get(operator.dtype)
    if operator.kind in (REDUCTION, EMBEDDING):
        return max(1, round(written / (width or 4)))
    shape = prod(operator.size)
    return max(1, min(shape, round(written / width)) if width and written else shape)


def is_pure(graph: Graph, operator: Operator) -> bool:
    """Whether it reads something and writes only values of its own."""
    read = {access.key for access in operator.reads}
    return bool(read) and not any(access.key in read or graph.values[access.key].role in PERSISTENT for access in operator.writes)
