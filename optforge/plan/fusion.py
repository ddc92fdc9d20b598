"""Which kernels run the operators of a graph: one each when run eagerly, merged ones where a compiler has been at work.

A compiler keeps products, attention and convolutions as they are and merges what lies between them, since each merged
kernel reads its inputs once and keeps the rest in registers. The rules here are those of PyTorch's Inductor, told for
storages and element counts: a merged kernel has one loop over one number of elements, at most one kind of row that it
reduces to, and nothing outside may depend on one half of it and be needed by the other. They are held against the
kernels that Inductor really makes in tests/plan/test_fusion.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from optforge.plan.flow import Flow, elements, is_pure
from optforge.plan.graph import BACKWARD, FORWARD, FUSIBLE, OUTSIDE, POINTWISE, REDUCTION, UPDATE, Access, Graph, Kernel, Operator

WINDOW = 512
"""Operators back to which a merge is looked for. A compiler's own window is of that size, and memory stays small."""

LARGEST_ROW = 1 << 15
"""Elements that one group of threads reduces and then goes over again. Inductor splits longer rows into two kernels, and then
what follows the reduction starts anew."""

PARTS = 2
"""Readers of parts of a value up to which each works its own part out anew."""

NO_REGION = None
"""The region of an operator that no compiler sees."""


def kernels(graph: Graph, *, compiled: bool, regions: Sequence[str] = ("",)) -> list[Kernel]:
    """The kernels that one pass launches, in the order of the last of their operators.

    Args:
        graph: from `plan.trace`, or made by hand.
        compiled: merge what a compiler merges; else every operator is a kernel.
        regions: dotted paths of the modules that are compiled, each by itself; `""` is the whole model. No kernel reaches over two
            regions, and what lies in none runs as it does eagerly.
    """
    if not compiled:
        return [_kernel(graph, [operator], operator.reads, operator.writes) for operator in graph.operators]
    return _Merger(_without_repetition(graph, regions), regions).kernels()


def merged(graph: Graph, regions: Sequence[str] = ("",)) -> tuple[Graph, list[list[int]]]:
    """The graph as a compiler sees it, without repetition, and the numbers of its operators by kernel."""
    reduced = _without_repetition(graph, regions)
    return reduced, _Merger(reduced, regions).members()


def region_of(module: str, phase: str, regions: Iterable[str]) -> str | None:
    """The compiled region that an operator or a kernel belongs to, or None where it runs eagerly.

    The backward pass of compiled modules is compiled with them; it has no module paths and counts as one region.
    """
    if phase == UPDATE or module == OUTSIDE:
        return NO_REGION
    if phase == BACKWARD:
        return BACKWARD if any(True for _ in regions) else NO_REGION
    inside = [region for region in regions if not region or module == region or module.startswith(f"{region}.")]
    return f"{FORWARD}:{max(inside, key=len)}" if inside else NO_REGION


def _without_repetition(graph: Graph, regions: Sequence[str]) -> Graph:
    """The graph without what a second module does to the same values as a first one, which a compiler does once.

    Three quantized linears that read one input each round it. Within one module nothing is taken for a repetition, since a
    graph does not tell numbers apart that operators take beside their tensors.
    """
    same: dict[int, int] = {}
    first: dict[Hashable, Operator] = {}
    counts: Counter[Hashable] = Counter()
    kept: list[Operator] = []
    for operator in graph.operators:
        renamed = any(access.key in same for access in operator.reads)
        reads = tuple(replace(access, key=same.get(access.key, access.key)) for access in operator.reads) if renamed else operator.reads
        region = region_of(operator.module, operator.phase, regions)
        if operator.kind in FUSIBLE and region is not NO_REGION and is_pure(graph, operator):
            what = (region, operator.name, operator.dtype, operator.size, reads)
            counts[what, operator.module] += 1
            before = first.setdefault((what, counts[what, operator.module]), operator)
            if before.module != operator.module:
                same.update(zip((a.key for a in operator.writes), (a.key for a in before.writes), strict=True))
                continue
        kept.append(replace(operator, reads=reads) if renamed else operator)
    return replace(graph, operators=kept, outputs=tuple(same.get(key, key) for key in graph.outputs))


