"""One measured operator as plain data, so that it can be stored, shared and read without torch."""

from __future__ import annotations

from dataclasses import dataclass

PRODUCT, ATTENTION, CONVOLUTION = "product", "attention", "convolution"
EMBEDDING, POINTWISE, REDUCTION, COPY, OPTIMIZER = "embedding", "pointwise", "reduction", "copy", "optimizer"
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

BACKWARD_PRODUCTS = 2.5
"""Arithmetic of attention's backward pass over that of its forward pass: five products, since scores are computed again, in place of
two (Dao, FlashAttention-2, 2023, section 3.1)."""

FUSED = "fused"
"""Name of a kernel that a compiler made of several operators."""


def compiled_name(operator: str) -> str:
    """The name of one operator's kernel as a compiler writes it, or in the layout that it chooses."""
    return f"{FUSED} {operator}"


@dataclass(frozen=True, kw_only=True)
class Point:
    """The time of one operator at one size. Kinds, names, dtypes and sizes are those of `optforge.plan.graph.Operator`."""

    kind: str
    name: str
    dtype: str
    size: tuple[int, ...]
    detail: str = ""
    phase: str = FORWARD
    bytes: float
    """Read and written by one call: every operand once."""
    seconds: float
    """Of one call, the median of several rounds, less what launching it costs (`overheads.py`)."""
    spread: float
    """(90th - 10th percentile) / median of the rounds."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What the host adds, in seconds. Zero where there is no such thing (a CPU has no captured graphs)."""

    eager_operator: float
    """Of one operator that PyTorch dispatches from Python, its share of the module calls around it included."""
    compiled_kernel: float
    """Of one kernel that a compiled region launches."""
    captured_kernel: float
    """Of the smallest kernel in a captured CUDA graph, which every kernel in it takes at least."""
    compiled_region: float
    """Of entering one compiled region: its guards and its wrapper."""
    call: float
    """Of one call of the workload: replaying a captured graph; zero on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The best that was seen: operations per second by dtype, bytes per second of memory, and how each was measured."""

    flops: dict[str, float]
    bandwidth_bytes_per_s: float
    how: dict[str, str]
    """`fp32`, ..., `bandwidth_bytes_per_s` -> what ran."""
