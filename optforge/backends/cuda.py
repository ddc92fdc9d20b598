"""What NVIDIA's and AMD's backends share: PyTorch calls both `cuda`, and one allocator, stream and graph model serves both.

Time is read from the host's clock between two synchronizations, not from CUDA events: a sample is at least 10 ms long,
so the wait costs a thousandth of it, the gaps between launches that a user would see stay in, and one timing loop
serves every backend.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from optforge import toolchain
from optforge.backends.base import Candidate, CompileOptions, Profile
from optforge.compiling import compile_, lift_
from optforge.errors import PlanError, Problem
from optforge.measure import row
from optforge.measure.profile import profile
from optforge.spec import Hardware, Json, Measure, Measurement

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

ENGINES = ("inductor", "cudagraphs")


class CudaBackend:
    """A device that PyTorch calls `cuda`; a vendor's class adds how it is found and what its counters are."""

    name: ClassVar[str]

    def __init__(self, index: int | None = None) -> None:
        """The device `index` among the visible ones; left out, the one of this process's rank on its host."""
        self.index = int(os.environ.get("LOCAL_RANK", "0")) if index is None else index

    def detect(self) -> Hardware | None:
        raise NotImplementedError

    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def preflight(self, *, compiles: bool) -> list[Problem]:
        problems = []
        if self.detect() is None:
            problems.append(Problem(where="hardware", what=f"there is no usable {self.name} device here", fix="hardware=auto"))
        # Triton builds each kernel's launcher with a C compiler
        return problems + (toolchain.missing(toolchain.cc_compiler(), "C") if compiles else [])

    @contextmanager
    def session(self, seed: int) -> Iterator[None]:
        """This device as the current one, seeded, without gradients; everything is as it was afterwards."""
        current, precision, benchmark = torch.cuda.current_device(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[self.index]))
            stack.enter_context(torch.no_grad())
            stack.callback(torch.set_float32_matmul_precision, precision)
            stack.callback(setattr, torch.backends.cudnn, "benchmark", benchmark)
            stack.callback(torch.cuda.set_device, current)
            torch.cuda.set_device(self.index)
            torch.manual_seed(seed)
            yield

    def place(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device; a model that already lies on a CUDA device stays there and is followed."""
        found = next((parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"), None)
        if found is not None and found.index is not None:
            self.index = found.index
        return model.to(self.torch_device())

    def compile(self, module: nn.Module, options: CompileOptions) -> None:
        if options.engine not in ENGINES:
            what = f"engine {options.engine!r} does not run on {self.name}"
            raise PlanError(Problem(where="compile", what=what, fix=f"use engine: {' or '.join(ENGINES)}"))
        compile_(module, options)

    def lift(self, module: nn.Module) -> None:
        lift_(module)

    def synchronize(self) -> None:
        """Waits for the model's own device, which need not be the current one."""
        torch.cuda.synchronize(self.torch_device())

    def reset_memory(self) -> None:
        """Peaks start again at what is allocated now, so resident weights stay in them."""
        self.free()
        torch.cuda.reset_peak_memory_stats(self.torch_device())

    def memory(self) -> dict[str, int | None]:
        """`allocated` and `reserved` are peaks of PyTorch's allocator; `process` is what the driver says is held now."""
        device = self.torch_device()
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "process": self.process_bytes(),
        }

    def process_bytes(self) -> int | None:
        """Device memory of this process as the driver counts it; None where it does not say."""
        return None

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def is_out_of_memory(self, error: BaseException) -> bool:
        # libraries that allocate for themselves report it in their own words
        refused = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "HIP out of memory", "not enough memory")
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        return isinstance(error, RuntimeError) and any(text in str(error) for text in refused)

    def energy_j(self) -> float | None:
        return None

    def measure(self, candidate: Candidate, baseline: Candidate | None, options: Measure) -> Measurement:
        return row.measure(self, candidate, baseline, options)

    def profile(self, call: Callable[[], Any], trace: str | None = None) -> Profile:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        return profile(call, activities, self.synchronize, trace)

    def mesh(self, **axes: int) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))

    def environment(self) -> Mapping[str, Json]:
        properties = torch.cuda.get_device_properties(self.torch_device())
        return {
            "device": properties.name,
            "device_index": self.index,
            "device_count": torch.cuda.device_count(),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "compiler": toolchain.cc_compiler().version,
        }
