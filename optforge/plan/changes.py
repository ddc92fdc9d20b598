"""The smallest changes after which a run fits: a smaller batch, more devices, fewer bits, each with what to type.

They are tried in that order, since a smaller batch changes nothing but the batch, more devices cost money, and fewer bits
change the model's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from optforge.measure.utilization import has_units
from optforge.plan.document import Change
from optforge.plan.graph import EMBEDDING, FORWARD, PRODUCT
from optforge.plan.schemes import scheme_bytes
from optforge.plan.sharding import Layout, Mesh, misfit
from optforge.schemes import SCHEMES
from optforge.spec import Hardware

if TYPE_CHECKING:
    from optforge.plan.memory import Stage

MORE = (2, 4, 8, 16, 32, 64)
"""Degrees that are tried."""
WITH_BATCH = ("activations", "kv_cache")
"""Parts that grow with the batch."""
WEIGHT_ONLY = ("int8_weight", "fp8_weight", "int4_weight")
"""Schemes that are offered, those that change the answers least first."""


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What a user may change in the run."""

    batch: int | None = None
    """`workload.batch_size`; None where the model brings its own example."""
    steps: tuple[str, ...] = ()
    """Names of all steps."""
    shard: str | None = None
    """Name of the shard step, if there is one."""
    quantize: str | None = None
    """Name of the last quantize step, if there is one."""


def that_fit(stage: Stage, hardware: Hardware, knobs: Knobs, *, total: Callable[[Mesh], dict[str, float]]) -> list[Change]:
    """Every single change that makes the stage fit, the smallest first.

    Args:
        total: the bytes by part of one device of a mesh.
    """
    memory = hardware.memory_bytes
    assert memory is not None, "asked only where the memory is known"
    found = [*_batch(total(stage.mesh), memory, knobs), *_devices(stage, hardware, memory, knobs, total)]
    if not stage.graph.training:
        found += _bits(stage, hardware, total(stage.mesh), memory, knobs)
    return found


def _batch(parts: dict[str, float], memory: int, knobs: Knobs) -> Iterator[Change]:
    """The largest batch that fits. Activations and cache are taken to grow with the batch in proportion."""
    if knobs.batch is None or knobs.batch == 1:
        return
    each = sum(parts.get(name, 0) for name in WITH_BATCH) / knobs.batch
    rest = sum(size for name, size in parts.items() if name not in WITH_BATCH)
    largest = min(knobs.batch - 1, int((memory - rest) // each)) if each else 0
    if largest >= 1:
        what = f"a batch of {largest} in place of {knobs.batch}"
        yield Change(override=f"workload.batch_size={largest}", what=what, total_bytes=rest + largest * each)


def _devices(stage: Stage, hardware: Hardware, memory: int, knobs: Knobs, total: Callable[[Mesh], dict[str, float]]) -> Iterator[Change]:
    """The fewest devices, by tensor parallelism and by FSDP; in training FSDP first, since it divides the states as well."""
    kinds = ("fsdp", "tensor") if stage.graph.training else ("tensor", "fsdp")
    found = []
    for kind in kinds:
        for degree in MORE:
            mesh = replace(stage.mesh, **{kind: degree})
            too_many = hardware.devices is not None and mesh.devices > hardware.devices
            if degree <= getattr(stage.mesh, kind) or too_many or misfit(stage.layout, mesh.tensor) is not None:
                continue
            size = sum(total(mesh).values())
            if size <= memory:
                what = f"{mesh.devices} devices, by {'tensor parallelism' if kind == 'tensor' else 'FSDP'}"
                found.append((mesh.devices, Change(override=_sharded(knobs, kind, degree), what=what, total_bytes=size)))
                break
    yield from (change for _, change in sorted(found, key=lambda item: item[0]))


def _sharded(knobs: Knobs, kind: str, degree: int) -> str:
    if knobs.shard is not None:
        return f"steps.{knobs.shard}.{kind}={degree}"
    return f"steps.{_free('shard', knobs)}={{use: shard/{kind}, {kind}: {degree}}}"


def _bits(stage: Stage, hardware: Hardware, parts: dict[str, float], memory: int, knobs: Knobs) -> Iterator[Change]:
    """Weights in fewer bits. Sizes are those of the layers' shapes; what is not a linear stays as it is."""
    for scheme in WEIGHT_ONLY:
        if scheme == "fp8_weight" and not has_units(hardware, "fp8"):
            continue
        saved = ceil(saving(stage.layout, scheme) / stage.mesh.tensor / stage.mesh.fsdp)
        size = sum(parts.values()) - saved
        if saved > 0 and size <= memory:
            override = (
                f"steps.{knobs.quantize}.use=quantize/{scheme}"
                if knobs.quantize is not None
                else f"steps.{_free('weights', knobs)}={{use: quantize/{scheme}}}"
            )
            yield Change(override=override, what=f"weights as {scheme}", total_bytes=size)


def saving(layout: Layout, scheme: str) -> int:
    """Bytes that the linear layers of a graph would need less under `scheme`; layers that would need more stay as they are, and
    so do those whose weight an embedding shares or whose inputs the group size does not divide."""
    looked_up = {access.key for operator in layout.graph.operators if operator.kind == EMBEDDING for access in operator.reads}
    held: dict[str, int] = {}
    for value in layout.parameters.values():
        module, _, local = value.name.rpartition(".")
        if local != "bias" and value.key not in looked_up:
            held[module] = held.get(module, 0) + value.bytes
    shapes = {
        operator.module: (operator.size[2], operator.size[3])
        for operator in layout.graph.operators
        if operator.kind == PRODUCT and operator.phase == FORWARD and operator.module in held
    }
    asked = SCHEMES[scheme]
    fitting = {module: shape for module, shape in shapes.items() if asked.group_size is None or shape[1] % asked.group_size == 0}
    return sum(max(0, held[module] - scheme_bytes(inputs, outputs, asked)) for module, (outputs, inputs) in fitting.items())


def _free(name: str, knobs: Knobs) -> str:
    """`name`, or the first of name_2, name_3, ... that no step has."""
    return next(one for one in (name, *(f"{name}_{number}" for number in range(2, 100))) if one not in knobs.steps)
