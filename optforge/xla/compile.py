"""Compiles a pass for one TPU device with libtpu, on a machine without a TPU. Only for a process of its own (see `optforge.xla`).

XLA's `optimal_seconds` is its own roofline: every instruction of the compiled program at the chip's peak or bandwidth, copies
into on-chip memory among them. A custom call counts as minus one second there. The one kind that a program of ours would hold,
ConcatBitcast, comes from prefetching weights in slices, so slicing is switched off.
"""

from __future__ import annotations

import os
import resource
import time
from importlib.metadata import version
from typing import Any

from optforge.xla.request import Compiled, Request

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
    os.environ.update(ENVIRONMENT)
    from optforge.xla import overloads

    _declared = overloads.declare_removed()  # held until the end: its declarations go with it
    import jax
    import torchax
    from jax.experimental import topologies

    from optforge.xla import lowerings, step

    torchax.default_env()  # fills torchax's table of operators
    lowerings.register()
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


def _chip(request: Request) -> dict[str, str]:
    config = request.topology.chip_config
    return {} if config is None else {"chip_config_name": config}


def _lower(exported: Any, sharding: Any) -> Any:
    """The program as StableHLO, its arguments shapes without values; the cache is donated, so that it is written in place."""
    import jax
    import torch
    from torchax import decompositions
    from torchax.export import JaxInterpreter
    from torchax.ops.mappings import t2j_dtype

    table: Any = torch.export.default_decompositions()  # a dict that PyTorch leaves untyped
    table.update(decompositions.DECOMPOSITIONS)
    program = exported.program.run_decompositions(table)
    given = len(exported.inputs) + len(exported.kept)
    arguments = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    states = arguments[: len(arguments) - given]  # export puts the caller's own last, in their order

    def run(states: Any, kept: Any, inputs: Any) -> Any:
        return JaxInterpreter(program.graph_module).run(*states, *inputs, *kept, enable_io_processing=False)

    def shapes(tensors: Any) -> tuple[Any, ...]:
        shape: Any = jax.ShapeDtypeStruct  # its constructor is untyped
        return tuple(shape(tuple(t.shape), t2j_dtype(t.dtype), sharding=sharding) for t in tensors)

    return jax.jit(run, donate_argnums=1).lower(shapes(states), shapes(exported.kept), shapes(exported.inputs))


def _read(executable: Any, compiled: Compiled) -> None:
    """XLA's figures of the whole program; the entries that end in braces are those of single operands."""
    cost = executable.cost_analysis() or {}
    compiled.cost = {key: float(value) for key, value in sorted(cost.items()) if not key.endswith("}")}
    memory = executable.memory_analysis()
    names = (name for name in dir(memory) if name.endswith("_in_bytes"))
    compiled.memory = {name: int(getattr(memory, name)) for name in names}
