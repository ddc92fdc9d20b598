"""A graph as one device of a mesh sees it: its share of every weight, cache, product and head, and what it must exchange.

Tensor parallelism follows Megatron-LM (Shoeybi et al., 2019, section 3): columns, then rows, then an all-reduce; embedding
and head by vocabulary. Names decide, by the rule that the shard step uses (`transforms.shard.layout.role`), so that degrees
nobody asked for can be compared too. FSDP follows PyTorch's FSDP2: every parameter in slices along dimension 0, gathered a
layer at a time. Batches are per device: `fsdp` and `data` multiply the work done and not the work of one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from optforge.plan.graph import ATTENTION, BACKWARD, COLLECTIVE, EMBEDDING, FORWARD, PRODUCT, UPDATE, Access, Graph, Kernel, Operator
from optforge.plan.training import STATE
from optforge.transforms.shard.layout import COLUMN, ROW, VOCABULARY, role

SLICED = ("parameter", "gradient", STATE)
"""Roles of what belongs to a parameter, and is divided as it is."""
COLUMN_VECTORS = ("bias", "weight_sum")
"""Parameters with one number per output column."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Degrees of one device mesh, as a shard step gives them."""

    tensor: int = 1
    fsdp: int = 1
    data: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.fsdp * self.data

    @classmethod
    def of(cls, decisions: Mapping[str, object]) -> Mesh:
        """The mesh in a shard step's `Receipt.decisions`; one device where there is none."""
        degrees = decisions.get("mesh", {})
        assert isinstance(degrees, Mapping)
        return cls(**degrees)


class Layout:
    """Which storages of a graph a tensor degree divides; the same for every degree."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.vocabulary = _vocabulary(graph)
        self.parameters = {value.key: value for value in graph.values.values() if value.role == "parameter"}
        self.by_name = {value.name: value for value in self.parameters.values()}

    def role(self, name: str) -> str | None:
        """`column`, `row` or `vocabulary` of a parameter by its dotted name; None for what every device holds whole."""
        module = name.rpartition(".")[0]
        return VOCABULARY if module in self.vocabulary else role(module)

    def splits(self, name: str) -> bool:
        """Whether the tensor degree divides this parameter. One number per output is whole in a row-parallel linear, and a
        single scale is whole everywhere."""
        kind, value = self.role(name), self.by_name.get(name)
        if kind is None or value is None:
            return False
        module, _, local = name.rpartition(".")
        if local == "weight":
            return True
        if kind == ROW:
            width = 1 if local == "weight_zero_point" else 4
            return local not in COLUMN_VECTORS and value.bytes > width * self._outputs.get(module, value.bytes)
        return value.bytes > 4

    @cached_property
    def divided(self) -> frozenset[int]:
        """Keys of every storage of which a device holds only its part: weights, their gradients, what columns make, KV caches."""
        found = {value.key for value in self.graph.values.values() if value.role == "cache"}
        found |= {value.key for value in self.graph.values.values() if value.role in SLICED and self.splits(value.name)}
        for operator in self.graph.operators:
            if self._makes_parts(operator, found):
                found |= {access.key for access in operator.writes if self.graph.values[access.key].role == "value"}
        return frozenset(found)

    def kind(self, operator: Operator) -> str | None:
        """`column`, `row` or `vocabulary` of a product or a look-up by the linear whose weight it reads; None for others."""
        if operator.kind not in (PRODUCT, EMBEDDING):
            return None
        module = operator.module if operator.phase == FORWARD else self.weight(operator).rpartition(".")[0]
        return VOCABULARY if module in self.vocabulary else role(module)

    def weight(self, operator: Operator) -> str:
        """Name of the weight that an operator reads; empty where it reads none."""
        names = (self.parameters[access.key].name for access in operator.reads if access.key in self.parameters)
        return next((name for name in names if name.rpartition(".")[2] == "weight"), "")

    def _makes_parts(self, operator: Operator, found: set[int]) -> bool:
        """Whether what an operator writes is one device's part of it: what columns give, and whatever is made of parts. What rows
        give is summed over the devices, rows looked up too, and the logits are gathered."""
        kind = self.kind(operator)
        if kind is not None:
            return kind == (COLUMN if operator.phase == FORWARD else ROW)
        return operator.phase != UPDATE and any(access.key in found for access in operator.reads)

    @cached_property
    def _outputs(self) -> dict[str, int]:
        """N of each linear by its module's name."""
        return {operator.module: operator.size[2] for operator in self.graph.operators if operator.kind == PRODUCT and operator.module}


def held(layout: Layout, mesh: Mesh, *roles: str) -> int:
    """Bytes of one device's share of the storages of these roles: weights, gradients and optimizer states by tensor degree and
    FSDP, rounded up to whole slices; buffers whole; KV caches by heads."""
    total = 0
    for value in layout.graph.values.values():
        if value.role in roles:
            part = ceil(value.bytes / mesh.tensor) if value.key in layout.divided else value.bytes
            total += ceil(part / mesh.fsdp) if value.role in SLICED else part
    return total