@dataclass(eq=False)
class _Group:
    """Operators that run as one kernel. `bits` and `before` are sets of operator numbers, as integers."""

    members: list[int]
    region: str | None
    fusible: bool
    elements: int
    """Of the loop."""
    rows: int | None
    """Results of its reductions; None where it has none, or one whose results are as many as its inputs."""
    ends: bool
    """It ends in a reduction over rows that are too long to go over again."""
    bits: int
    kept: frozenset[int] = frozenset()
    """Values that outlive the pass and are written in place: a compiler gives each a kernel of its own."""
    before: int = 0
    """All operators that must have run before it."""
    sources: set[int] = field(default_factory=set)
    """The operators that it depends on directly."""


class _Merger:
    """Walks the operators in order and merges each with what it reads from, or reads together with."""

    def __init__(self, graph: Graph, regions: Sequence[str]) -> None:
        self.graph, self.regions = graph, regions
        self.flow = Flow(graph)
        self.groups: list[_Group] = []  # of each operator, by its number

    def kernels(self) -> list[Kernel]:
        return [self._merged(members) for members in self.members()]

    def members(self) -> list[list[int]]:
        """Numbers of the operators of each kernel, in the order of the last of them."""
        for number in range(len(self.graph.operators)):
            self._place(number)
        distinct = {id(group): group for group in self.groups}.values()
        return sorted((sorted(group.members) for group in distinct), key=lambda members: members[-1])

    def _place(self, number: int) -> None:
        group = self._alone(number)
        self.groups.append(group)
        if not group.fusible:
            return
        for other in [*sorted(group.sources, reverse=True), *self.flow.sharing[number]]:
            candidate = self.groups[other]
            if candidate is not group and self._fits(candidate, group) and self._stays_ordered(candidate, group):
                group = self._merge(candidate, group)
        for source in self.flow.sources[number]:
            if self.groups[source] is not group and self._spreads(source, number):
                self._move(source, group)

    def _alone(self, number: int) -> _Group:
        operator = self.graph.operators[number]
        elements = self.flow.elements[number]
        loop = prod(operator.size) if operator.kind == REDUCTION else elements
        region = region_of(operator.module, operator.phase, self.regions)
        sources = {source for source in self.flow.sources[number] if source > number - WINDOW}
        before = 0
        for source in sources:
            before |= self.groups[source].before | self.groups[source].bits
        return _Group(
            members=[number],
            region=region,
            fusible=operator.kind in FUSIBLE and region is not NO_REGION,
            elements=loop,
            rows=elements if operator.kind == REDUCTION and elements < loop else None,
            ends=operator.kind == REDUCTION and loop > LARGEST_ROW * elements,
            bits=1 << number,
            kept=frozenset(access.key for access in operator.writes if self.graph.values[access.key].role == "cache"),
            before=before,
            sources=sources,
        )

    def _fits(self, first: _Group, second: _Group) -> bool:
        """Whether one loop can do both; `first` starts earlier."""
        if not first.fusible or first.region != second.region or second.members[0] - first.members[0] > WINDOW:
            return False
        if first.kept and second.kept and first.kept != second.kept:
            return False
        if first.rows is not None and second.rows is not None and (first.rows, first.elements) != (second.rows, second.elements):
            return False
        if first.elements == second.elements:
            return not first.ends
        if second.elements < first.elements:
            return second.rows is None and (second.elements == first.rows or self._taken_in_parts(first))
        return first.rows is None and (first.elements == second.rows or self._read_only_by(first, second))

    def _read_only_by(self, first: _Group, second: _Group) -> bool:
        """Whether a smaller loop can be worked out anew within the larger one: nobody else wants its results."""
        readers = {reader for member in first.members for reader in self.flow.readers[member]}
        inside = {*first.members, *second.members}
        return readers <= inside and not any(self.flow.persists(member) for member in first.members)

    def _taken_in_parts(self, first: _Group) -> bool:
        """Whether a few smaller loops each work out their own part of the larger one, the whole of which nobody wants."""
        readers = {reader for member in first.members for reader in self.flow.readers[member]} - {*first.members}
        smaller = all(self.graph.operators[reader].kind in FUSIBLE and self.flow.elements[reader] < first.elements for reader in readers)
        return first.rows is None and len(readers) <= PARTS and smaller and not any(self.flow.persists(member) for member in first.members)

    def _stays_ordered(self, first: _Group, second: _Group) -> bool:
        """Whether no third kernel would have to run both after and before the merged one."""
        for one, other in ((first, second), (second, first)):
            for source in other.sources:
                between = self.groups[source]
                if between is not one and between is not other and between.before & one.bits:
                    return False
        return True

    def _spreads(self, source: int, reader: int) -> bool:
        """Whether an operator makes much from little for one reader: it is then done where it is read, and never written."""
        operator = self.graph.operators[source]
        if (
            operator.kind != POINTWISE
            or not self.groups[source].fusible
            or self.flow.readers[source] != {reader}
            or self.flow.persists(source)
        ):
            return False
        written = sum(access.bytes for access in operator.writes)
        same = self.flow.elements[source] == self.flow.elements[reader] and self.groups[source].region == self.groups[reader].region
        return same and 2 * sum(access.bytes for access in operator.reads) <= written

    def _move(self, member: int, group: _Group) -> None:
        left = self.groups[member]
        left.members.remove(member)
        left.bits &= ~(1 << member)
        group.members.append(member)
        group.bits |= 1 << member
        group.before &= ~group.bits
        self.groups[member] = group

    def _merge(self, first: _Group, second: _Group) -> _Group:
        parts = second.elements < first.elements and self._taken_in_parts(first)
        first.elements = second.elements if parts else max(first.elements, second.elements)
        first.members += second.members
        first.rows = second.rows if first.rows is None else first.rows
        first.ends = first.ends or second.ends
        first.bits |= second.bits
        first.kept |= second.kept
        first.sources |= second.sources
        first.before = (first.before | second.before) & ~first.bits
        for member in second.members:
            self.groups[member] = first
        for later in self.groups[min(first.members) + 1 :]:
            if later is not first and later.before & first.bits:
                later.before |= first.before | first.bits
        return first

    def _merged(self, members: list[int]) -> Kernel:
        """The kernel, with what it reads from outside and what others want of it."""
        inside = set(members)
        reads: list[Access] = []
        writes: list[Access] = []
        for member in members:
            operator = self.graph.operators[member]
            reads += [access for access in operator.reads if self.flow.maker.get((member, access.key)) not in inside]
            if self.flow.persists(member) or not inside.issuperset(self.flow.readers[member]) or not self.flow.readers[member]:
                writes += operator.writes
        kernel = _kernel(self.graph, [self.graph.operators[member] for member in members], reads, writes)
        return replace(kernel, compiled=self.groups[members[0]].region is not NO_REGION)


