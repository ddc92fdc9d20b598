"""What every backend adapter keeps to: find its device, place, compile, synchronize, measure, profile.

A backend owns all global state of its device (threads, Inductor flags, allocator counters) and changes it only inside
the context managers it hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from optforge.errors import Problem
from optforge.spec import Hardware, Json, Measure, Measurement

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from optforge.compiling import Family


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How a module is compiled. `dynamic` is None (decide from the sizes seen), True or False."""

    engine: str = "inductor"
    mode: str = "default"
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Json] = field(default_factory=dict)
    family: Family | None = None
    """Modules that are given the same one share compiled programs; without one a module shares with no other."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One thing to time: a call without arguments that does the workload once."""

    name: str
    call: Callable[[], Any]
    resident_bytes: int = 0
    """Bytes on the device for this candidate's sake alone; as a baseline's, they are taken off the other's peak."""


@dataclass(kw_only=True)
class Profile:
    """What a profiler saw: operator rows and where the trace lies."""

    operators: list[dict[str, Json]] = field(default_factory=list)
    trace: str | None = None


@runtime_checkable
class Backend(Protocol):
    """The adapter of one family of devices (`cpu`, `nvidia`, `amd`, `xla`)."""

    name: ClassVar[str]

    def detect(self) -> Hardware | None:
        """The device of this family in this machine as a profile, or None. Never raises for an absent device."""
        ...

    def torch_device(self) -> torch.device:
        """Where tensors live."""
        ...

    def preflight(self, *, compiles: bool) -> list[Problem]:
        """What is missing before a run can start: a compiler, a writable compiler cache, a driver."""
        ...

    def session(self, seed: int) -> AbstractContextManager[None]:
        """Holds all global state of a run (threads, seeds, Inductor flags, caches) and restores it."""
        ...

    def place(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device, keeping ties and quantized storage."""
        ...

    def compile(self, module: nn.Module, options: CompileOptions) -> None:
        """Compiles a module in place (`nn.Module.compile`), so that names and keys stay."""
        ...

    def lift(self, module: nn.Module) -> None:
        """Takes the compile of `compile` away again."""
        ...

    def synchronize(self) -> None:
        """Waits until the model's own device has finished."""
        ...

    def reset_memory(self) -> None:
        """Resets every peak counter; called before each measured section."""
        ...

    def memory(self) -> dict[str, int | None]:
        """Peaks since `reset_memory`: `allocated`, `reserved`, `process`, in bytes; None where there is no counter."""
        ...

    def free(self) -> None:
        """Gives unused memory back, after an out-of-memory error too."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool: ...

    def energy_j(self) -> float | None:
        """A running counter of the device's energy in joules; None where nothing answers."""
        ...

    def measure(self, candidate: Candidate, baseline: Candidate | None, options: Measure) -> Measurement:
        """Times `candidate`, in rounds that alternate with `baseline` where there is one."""
        ...

    def profile(self, call: Callable[[], Any], trace: str | None = None) -> Profile: ...

    def mesh(self, **axes: int) -> DeviceMesh: ...

    def environment(self) -> Mapping[str, Json]:
        """Device name, driver, libraries, threads: what a reader needs to repeat a figure."""
        ...
