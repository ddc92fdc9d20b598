"""Says whether something else used the device while it was measured.

A figure from a shared device is a figure of two programs. On a CPU the kernel counts the time that every core was busy;
what this process and its children did not use was somebody else's. The load average alone would count the run itself.
On CUDA the driver lists the processes that hold a context on the device.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from optforge.measure import nvml

if TYPE_CHECKING:
    import torch

SHARED = 0.1
"""Share of the cores' time from which a CPU counts as shared. With nothing else running it was above 3% in 2 of 120
intervals of ten seconds (benchmarks/results/cpu/2026-11-30_gate_noise.jsonl)."""
_IDLE = (3, 4)
"""Columns idle and iowait of /proc/stat."""
_STEAL = 7
_COUNTED = 8
"""Columns user to steal; guest time, which follows, is part of user time already."""


class Watch(Protocol):
    """Looks on from its making on."""

    def read(self) -> dict[str, Any]:
        """`contended`, whether the device was shared since, where that can be known; `contention`, what that rests on."""
        ...


def watch(device: torch.device) -> Watch:
    """The watch for a device. Made before the first work on it."""
    return CudaWatch(device) if device.type == "cuda" else CpuWatch()


class CpuWatch:
    """Counts the time of this process's cores from its making on."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._load = os.getloadavg()[0]
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._before = self._now()

    def read(self) -> dict[str, Any]:
        """What happened since.

        `contention` holds `other_cpu_share`, the share of the cores' time that went to other programs and, as `stolen_share`, to
        other machines of the same host; `load_per_core`, the load average of the minute before, over the cores; and `seconds`,
        how long it was watched. Shares are None where the system does not count, and then nothing is said of `contended`.
        """
        busy, stolen, own = (now - before for now, before in zip(self._now(), self._before, strict=True))
        seconds = time.monotonic() - self._begin
        known = bool(self._cores) and seconds > 0 and busy > 0
        share = max(0.0, busy + stolen - own) / (seconds * len(self._cores)) if known else None
        found = {
            "other_cpu_share": None if share is None else round(min(share, 1.0), 4),
            "stolen_share": round(min(stolen / (seconds * len(self._cores)), 1.0), 4) if known else None,
            "load_per_core": round(self._load / max(1, len(self._cores)), 3),
            "seconds": round(seconds, 3),
        }
        return {"contention": found} if share is None else {"contention": found, "contended": share > SHARED}

    def _now(self) -> tuple[float, float, float]:
        """Seconds so far: of all programs on these cores, taken by other machines, and of this process with its children."""
        busy, stolen = _core_seconds(self._cores)
        return busy, stolen, _own_seconds()


class CudaWatch:
    """Looks for other processes on an NVIDIA device, now and at each reading; the host's cores are watched beside it."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cpu = CpuWatch()
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        self._uuid = f"GPU-{uuid}"
        self._most = self._others()

    def read(self) -> dict[str, Any]:
        """`contention` holds the most `other_processes` of all looks, clocks, power and temperature of now, and the host's shares."""
        now = self._others()
        if now is not None:
            self._most = max(now, self._most or 0)
        found = {"other_processes": self._most, **nvml.state(self._uuid), **self._cpu.read()["contention"]}
        return {"contention": found} if self._most is None else {"contention": found, "contended": self._most > 0}

    def _others(self) -> int | None:
        """Processes that compute on the device, this one aside."""
        running = nvml.processes(self._uuid)
        if running is None:
            return None
        others = [number for number in running if number != os.getpid()]
        # in a container the driver may count this process under a number that it does not know itself
        hidden = len(others) == len(running) and len(others) > 0
        return len(others) - hidden


def _core_seconds(cores: list[int]) -> tuple[float, float]:
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    wanted = {f"cpu{core}" for core in cores}
    busy = stolen = 0
    for line in path.read_text(encoding="ascii").splitlines():
        name, *columns = line.split()
        if name in wanted:
            values = [int(text) for text in columns[:_COUNTED]]
            busy += sum(value for index, value in enumerate(values) if index not in (*_IDLE, _STEAL))
            stolen += values[_STEAL]
    return busy / tick, stolen / tick


def _own_seconds() -> float:
    """CPU time of this process, of the children that have ended, and of those that run."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            used = child.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile, and is counted above
            continue
        total += used.user + used.system + getattr(used, "children_user", 0.0) + getattr(used, "children_system", 0.0)
    return total
