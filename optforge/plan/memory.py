"""Bytes that each device needs at the fullest moment of a call: of the weights, what is computed with them, and the runtime.

Weights, caches, gradients and states are sizes of storages that the trace saw; activations are what is alive at the fullest
moment (`plan.liveness`). What libraries take for themselves is a table of constants with their sources. Nothing is
measured here, and what is not known is left out and said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from optforge.plan import changes
from optforge.plan.document import Fit, FitRow
from optforge.plan.graph import CAPTURED, EAGER, Graph
from optforge.plan.liveness import Lives, Peak, outliving
from optforge.plan.sharding import Layout, Mesh, gathered, held, misfit
from optforge.plan.training import STATE
from optforge.report import figures
from optforge.spec import Hardware

MIB = 1 << 20
DEGREES = (2, 4, 8)
"""Degrees that are compared with one device."""


@dataclass(frozen=True)
class Constant:
    """What a library takes on devices whose `backend arch` the pattern matches."""

    pattern: str
    bytes: int
    captured_bytes: int
    """Where a captured graph is replayed."""
    source: str


WORKSPACE = (
    Constant(
        r"nvidia sm_(9|1\d)\d.*", 32 * MIB, 64 * MIB, "PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell"
    ),
    Constant(r"nvidia .*", 8320 * 1024, 2 * 8320 * 1024, "PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp: :4096:2:16:8, 8.1 MiB"),
    Constant(r"amd gfx9[45].*", 204 * MIB, 408 * MIB, "PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp: hipBLAS 128 MiB, hipBLASLt 76 MiB"),
    Constant(r"amd .*", 108 * MIB, 216 * MIB, "PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp: hipBLAS 32 MiB, hipBLASLt 76 MiB"),
)
"""Of the matrix library, from PyTorch's allocator: one for each stream that multiplies, and a capture has a stream of its own."""

RUNTIME = (
    Constant(
        r"nvidia .*",
        719_323_136,
        792_723_456,
        "process bytes less reserved bytes of an H200, torch 2.11: benchmarks/results/h200/2026-11-30_llama3_8b_decode_llama_fp8.json",
    ),
)
"""CUDA context and loaded kernels, outside PyTorch's allocator."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The model at one row of the plan, and how it runs there."""

    name: str
    graph: Graph = field(repr=False)
    mesh: Mesh = field(default_factory=Mesh)
    mode: str = EAGER
    """`eager`, `compiled` or `captured`."""
    regions: tuple[str, ...] = ("",)
    """Modules that are compiled, each by itself."""

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.graph)

    @cached_property
    def lives(self) -> Lives:
        return Lives(self.graph, compiled=self.mode != EAGER, regions=self.regions)

    @cached_property
    def prompt(self) -> tuple[Layout, Lives, frozenset[int]] | None:
        """Decode: the pass over the prompt, which is never compiled, and the cache that it fills."""
        prompt = self.graph.prompt
        return None if prompt is None else (Layout(prompt), Lives(prompt), outliving(prompt))

    @property
    def unknown(self) -> str | None:
        """Why the activations are not known."""
        prompt = self.graph.prompt
        return self.graph.unknown or (prompt.unknown if prompt is not None else None)


def parts(stage: Stage, hardware: Hardware, mesh: Mesh | None = None) -> tuple[dict[str, float], str]:
    """Bytes on one device by what they are for, and where the fullest moment is.

    Args:
        stage: the model as it is.
        hardware: the target, for what its libraries take.
        mesh: in place of the stage's own.

    The parts are those of one moment, so that they add up: gradients are the ones that lie on parameters then, and at the
    update, where that is the fullest moment, all of them. `activations` is missing where they are unknown.
    """
    mesh = mesh or stage.mesh
    found: dict[str, float] = {"weights": held(stage.layout, mesh, "parameter", "buffer")}
    caches, states = held(stage.layout, mesh, "cache"), held(stage.layout, mesh, STATE)
    found |= {"kv_cache": caches} if caches else {}
    at = ""
    if stage.unknown is None:
        fullest = _fullest(stage, mesh)
        found["activations"], at = fullest.activations, fullest.at
        found |= {"gradients": fullest.gradients, "optimizer": states} if stage.graph.training else {}
    workspace, runtime = (_constant(table, hardware, stage.mode) for table in (WORKSPACE, RUNTIME))
    whole = gathered(stage.layout, mesh)
    if workspace is not None or whole:
        found["workspace"] = (workspace or 0) + whole
    found |= {"runtime": runtime} if runtime is not None else {}
    return found, at


