"""Whether a product runs as a kernel or as plain PyTorch, and what is known of each operator's cost.

On CUDA (ROCm answers as CUDA) the operators of this package run; every other device takes the plain reference. An
exported program must not hold an operator of ours, because it could not be loaded without OptForge: `decompose` makes
every layer trace its reference instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

LIBRARY = torch.library.Library("optforge", "FRAGMENT")  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
"""Where the operators of this package are defined; it lives as long as the process."""

ByteFormula = Callable[..., int]
BYTE_FORMULAS: dict[str, ByteFormula] = {}
"""Operator name -> f(x, weight, scale, ...) -> the fewest bytes that one call reads and writes."""

_decomposed = False
_traced: str | None = None
GPUS = ("nvidia", "amd")


@contextmanager
def decompose() -> Iterator[None]:
    """Within it, quantized layers run and trace as plain PyTorch on every device. Wrap `torch.export.export` in it."""
    global _decomposed  # noqa: PLW0603 - read by tracers, which guard on a module global but not on a context variable
    before, _decomposed = _decomposed, True
    try:
        yield
    finally:
        _decomposed = before


def decomposing() -> bool:
    """Whether `decompose` holds."""
    return _decomposed


@contextmanager
def traced_for(backend: str) -> Iterator[None]:
    """Within it, meta tensors take the paths that tensors on a device of `backend` would take. For the plan's trace."""
    global _traced  # noqa: PLW0603 - as above
    before, _traced = _traced, backend
    try:
        if backend in (*GPUS, "cpu"):
            yield
        else:
            with decompose():
                yield
    finally:
        _traced = before


def on_gpu(x: Tensor) -> bool:
    """Whether `x` lies on a GPU, or stands for a tensor that does (`traced_for`)."""
    return x.is_cuda or (x.is_meta and _traced in GPUS)


def on_cpu(x: Tensor) -> bool:
    """Whether `x` lies on the CPU, or stands for a tensor that does (`traced_for`)."""
    return x.device.type == "cpu" or (x.is_meta and _traced == "cpu")


def takes_kernel(x: Tensor) -> bool:
    """Whether `x` lies on a device that the kernels run on, outside `decompose`."""
    return on_gpu(x) and not _decomposed


def define(name: str, arguments: str, *, cuda: Callable[..., Tensor], reference: Callable[..., Tensor]) -> None:
    """Defines `optforge::<name>(Tensor x, Tensor weight, <arguments>) -> Tensor` with all that a tracer asks of it.

    Args:
        arguments: the schema's arguments after `weight`; `bias` is among them.
        cuda: launches the kernel. x is [rows, K], the result [rows, N] in x's dtype.
        reference: the same in plain PyTorch, for every other device.
    """
    LIBRARY.define(f"{name}(Tensor x, Tensor weight, {arguments}) -> Tensor")  # type: ignore[no-untyped-call]  # as above
    LIBRARY.impl(name, cuda, "CUDA")  # type: ignore[no-untyped-call]  # as above
    LIBRARY.impl(name, reference, "CPU")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake(f"optforge::{name}", _fake, lib=LIBRARY)
    register_flop_formula(getattr(torch.ops.optforge, name))(product_flops)
    BYTE_FORMULAS[name] = product_bytes


def define_plain(name: str, schema: str, *, cpu: Callable[..., Tensor], fake: Callable[..., Tensor], flops: Callable[..., int]) -> None:
    """Defines `optforge::<name><schema>` for the CPU alone; other devices never reach it."""
    LIBRARY.define(f"{name}{schema}")  # type: ignore[no-untyped-call]  # as above
    LIBRARY.impl(name, cpu, "CPU")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake(f"optforge::{name}", fake, lib=LIBRARY)
    register_flop_formula(getattr(torch.ops.optforge, name))(flops)


def define_operator(
    name: str,
    schema: str,
    *,
    cuda: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int],
    moved: ByteFormula,
) -> None:
    """Defines `optforge::<name><schema>` of any shape, with all that a tracer and a counter ask of it.

    Args:
        cuda: launches the kernel; reference: the same in plain PyTorch.
        flops: f(shapes in place of tensors, ...) -> floating-point operations.
        moved: f(the operator's own arguments) -> the fewest bytes that one call reads and writes.
    """
    LIBRARY.define(f"{name}{schema}")  # type: ignore[no-untyped-call]  # as above
    LIBRARY.impl(name, cuda, "CUDA")  # type: ignore[no-untyped-call]  # as above
    LIBRARY.impl(name, reference, "CPU")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake(f"optforge::{name}", fake, lib=LIBRARY)
    register_flop_formula(getattr(torch.ops.optforge, name))(flops)
    BYTE_FORMULAS[name] = moved


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of these tensors, each once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def product_bytes(x: Tensor, weight: Tensor, *others: Tensor | None) -> int:
    """Bytes of the input, the stored weight, its scales, zero points and bias, each read once, and of the output."""
    output = x.shape[0] * weight.shape[0] * x.element_size()
    return output + sum(t.numel() * t.element_size() for t in (x, weight, *others) if t is not None)


def _fake(x: Tensor, weight: Tensor, *arguments: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def product_flops(
    x_shape: tuple[int, ...], weight_shape: tuple[int, ...], *arguments: object, out_shape: object = None, **rest: object
) -> int:
    """A multiply and an add for every input, row and output: 2 * rows * K * N."""
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


def _int_mm_flops(a_shape: tuple[int, int], b_shape: tuple[int, int], *arguments: object, **rest: object) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


if torch.ops.aten._int_mm not in flop_registry:  # PyTorch counts it as nothing
    register_flop_formula(torch.ops.aten._int_mm)(_int_mm_flops)
