"""Asks NVIDIA's management library (NVML) what CUDA itself does not tell: energy, the process's memory, the driver.

NVML opens no CUDA context, so a device can be described before a fork. The package (`nvidia-ml-py`) is optional; where
it or the driver is absent every answer is None.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a device is: its name, memory and compute capability."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


def library() -> Any | None:
    """The initialised library, or None where the package or the driver is absent."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def describe(index: int) -> Description | None:
    """The device with NVML's own `index` (which no CUDA_VISIBLE_DEVICES renumbers), or None."""
    nvml = library()
    if nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return Description(
            name=nvml.nvmlDeviceGetName(handle),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        )
    except nvml.NVMLError:
        return None


def energy_j(uuid: str) -> float | None:
    """Joules that the device has drawn since its driver was loaded; None before Volta."""
    return _ask(uuid, lambda nvml, handle: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3)


def process_bytes(uuid: str) -> int | None:
    """Device memory that this process holds now, context and libraries included.

    None where the driver does not know the process by its own number, as in most containers.
    """

    def find(nvml: Any, handle: Any) -> int | None:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        found = (one.usedGpuMemory for one in running if one.pid == os.getpid())
        return next(found, None)

    return _ask(uuid, find)


def driver_version() -> str | None:
    nvml = library()
    return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


def state(uuid: str) -> dict[str, float | int | None]:
    """Clocks in MHz, power in watts, temperature in degrees Celsius, and the bits of what holds the clocks down; None where
    the device does not say."""
    questions: dict[str, Callable[[Any, Any], float | int]] = {
        "sm_clock_mhz": lambda nvml, handle: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "sm_clock_max_mhz": lambda nvml, handle: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": lambda nvml, handle: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "power_w": lambda nvml, handle: float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3,
        "temperature_c": lambda nvml, handle: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "clock_limit_reasons": lambda nvml, handle: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    }
    return {name: _ask(uuid, question) for name, question in questions.items()}


def processes(uuid: str) -> list[int] | None:
    """Numbers of the processes that compute on the device, as the driver counts them; a container may see none, or other numbers."""
    return _ask(uuid, lambda nvml, handle: [int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)])


def power_limit_w(uuid: str) -> float | None:
    """Watts that the device is held to."""
    return _ask(uuid, lambda nvml, handle: float(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1e3)


def _ask(uuid: str, question: Callable[[Any, Any], T]) -> T | None:
    """`question(library, handle)` for the device of that UUID (`GPU-...`), or None where it has no answer."""
    nvml = library()
    if nvml is None:
        return None
    try:
        return question(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError:
        return None
