"""The plan's part for TPU targets: XLA compiles the whole program of one pass, and its own figures stand beside the roofline's.

The compile runs in a process of its own (`optforge.xla`), with a limit in time. Whatever becomes of it is told in this part
of the plan and ends nothing else.
"""

from __future__ import annotations

import importlib.util
import logging
import pickle
import re

from optforge import isolate
from optforge.errors import ChildFailed, MissingDependency, Problem
from optforge.plan.document import Xla
from optforge.plan.make import Plan
from optforge.spec import Hardware, Json
from optforge.xla.request import PACKAGES, TOPOLOGIES, Compiled, Request

log = logging.getLogger(__name__)

BACKEND = "xla"
ENTRY = "optforge.xla.compile:compile_step"
TIMEOUT_S = 600.0
"""A Llama-3-8B shape takes 40 s on two busy cores (docs/log.md); this is for machines and models far slower."""
OPTIMAL = "optimal_seconds"
EXHAUSTED = "RESOURCE_EXHAUSTED"
"""The status with which XLA refuses a program for want of memory."""


def require_extra(target: Hardware) -> None:
    """Refuses to run for an XLA target on a machine where XLA cannot be asked.

    Raises:
        MissingDependency: in one line, with what is not importable and the command that brings it.
    """
    problem = missing(target)
    if problem is not None:
        raise MissingDependency(problem)


def missing(target: Hardware) -> Problem | None:
    """What keeps this Python from compiling for `target`; None for another backend's target, or where all is there."""
    if target.backend != BACKEND:
        return None
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    names = " and ".join(filter(None, (", ".join(absent[:-1]), absent[-1])))
    what = f"needs {names}, which {'is' if len(absent) == 1 else 'are'} not importable"
    fix = f"pip install 'optforge[xla]', or see what is known without: optforge plan hardware={target.name}"
    return Problem(where=f"hardware={target.name}", what=what, fix=fix)


def compile_for(plan: Plan, *, timeout_s: float = TIMEOUT_S) -> Xla:
    """XLA's figures of the program that the plan's steps leave, for one pass of the workload on one device of the target.

    Never raises for what the compile runs into: `known` is then False and `reason` says why.

    Args:
        plan: of a target whose backend is `xla`. The compile step is left out, because XLA compiles the whole.
        timeout_s: seconds that the compiling process may take.
    """
    problem = missing(plan.target)
    if problem is not None:
        return Xla(reason=f"{problem.what}; pip install 'optforge[xla]'")
    topology = TOPOLOGIES.get(plan.target.arch)
    if topology is None:
        return Xla(reason=f"libtpu has no topology for the architecture {plan.target.arch}; known: {', '.join(TOPOLOGIES)}")
    source = plan.run
    steps = tuple((planned.step.transform, planned.receipt) for planned in plan.rewrites)
    request = Request(model=source.model.source, workload=source.workload.source, data=source.data.source, steps=steps, topology=topology)
    try:
        pickle.dumps(request)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return Xla(reason=f"this model cannot be handed to another process: {error}")
    try:
        compiled: Compiled = isolate.call(ENTRY, request, timeout_s=timeout_s)
    except ChildFailed as error:
        log.info("the compile for %s ended early: %s\n%s\n%s", plan.target.name, error, error.traceback, error.output)
        return Xla(reason=f"the compile ended early: {_line(str(error).removeprefix(f'{ENTRY}: '))}")
    return describe(compiled, plan.target, devices_per_chip=topology.devices_per_chip)


def describe(compiled: Compiled, target: Hardware, *, devices_per_chip: int = 1) -> Xla:
    """XLA's figures as the plan shows them. What XLA does not give, or gives as a marker below zero, is null."""
    cost, memory = compiled.cost, compiled.memory
    optimal = cost.get(OPTIMAL)
    figures: dict[str, Json] = {
        "device": compiled.device,
        "optimal_ms": optimal * 1e3 if optimal is not None and optimal > 0 else None,
        "flops": cost.get("flops"),
        "accessed_bytes": cost.get("bytes accessed"),
        "argument_bytes": memory.get("argument_size_in_bytes"),
        "output_bytes": memory.get("output_size_in_bytes"),
        "in_place_bytes": memory.get("alias_size_in_bytes"),
        "temporary_bytes": memory.get("temp_size_in_bytes"),
        "program_bytes": memory.get("generated_code_size_in_bytes"),
        "peak_bytes": memory.get("peak_memory_in_bytes"),
        "fits": True if compiled.refusal is None else False if EXHAUSTED in compiled.refusal else None,
        "compile_seconds": round(sum(compiled.seconds.values()), 1),
        "cost_analysis": dict(cost),
        "memory_analysis": dict(memory),
        "versions": dict(compiled.versions),
        "stage_seconds": {name: round(value, 2) for name, value in compiled.seconds.items()},
        "process_peak_bytes": compiled.peak_memory_bytes,
    }
    if compiled.refusal is not None:
        return Xla(reason=f"XLA refuses the program: {_line(compiled.refusal)}", figures=figures, notes=_notes(devices_per_chip, target))
    return Xla(known=True, figures=figures, notes=_notes(devices_per_chip, target))


def _notes(devices_per_chip: int, target: Hardware) -> list[str]:
    notes = [
        "optimal_ms is XLA's own lower bound: each instruction at the chip's peak or bandwidth, copies into on-chip memory counted "
        "as if they were memory traffic",
        "flops count conversions and element-wise work too",
    ]
    if devices_per_chip > 1:
        notes.append(f"compiled for one device, of which a chip of {target.name} holds {devices_per_chip}")
    return notes


def _line(text: str) -> str:
    """The first sentence or two of a compiler's message, on one line."""
    return re.sub(r"\s+", " ", text).strip()[:400]
