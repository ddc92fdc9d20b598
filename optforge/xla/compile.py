"""Compiles a pass for one TPU device with libtpu, on a machine without a TPU. Only for a process of its own (see `optforge.xla`).

XLA's `optimal_seconds` is its own roofline: every instruction of the compiled program at the chip's peak or bandwidth, copies
into on-chip memory among them. A custom call counts as minus one second there. The one kind that a program of ours would hold,
ConcatBitcast, comes from prefetching weights in slices, so slicing is switched off.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from optforge.xla.request import Compiled, Request

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the process needs no accelerator and must not take one that others use
    "TPU_SKIP_MDS_QUERY": "1",  # no look for a cloud's metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling needs no TPU, so no lock on one
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""Must stand in the environment before jax is imported."""

OPTIONS = {"xla_tpu_sliced_prefetch_max_slices": "1"}
PACKAGES = ("jax", "jaxlib", "libtpu", "torchax", "torch", "transformers")


def compile_step(request: Request) -> Compiled:
    """Exports, lowers and compiles; XLA's figures, or its refusal.

    Raises:
        ImportError: jax, torchax or libtpu cannot be imported.
        PlanError: see `step.export`.
    """
    _declared = load_torchax()
    import jax
    from jax.experimental import topologies

    from optforge.xla import step

    exported = step.export(request)
    found = topologies.get_topology_desc(request.topology.name, platform="tpu", **_chip(request))
    device: Any = found.devices[0]  # jaxlib's class, which carries no types
    compiled = Compiled(device=device.device_kind, versions={name: version(name) for name in PACKAGES}, seconds=exported.seconds)
    start = time.perf_counter()
    lowered = _lower(exported, jax.sharding.SingleDeviceSharding(device))
    compiled.seconds["lower"] = time.perf_counter() - start
    start = time.perf_counter()
    try:
        executable = lowered.compile(compiler_options=OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        compiled.refusal = str(error)
    else:
        _read(executable, compiled)
    compiled.seconds["compile"] = time.perf_counter() - start
    compiled.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return compiled


def load_torchax() -> Any:
    """Imports torchax with its table of operators filled. From here on `torch.compile` is broken in this process.

    Returns:
        What must live as long as torchax is used.
    """
    os.environ.update(ENVIRONMENT)
    from optforge.xla import overloads

    declared = overloads.declare_removed()
    import torchax

    from optforge.xla import lowerings

    torchax.default_env()  # fills the table
    lowerings.register()
    return declared


def _chip(request: Request) -> dict[str, str]:
    config = request.topology.chip_config
    return {} if config is None else {"chip_config_name": config}


def _lower(exported: Any, sharding: Any) -> Any:
    """The program as StableHLO, its arguments shapes without values; the cache is donated, so that it is written in place."""
    import jax
    from torchax.ops.mappings import t2j_dtype

    run, program = as_jax(exported.program)
    given = len(exported.inputs) + len(exported.kept)
    arguments = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    states = arguments[: len(arguments) - given]  # export puts the caller's own last, in their order

    def ordered(states: Any, kept: Any, inputs: Any) -> Any:
        return run(*states, *inputs, *kept)

    def shapes(tensors: Any) -> tuple[Any, ...]:
        shape: Any = jax.ShapeDtypeStruct  # its constructor is untyped
        return tuple(shape(tuple(t.shape), t2j_dtype(t.dtype), sharding=sharding) for t in tensors)

    return jax.jit(ordered, donate_argnums=1).lower(shapes(states), shapes(exported.kept), shapes(exported.inputs))


def as_jax(program: ExportedProgram) -> tuple[Callable[..., Any], ExportedProgram]:
    """An exported program as a function of JAX arrays, and the decomposed program whose placeholders are its arguments.

    It gives back what `program` changes in place (buffers, then arguments), then its outputs. torchax's own
    `exported_program_to_jax` drops the changed buffers and decomposes twice, which takes twice as long.
    """
    import torch
    from torchax import decompositions
    from torchax.export import JaxInterpreter

    table: Any = torch.export.default_decompositions()  # a dict that PyTorch leaves untyped
    table.update(decompositions.DECOMPOSITIONS)
    decomposed = program.run_decompositions(table)

    def run(*arguments: Any) -> Any:
        return JaxInterpreter(decomposed.graph_module).run(*arguments, enable_io_processing=False)

    return run, decomposed


def _read(executable: Any, compiled: Compiled) -> None:
    """XLA's figures of the whole program; the entries that end in braces are those of single operands."""
    cost = executable.cost_analysis() or {}
    compiled.cost = {key: float(value) for key, value in sorted(cost.items()) if not key.endswith("}")}
    memory = executable.memory_analysis()
    names = (name for name in dir(memory) if name.endswith("_in_bytes"))
    compiled.memory = {name: int(getattr(memory, name)) for name in names}