def gathered(layout: Layout, mesh: Mesh) -> int:
    """Bytes of whole weights, and in training whole gradients, that FSDP holds at once: the root's group, which FSDP2 keeps
    gathered, and of the others the largest two, one that runs and one that is fetched ahead; of gradients the largest two, one
    that is made and one that is on its way out."""
    if mesh.fsdp == 1:
        return 0
    weights, gradients = _units(layout, mesh), _units(layout, mesh, "gradient")
    return weights.pop("", 0) + sum(sorted(weights.values())[-2:]) + sum(sorted(gradients.values())[-2:])


def split(graph: Graph, mesh: Mesh) -> Graph:
    """The graph of one device: n or k of products, heads of attention and every access divided by the tensor degree.

    What a device computes whole (norms, the residual stream) stays. The update is divided by FSDP as well. The values keep
    their bytes; `held` and `memory.fit` divide them.
    """
    if mesh.tensor == 1 and mesh.fsdp == 1:
        return graph
    layout = Layout(graph)
    return replace(graph, operators=[_on_one(operator, layout, mesh) for operator in graph.operators])


def collectives(graph: Graph, mesh: Mesh) -> list[Kernel]:
    """What one device sends in one pass, as kernels of kind `collective`; `bytes` are those on its links (ring algorithms:
    2 (n-1)/n of an all-reduce's buffer, (n-1)/n of a gather's or scatter's). `size` is (degree, bytes of the whole buffer)."""
    layout = Layout(graph)
    found = [*_tensor(layout, mesh.tensor)] if mesh.tensor > 1 else []
    found += [*_fsdp(layout, mesh)] if mesh.fsdp > 1 else []
    if graph.training and mesh.data > 1:
        size = held(layout, replace(mesh, data=1), "gradient") / graph.passes
        found.append(_collective("all_reduce", what="gradients", degree=mesh.data, whole=size, phase=BACKWARD, module=""))
    return found


def _tensor(layout: Layout, degree: int) -> Iterator[Kernel]:
    """An all-reduce after each row-parallel linear and after the embedding, a gather of the head's logits; in the backward pass
    an all-reduce for each group of columns that read one input."""
    reduced: set[str] = set()
    for operator in layout.graph.operators:
        kind = layout.kind(operator)
        if kind is None:
            continue
        module = operator.module or layout.weight(operator).rpartition(".")[0]
        if operator.phase == FORWARD and kind == COLUMN:
            continue
        if operator.phase == BACKWARD:
            # q, k and v, or gate and up, add the gradients of their input up before one all-reduce
            group = module.rpartition(".")[0] if kind == COLUMN else module
            if kind == ROW or group in reduced:
                continue
            reduced.add(group)
        gathers = operator.phase == FORWARD and kind == VOCABULARY and operator.kind == PRODUCT
        yield _collective(
            "all_gather" if gathers else "all_reduce",
            what="logits" if gathers else "activations",
            degree=degree,
            whole=sum(access.bytes for access in operator.writes),
            dtype=operator.dtype,
            phase=operator.phase,
            module=module,
        )


def _fsdp(layout: Layout, mesh: Mesh) -> Iterator[Kernel]:
    """A gather of each group's weights, forward and again backward; then a reduce-scatter of its gradients."""
    for unit, size in _units(layout, mesh).items():
        for phase in (FORWARD, BACKWARD) if layout.graph.training else (FORWARD,):
            yield _collective("all_gather", what="weights", degree=mesh.fsdp, whole=size, phase=phase, module=unit)
    for unit, size in _units(layout, mesh, "gradient").items():
        yield _collective("reduce_scatter", what="gradients", degree=mesh.fsdp, whole=size, phase=BACKWARD, module=unit)


def _units(layout: Layout, mesh: Mesh, kind: str = "parameter") -> dict[str, int]:
    """Bytes of each FSDP group, whole along FSDP: one for each repeated layer, one for the rest."""
    found: dict[str, int] = {}
    for value in layout.graph.values.values():
        if value.role == kind:
            part = ceil(value.bytes / mesh.tensor) if value.key in layout.divided else value.bytes
            unit = _block(value.name)
            found[unit] = found.get(unit, 0) + part
    return found


