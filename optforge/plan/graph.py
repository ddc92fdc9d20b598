"""The operators of one forward pass (or one training step) as plain data: what `trace` sees and the rest of the plan reads.

An operator is what PyTorch dispatches; views are left out, since they move nothing. Values are storages and not tensors,
so that a view, an in-place write and the tensor itself are one thing. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from optforge.measure.machine.point import (
    ATTENTION,
    BACKWARD,
    CONVOLUTION,
    COPY,
    EMBEDDING,
    FORWARD,
    OPTIMIZER,
    POINTWISE,
    PRODUCT,
    REDUCTION,
    UPDATE,
)

__all__ = [
    "ATTENTION",
    "BACKWARD",
    "CAPTURED",
    "COLLECTIVE",
    "COMPILED",
    "CONVOLUTION",
    "COPY",
    "EAGER",
    "EMBEDDING",
    "FORWARD",
    "FUSIBLE",
    "OPTIMIZER",
    "OUTSIDE",
    "POINTWISE",
    "PRODUCT",
    "REDUCTION",
    "UNKNOWN",
    "UPDATE",
    "Access",
    "Graph",
    "Kernel",
    "Operator",
    "Value",
]

COLLECTIVE, UNKNOWN = "collective", "unknown"
"""Kinds that no point has: what devices send one another, and work that cannot be known."""

FUSIBLE = (EMBEDDING, POINTWISE, REDUCTION, COPY)
"""Kinds that a compiler merges with their neighbours; the others are kernels of their own."""

OUTSIDE = "(workload)"
"""Module path of what the workload does around the model, such as choosing a token; no compile step reaches it."""

EAGER, COMPILED, CAPTURED = "eager", "compiled", "captured"
"""How a graph runs: each operator launched by itself; merged by a compiler; merged, and replayed from a captured graph."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One storage that operators read or write."""

    key: int
    bytes: int
    """Size of the whole storage."""
    role: str
    """`parameter`, `buffer`, `input`, `cache` (kept from one pass to the next), `value` (made by an operator) or `gradient` (made by
    an operator, and left on a parameter)."""
    name: str = ""
    """Dotted name of a parameter or buffer, or of the parameter that a gradient is of; else empty."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """What one operator reads or writes of a value."""

    key: int
    bytes: float
    """Bytes touched: of a view only its own elements, of a look-up only the rows found, of an expanded tensor each once."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One dispatched operator that does work."""

    name: str
    """As PyTorch names it, without the overload: `aten.mm`, `aten.scaled_dot_product_attention`, `optforge.fp8_weight`."""
    kind: str
    """One of the constants above."""
    module: str
    """Dotted path of the module whose forward called it, empty for the model itself; `OUTSIDE` for what the workload does; empty in
    the backward pass."""
    phase: str = FORWARD
    dtype: str
    """Of the operands that are multiplied, for products (`fp32 bf16 fp16 fp8 int8`), else of the first output."""
    size: tuple[int, ...] = ()
    """product: (batch, m, n, k). attention: (batch, heads, kv_heads, queries, keys, head_dim). convolution: (batch,
    in_channels, out_channels, groups, kernel_elements, output_pixels). embedding: (rows, width). Others: the shape of the first
    output."""
    detail: str = ""
    """attention: `causal`, `masked` or empty. Others: empty."""
    flops: float = 0.0
    """A multiply and an add count as two. Products, convolutions and attention alone; causal attention counts the half that is
    needed."""
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    why: str = ""
    """kind `unknown`: why its work is not known (a custom operator without a fake implementation)."""

    @property
    def bytes(self) -> float:
        """Bytes that it reads and writes when it runs as a kernel of its own."""
        return sum(access.bytes for access in (*self.reads, *self.writes))


@dataclass(kw_only=True)
class Graph:
    """The operators of one pass in their order, and the storages between them."""

    operators: list[Operator] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    """Values that outlive the pass: what it returns."""
    passes: int = 1
    """Passes in one call of the workload (decode: one per new token)."""
    unit: str = "items"
    """`tokens` or `items`: what `units` counts."""
    units: int = 1
    """Tokens or items that one call of the workload processes."""
    training: bool = False
    """The graph holds a backward pass and an optimizer's update."""
    freed: dict[int, int] = field(default_factory=dict)
    """Value -> how many operators had run when the last reference to it went, as the model's own code and autograd let go of it
    when run eagerly. What is not in here lived to the end; empty in a graph made by hand."""
    prompt: Graph | None = None
    """Decode: the pass over the prompt, which is not timed but needs memory."""
    notes: list[str] = field(default_factory=list)
    unknown: str | None = None
    """Why the trace ended early or could not be made at all; what it holds up to there stands."""

    def bytes_of(self, *roles: str) -> int:
        """Bytes of all storages of these roles, each once."""
        return sum(value.bytes for value in self.values.values() if value.role in roles)

    def unknown_operators(self) -> Iterator[Operator]:
        return (operator for operator in self.operators if operator.kind == UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a device launches: an operator by itself, or several that a compiler merged."""

    kind: str
    """Of the operator; a merged kernel is a `reduction` if it holds one, else `pointwise`."""
    name: str
    """The operator's name; of a merged kernel the first and the number of the rest: `aten.add + 5`."""
    module: str
    phase: str
    dtype: str
    size: tuple[int, ...]
    detail: str = ""
    flops: float
    bytes: float
    """Read from and written to memory; values within a merged kernel are neither."""
    operators: int = 1
    """Dispatched operators that it stands for."""
    compiled: bool = False
    """It lies in what a compiler made: written by it, or a library's kernel in the layout that it chose."""