def fit(stages: Sequence[Stage], hardware: Hardware, knobs: changes.Knobs | None = None) -> Fit:
    """Whether each row of a plan fits the memory of one device, and what would make the last one fit.

    Args:
        stages: the model as loaded, then after each step; the last is the run's.
        hardware: the target. Where its memory is unknown, `reason` asks for it and nothing is guessed.
        knobs: what a user may change; None offers nothing.
    """
    last, memory = stages[-1], hardware.memory_bytes
    found = Fit(memory_bytes=memory, devices=last.mesh.devices, rows=[_row(stage.name, stage, hardware) for stage in stages])
    found.fits = found.rows[-1].fits
    if memory is None:
        found.reason = f"the memory of {hardware.name} is not known: type hardware.memory_bytes=<bytes of one device>"
    elif last.unknown is not None:
        found.reason = last.unknown
    found.degrees = list(_degrees(last, hardware))
    if found.fits is False and knobs is not None and last.unknown is None:
        found.changes = changes.that_fit(last, hardware, knobs, total=lambda mesh: _total(last, hardware, mesh))
    found.notes = list(_notes(last, hardware))
    return found


def _total(stage: Stage, hardware: Hardware, mesh: Mesh) -> dict[str, float]:
    return parts(stage, hardware, mesh)[0]


def _row(name: str, stage: Stage, hardware: Hardware, mesh: Mesh | None = None) -> FitRow:
    found, at = parts(stage, hardware, mesh)
    total, memory = sum(found.values()), hardware.memory_bytes
    row = FitRow(name=name, devices=(mesh or stage.mesh).devices, parts=found, at=at)
    if stage.unknown is None:
        row.total_bytes = total
    if memory is not None and (stage.unknown is None or total > memory):  # what is known may already be too much
        row.fits, row.spare_bytes = total <= memory, memory - total
    return row


def _degrees(stage: Stage, hardware: Hardware) -> Iterator[FitRow]:
    """The stage over more and more devices; a degree that does not divide the model has no bytes and says why."""
    yield _row("one device", stage, hardware, Mesh())
    for kind in ("tensor", "fsdp"):
        for degree in DEGREES:
            mesh, name = Mesh(**{kind: degree}), f"{kind}={degree}"
            why = misfit(stage.layout, mesh.tensor)
            yield _row(name, stage, hardware, mesh) if why is None else FitRow(name=name, devices=degree, at=why)


def _fullest(stage: Stage, mesh: Mesh) -> Peak:
    """The larger of the pass's fullest moment and, in decode, the prompt's."""
    found = stage.lives.peak(_share(stage.layout, mesh))
    if stage.prompt is not None:
        layout, lives, kept = stage.prompt
        prompt = lives.peak(_share(layout, mesh), kept)
        if prompt.activations > found.activations:
            return Peak(activations=prompt.activations, gradients=0, at=f"{prompt.at}, over the prompt")
    return found


def _share(layout: Layout, mesh: Mesh) -> Callable[[int], int] | None:
    """Bytes of a storage on one device; None where there is only one."""
    if mesh.tensor == 1 and mesh.fsdp == 1:
        return None

    def share(key: int) -> int:
        value = layout.graph.values[key]
        part = ceil(value.bytes / mesh.tensor) if key in layout.divided else value.bytes
        return ceil(part / mesh.fsdp) if value.role == "gradient" else part

    return share


def _constant(table: Sequence[Constant], hardware: Hardware, mode: str) -> int | None:
    found = _entry(table, hardware)
    return None if found is None else found.captured_bytes if mode == CAPTURED else found.bytes


def _entry(table: Sequence[Constant], hardware: Hardware) -> Constant | None:
    name = f"{hardware.backend} {hardware.arch}"
    return next((constant for constant in table if re.fullmatch(constant.pattern, name)), None)


def _notes(stage: Stage, hardware: Hardware) -> Iterator[str]:
    """What is counted, from where, and what is not."""
    if (workspace := _entry(WORKSPACE, hardware)) is not None:
        yield f"workspace: {workspace.source}"
    if (runtime := _entry(RUNTIME, hardware)) is not None:
        yield f"runtime: {runtime.source}"
    else:
        yield f"not counted: what the driver and the libraries of {hardware.backend} take for themselves, which nobody measured here"
    if stage.mesh.fsdp > 1:
        yield "workspace holds what FSDP gathers at once: the root's group of weights and two layers', in training two groups of gradients"
    if stage.graph.training:
        gradients = held(stage.layout, stage.mesh, "gradient")
        yield f"gradients are those that lie on weights at the fullest moment; all of them are {figures.nbytes(gradients)}"
    yield "not counted: blocks that the allocator holds and does not use (1.3% of its peak in prefill of Llama-3-8B on an H200)"
    if stage.mesh.fsdp > 1 or stage.mesh.data > 1:
        yield "workload.batch_size is what each device of fsdp and data gets"
