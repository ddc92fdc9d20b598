"""Remembers what an operator makes of tensors of certain shapes, so that the eighty equal layers of a model are worked out once.

PyTorch works the shapes of most operators out in Python, which is where tracing a large model spends its time. Operators that write
in place, and those whose results are views, are never remembered: their results are tensors that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optforge.plan.kinds import Described

MOST = 8192
"""Results kept; beyond it everything is forgotten and begun anew."""


@dataclass(frozen=True)
class _Template:
    """A description whose tensors are numbers of inputs and of outputs."""

    described: Described
    reads: tuple[tuple[int, float], ...]
    writes: tuple[tuple[int, float], ...]

    def of(self, inputs: list[Tensor], outputs: list[Tensor]) -> Described:
        """The description for these tensors."""
        one = self.described
        return Described(
            name=one.name,
            kind=one.kind,
            dtype=one.dtype,
            size=one.size,
            detail=one.detail,
            flops=one.flops,
            reads=[(inputs[index], size) for index, size in self.reads],
            writes=[(outputs[index], size) for index, size in self.writes],
        )


@dataclass(frozen=True)
class Remembered:
    """What one operator returned, without the tensors themselves."""

    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    """Shape, strides and dtype of each output."""
    wrap: Callable[[list[Tensor]], Any]
    """`tuple` or `list`, for several outputs."""
    single: bool
    described: _Template | None
    """None where the operator only allocated memory."""

    def outputs(self) -> list[Tensor]:
        """New tensors on meta."""
        return [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in self.shapes]


_results: dict[Hashable, Remembered] = {}


def leaves(value: Any) -> list[Any]:
    """What lies in nested lists, tuples and dicts, in order: all that the arguments of an operator are made of.

    PyTorch's own pytrees do the same for any class, at ten times the cost.
    """
    found: list[Any] = []
    _flatten(value, found)
    return found


def _flatten(value: Any, found: list[Any]) -> None:
    if isinstance(value, (list, tuple)):
        for child in value:
            _flatten(child, found)
    elif isinstance(value, dict):
        for child in value.values():
            _flatten(child, found)
    else:
        found.append(value)


def key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Any]) -> Hashable | None:
    """What the result's shapes depend on; None where it cannot be told (an argument without a hash). `flat`: the arguments' leaves."""
    parts: list[Hashable] = [func, tuple(kwargs), tuple(len(arg) if isinstance(arg, (list, tuple)) else -1 for arg in args)]
    for leaf in flat:
        if isinstance(leaf, Tensor):
            if not leaf.is_meta:
                return None
            parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
        else:
            parts.append((type(leaf), leaf))
    found = tuple(parts)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def found(asked: Hashable | None) -> Remembered | None:
    """The remembered result, or None."""
    return None if asked is None else _results.get(asked)


def keep(asked: Hashable | None, func: Any, inputs: list[Tensor], out: Any, described: Described | None) -> None:
    """Remembers a result that is new memory and nothing else."""
    outputs = [leaf for leaf in leaves(out) if isinstance(leaf, Tensor)]
    if asked is None or func._schema.is_mutable or not _is_new(inputs, out, outputs):
        return
    template = None
    if described is not None:
        where = ({id(tensor): index for index, tensor in enumerate(tensors)} for tensors in (inputs, outputs))
        of_inputs, of_outputs = where
        template = _Template(
            described=Described(**{**vars(described), "reads": [], "writes": []}),
            reads=tuple((of_inputs[id(tensor)], size) for tensor, size in described.reads),
            writes=tuple((of_outputs[id(tensor)], size) for tensor, size in described.writes),
        )
    if len(_results) >= MOST:
        _results.clear()
    _results[asked] = Remembered(
        shapes=tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in outputs),
        wrap=list if isinstance(out, list) else tuple,
        single=isinstance(out, Tensor),
        described=template,
    )


def _is_new(inputs: list[Tensor], out: Any, outputs: list[Tensor]) -> bool:
    """Whether every output is a whole storage of its own on meta, that no input has."""
    listed = [out] if isinstance(out, Tensor) else out
    if not outputs or not isinstance(listed, (list, tuple)) or len(listed) != len(outputs):
        return False
    taken = {tensor.untyped_storage()._cdata for tensor in inputs}
    own = [tensor.untyped_storage()._cdata for tensor in outputs]
    return len({*own}) == len(own) and not taken & {*own} and all(tensor.is_meta and not tensor.storage_offset() for tensor in outputs)