def _kernel(graph: Graph, operators: Sequence[Operator], reads: Iterable[Access], writes: Iterable[Access]) -> Kernel:
    """One kernel for `operators`, which moves these accesses."""
    chief = max(operators, key=lambda operator: (operator.kind == REDUCTION, prod(operator.size))) if len(operators) > 1 else operators[0]
    first = operators[0]
    return Kernel(
        kind=_kind(operators),
        name=first.name if len(operators) == 1 else f"{first.name} + {len(operators) - 1}",
        module=chief.module,
        phase=first.phase,
        dtype=_dtype(operators),
        size=chief.size,
        detail=first.detail if len(operators) == 1 else "",
        flops=sum(operator.flops for operator in operators),
        bytes=_moved(graph, reads) + _moved(graph, writes),
        operators=len(operators),
    )


def _kind(operators: Sequence[Operator]) -> str:
    kinds = {operator.kind for operator in operators}
    if len(operators) == 1:
        return operators[0].kind
    return REDUCTION if REDUCTION in kinds else POINTWISE


def _dtype(operators: Sequence[Operator]) -> str:
    """Of a merged kernel the narrow dtype that it rounds to, else that of the last operator over the whole loop."""
    if len(operators) == 1:
        return operators[0].dtype
    narrow = [operator.dtype for operator in operators if operator.dtype in ("fp8", "int8")]
    most = max(elements(operator) for operator in operators)
    return narrow[-1] if narrow else next(operator.dtype for operator in reversed(operators) if elements(operator) == most)


def _moved(graph: Graph, accesses: Iterable[Access]) -> float:
    """Bytes of all accesses, those of one value together.

    Of one value the largest accesses count, up to the whole of it: a graph does not tell which part each of them touches. Halves
    of a packed value add up; a value read as a whole and in halves is read once.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for access in accesses:
        found[access.key].append(access.bytes)
    return sum(min(graph.values[key].bytes, max(sizes) * sizes.count(max(sizes))) for key, sizes in found.items())
