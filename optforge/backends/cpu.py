"""The CPU backend: Inductor's C++ code and oneDNN, threads on physical cores, the kernel's own memory counter.

Freezing (Inductor's constant folding of weights) is left off: it makes each block's weights constants of its graph, so
that the blocks of a decoder no longer share one compiled graph and each is compiled anew.
"""

from __future__ import annotations

import gc
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import torch

from optforge import toolchain
from optforge.backends import malloc
from optforge.backends.base import Candidate, CompileOptions, Profile
from optforge.compiling import compile_, lift_
from optforge.errors import PlanError, Problem
from optforge.measure import row
from optforge.measure.memory import ProcessPeak
from optforge.measure.profile import profile
from optforge.spec import Hardware, Json, Measure, Measurement

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

ISA_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
"""Flags of /proc/cpuinfo that decide which product units there are."""


class CpuBackend:
    """Runs on the CPU of this machine; see `Backend` for what each method keeps to."""

    name: ClassVar[str] = "cpu"

    def detect(self) -> Hardware | None:
        """The CPU as a profile: its architecture and memory. Peaks stay empty: no CPU says its own."""
        return Hardware(
            name="cpu",
            description=_cpu_name(),
            backend=self.name,
            arch=platform.machine(),
            memory_bytes=_memory_bytes(),
        )

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def preflight(self, *, compiles: bool) -> list[Problem]:
        return toolchain.missing(toolchain.cxx_compiler(), "C++") if compiles else []

    @contextmanager
    def session(self, seed: int) -> Iterator[None]:
        """Threads on physical cores, freed memory kept, seeded, without gradients; everything is as it was afterwards."""
        threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_inductor_compiler())
            stack.enter_context(malloc.kept())
            stack.callback(torch.set_float32_matmul_precision, precision)
            stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(physical_threads())
            torch.manual_seed(seed)
            yield

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(self.torch_device())

    def compile(self, module: nn.Module, options: CompileOptions) -> None:
        if options.engine != "inductor":
            raise PlanError(Problem(where="compile", what=f"engine {options.engine!r} does not run on the CPU", fix="use engine: inductor"))
        compile_(module, options)

    def lift(self, module: nn.Module) -> None:
        lift_(module)

    def synchronize(self) -> None:
        """Nothing to wait for: PyTorch's CPU operators return when they are done."""

    @cached_property
    def _peak(self) -> ProcessPeak:
        return ProcessPeak()

    def reset_memory(self) -> None:
        """Gives freed pages back to the system first, so that an earlier and larger section does not show."""
        self.free()
        self._peak.reset()

    def memory(self) -> dict[str, int | None]:
        """`process` is the peak of the whole process's resident memory; PyTorch counts no allocations on the CPU."""
        peak = self._peak.peak_bytes()
        self._peak.stop()
        return {"allocated": None, "reserved": None, "process": peak}

    def free(self) -> None:
        gc.collect()
        malloc.trim()

    def is_out_of_memory(self, error: BaseException) -> bool:
        refused = ("not enough memory", "can't allocate memory")
        return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(text in str(error) for text in refused)
        )

    def energy_j(self) -> float | None:
        """None: the counters of a CPU package need root and count every other process too."""
        return None

    def measure(self, candidate: Candidate, baseline: Candidate | None, options: Measure) -> Measurement:
        return row.measure(self, candidate, baseline, options)

    def profile(self, call: Callable[[], Any], trace: str | None = None) -> Profile:
        return profile(call, [torch.profiler.ProfilerActivity.CPU], self.synchronize, trace)

    def mesh(self, **axes: int) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))

    def environment(self) -> Mapping[str, Json]:
        compiler = toolchain.cxx_compiler()
        return {
            "cpu": _cpu_name(),
            "threads": torch.get_num_threads(),
            "isa": isa(),
            "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]  # torch ships it untyped
            "compiler": compiler.version,
            "governor": _governor(),
            "malloc": malloc.described(),
            "process_memory_counter": self._peak.method,
        }


def isa() -> list[str]:
    """The instruction sets of `ISA_FLAGS` that this CPU has."""
    present = _cpuinfo("flags", "Features").split()
    return [flag for flag in ISA_FLAGS if flag in present]


def physical_threads() -> int:
    """Threads to run on: physical cores that this process may use, within its container's quota.

    `OMP_NUM_THREADS` is left in charge when it is set. Two threads on one core's two hardware threads share its
    product units and gain nothing in dense arithmetic.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    logical, physical = psutil.cpu_count(logical=True) or 1, psutil.cpu_count(logical=False) or 1
    return max(1, min(round(usable * physical / logical), _quota()))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPUs that the container's quota allows (cgroup version 2), rounded up; the machine's count without a quota."""
    whole = os.cpu_count() or 1
    if not path.exists():
        return whole
    quota, period = path.read_text().split()
    return whole if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


@contextmanager
def _inductor_compiler() -> Iterator[None]:
    """Points Inductor at the compiler that `preflight` found: by itself it does not look for clang++ on Linux."""
    found = toolchain.cxx_compiler().path
    if found is None:
        yield
        return
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, found)}):
        yield


def _memory_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """The machine's memory, or the container's limit where that is less."""
    total = int(psutil.virtual_memory().total)
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))


def _cpuinfo(*keys: str) -> str:
    """First value of any of the keys in /proc/cpuinfo, or an empty string."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() in keys), "")


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _governor(path: Path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) -> str | None:
    """The frequency governor, or None where the machine does not show one (most virtual machines)."""
    return path.read_text().strip() if path.exists() else None