def _block(name: str) -> str:
    """`model.layers.3` of a parameter of the fourth layer; empty outside the repeated layers."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _collective(name: str, *, what: str, degree: int, whole: float, phase: str, module: str, dtype: str = "") -> Kernel:
    """A ring's exchange of a buffer of `whole` bytes: an all-reduce sends it twice, less a device's own share."""
    sent = (2 if name == "all_reduce" else 1) * (degree - 1) / degree * whole
    return Kernel(
        kind=COLLECTIVE,
        name=name,
        module=module,
        phase=phase,
        dtype=dtype,
        size=(degree, round(whole)),
        detail=what,
        flops=0.0,
        bytes=sent,
    )


def _on_one(operator: Operator, layout: Layout, mesh: Mesh) -> Operator:
    """The operator as one device runs it."""
    if operator.phase == UPDATE:
        return _updated(operator, layout, mesh)
    degree, kind = mesh.tensor, layout.kind(operator)
    touched = kind is not None or any(access.key in layout.divided for access in (*operator.reads, *operator.writes))
    if degree == 1 or not touched:
        return operator
    reads, writes = _divided(operator.reads, layout, degree), _divided(operator.writes, layout, degree)
    if kind == VOCABULARY and operator.kind == PRODUCT and operator.phase == FORWARD:  # its part of the logits, before the gather
        writes = tuple(Access(key=access.key, bytes=access.bytes / degree) for access in operator.writes)
    return replace(operator, size=_size(operator, layout, degree), flops=operator.flops / degree, reads=reads, writes=writes)


def _divided(accesses: tuple[Access, ...], layout: Layout, degree: int) -> tuple[Access, ...]:
    return tuple(Access(key=a.key, bytes=a.bytes / degree) if a.key in layout.divided else a for a in accesses)


def _size(operator: Operator, layout: Layout, degree: int) -> tuple[int, ...]:
    """The operator's size on one device."""
    if operator.kind == EMBEDDING:
        return operator.size
    if operator.kind == ATTENTION:
        batch, heads, kv_heads, *rest = operator.size
        return (batch, heads // degree, max(1, kv_heads // degree), *rest)
    if operator.kind == PRODUCT:
        batch, *sides = operator.size
        at = _side(operator, layout)
        return (batch, *(size // degree if index == at else size for index, size in enumerate(sides)))
    if not any(access.key in layout.divided for access in operator.writes):
        return operator.size
    at = 1 if len(operator.size) == 4 and operator.size[1] % degree == 0 else len(operator.size) - 1  # heads, or columns
    return tuple(size // degree if index == at and size % degree == 0 else size for index, size in enumerate(operator.size))


def _side(operator: Operator, layout: Layout) -> int:
    """Which of m, n and k (0, 1, 2) a product divides: the side of its weight, or, of a weight's gradient, the side in parts."""
    kind = layout.kind(operator)
    if kind is not None:
        return 1 if (kind in (COLUMN, VOCABULARY)) is (operator.phase == FORWARD) else 2
    return 1 if len(operator.reads) > 1 and operator.reads[1].key in layout.divided else 0


def _updated(operator: Operator, layout: Layout, mesh: Mesh) -> Operator:
    """The update of a device's own slices."""

    def part(access: Access) -> Access:
        degree = mesh.fsdp * (mesh.tensor if access.key in layout.divided else 1)
        return Access(key=access.key, bytes=access.bytes / degree)

    return replace(operator, reads=tuple(map(part, operator.reads)), writes=tuple(map(part, operator.writes)))


def _vocabulary(graph: Graph) -> frozenset[str]:
    """Names of the module that gives the logits and of the one that looks the vocabulary up: the product outside the repeated
    layers that has the most outputs (more than one, unlike the rotary tables'), and the table with as many rows, or the largest."""
    sizes: dict[str, int] = {}
    widths: dict[str, float] = {}
    products: dict[str, int] = {}
    for operator in graph.operators:
        if operator.phase != FORWARD or not operator.module or _block(operator.module):
            continue
        if operator.kind == EMBEDDING:
            sizes[operator.module] = max((graph.values[access.key].bytes for access in operator.reads), default=0)
            widths[operator.module] = sum(access.bytes for access in operator.writes) / max(1, operator.size[0])
        elif operator.kind == PRODUCT:
            products[operator.module] = operator.size[2]
    if not sizes:
        return frozenset()
    most = max(products.values(), default=0)
    table = max(sizes, key=lambda name: (sizes[name] == most * widths[name], sizes[name]))
    return frozenset([table, *(name for name, outputs in products.items() if outputs == most > 1)])


def misfit(layout: Layout, degree: int) -> str | None:
    """Why a tensor degree does not divide the model, in one phrase, from the graph alone; None where it does.

    The shard step itself tells every layer (`transforms.shard.misfits`); this is for comparing degrees.
    """
    if degree == 1:
        return None
    if not any(layout.kind(operator) in (COLUMN, ROW) for operator in layout.graph.operators):
        return "the names of its layers do not tell how they split"
    for operator in layout.graph.operators:
        if operator.phase != FORWARD:
            continue
        if operator.kind == ATTENTION and any(heads % degree for heads in operator.size[1:3]):
            return f"{operator.size[1]} heads and {operator.size[2]} key/value heads are not divisible by {degree}"
        kind = layout.kind(operator)
        if operator.kind != PRODUCT or kind is None:
            continue
        size = operator.size[3] if kind == ROW else operator.size[2]
        if size % degree:
            return f"{size} {'inputs' if kind == ROW else 'outputs'} of {operator.module} are not divisible by {degree}"
        scale = layout.by_name.get(f"{operator.module}.weight_scale")
        groups = scale.bytes // (4 * operator.size[2]) if scale is not None and kind == ROW else 1
        if groups > 1 and groups % degree:
            return f"{groups} quantization groups of {operator.module} are not divisible by {degree}"
    return None
