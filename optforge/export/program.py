"""The optimized model as one program of plain PyTorch operators, with sizes that may change: what three formats are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from optforge.errors import ModelError, Problem
from optforge.export.base import Subject
from optforge.export.called import Called
from optforge.export.inputs import BATCH, TOKENS
from optforge.kernels import dispatch

LARGEST = {BATCH: 2**16, TOKENS: 2**20}
OURS = "optforge"
"""Namespace of the operators that no other process knows."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """An exported program, the axes along which its sizes may change, and why others may not."""

    exported: ExportedProgram
    dynamic: frozenset[str]
    notes: tuple[str, ...] = ()


def program(subject: Subject) -> Program:
    """Exports with the batch and, where the model allows it, the tokens dynamic; every operator of ours is decomposed.

    Raises:
        ModelError: the model cannot be exported with a dynamic batch, says PyTorch's first line, or an operator of ours is left.
    """
    axes = {axis for found in subject.inputs.axes.values() for axis in found.values()}
    notes: list[str] = []
    for dynamic in (frozenset(axes), frozenset((BATCH,))):
        try:
            exported = _exported(subject, dynamic)
        except Exception as error:  # PyTorch raises many kinds here; each is told, and none is hidden
            reason = _first_line(error)
            if BATCH not in axes or dynamic == {BATCH}:
                what = f"torch.export refuses the model with a dynamic batch ({reason})"
                raise ModelError(Problem(where="export", what=what, fix="let its forward take any batch, or drop this format")) from error
            notes.append(f"the number of tokens is fixed to the example's: torch.export refuses a dynamic one ({reason})")
            continue
        _require_plain(exported)
        return Program(exported=exported, dynamic=dynamic, notes=tuple(notes))
    raise AssertionError("the loop returns or raises")


def facts(made: Program, subject: Subject) -> dict[str, Any]:
    """What export.json says of a program's inputs: sizes of the example, the dynamic ones by name."""
    axes = subject.inputs.axes
    shapes = {
        name: [axes[name][dim] if axes[name].get(dim) in made.dynamic else size for dim, size in enumerate(tensor.shape)]
        for name, tensor in subject.inputs.tensors.items()
    }
    return {"inputs": shapes, "dynamic": sorted(made.dynamic), "device": subject.device.type}


def _exported(subject: Subject, dynamic: frozenset[str]) -> ExportedProgram:
    inputs = subject.inputs
    largest = LARGEST | ({TOKENS: inputs.positions} if inputs.positions else {})
    dims = {axis: Dim(axis, min=1, max=largest[axis]) for axis in dynamic}
    shapes = {name: {dim: dims[axis] for dim, axis in inputs.axes[name].items() if axis in dims} for name in inputs.tensors}
    with dispatch.decompose(), torch.no_grad():
        called = Called(subject.module, inputs).eval()
        return torch.export.export(called, (), dict(inputs.tensors), dynamic_shapes=shapes, strict=False)


def _require_plain(exported: ExportedProgram) -> None:
    """
    Raises:
        ModelError: a graph holds an operator of this package, which a process without it cannot run.
    """
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    names = sorted({str(node.target) for graph in graphs for node in graph.nodes if str(node.target).startswith(OURS)})
    if names:
        what = f"the program still holds operators of OptForge ({', '.join(names)})"
        raise ModelError(Problem(where="export", what=what, fix="drop the step that put them in, and report it"))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
