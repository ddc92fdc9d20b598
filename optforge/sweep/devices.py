"""Which device each parallel job may see.

A job is pinned by its environment, before its process starts: the driver then shows it one device, and no code of the
job can take memory on another by accident.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from optforge import isolate
from optforge.errors import ConfigError, Problem

CUDA, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
ALL = "all"
PROBE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for one job at a time."""

    name: str | None = None
    """The device as the user named it; None where jobs see what the sweep sees."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the job's process."""


@dataclass(frozen=True, kw_only=True)
class Visible:
    """The accelerators that a process started now would see."""

    count: int
    hip: bool = False


def visible() -> Visible:
    """Asks PyTorch in a process of its own, so that this one opens no device."""
    count, hip = isolate.call("optforge.sweep.devices:_probe", timeout_s=PROBE_S)
    return Visible(count=count, hip=hip)


def _probe() -> tuple[int, bool]:
    import torch

    return torch.cuda.device_count(), torch.version.hip is not None


def slots(wanted: str | Sequence[str] | None, *, seen: Visible | None = None) -> list[Slot]:
    """The places of `sweep.devices`: one that sees everything where nothing was named.

    Raises:
        ConfigError: a device that is not there, is named twice, or is no number.
    """
    if wanted is None:
        return [Slot()]
    found = seen if seen is not None else visible()
    if found.count == 0:
        what, fix = "there is no GPU here", "leave sweep.devices out; jobs on a CPU run one after another"
        raise ConfigError(Problem(where="sweep.devices", what=what, fix=fix))
    names = [str(index) for index in range(found.count)] if wanted == ALL else [str(name) for name in wanted]
    known = [str(index) for index in range(found.count)]
    wrong = [name for name in names if name not in known]
    problems = [
        Problem(where="sweep.devices", what=f"there is no device {name!r}", fix=f"type {ALL}, or some of [{','.join(known)}]")
        for name in wrong
    ]
    if not names or len(set(names)) < len(names):
        fix = "name each device once"
        problems.append(Problem(where="sweep.devices", what=f"cannot be [{','.join(names)}]", fix=fix))
    if problems:
        raise ConfigError(*problems)
    return [Slot(name=name, variables=pinned(int(name), os.environ, hip=found.hip)) for name in names]


def pinned(index: int, environ: Mapping[str, str], *, hip: bool) -> dict[str, str]:
    """The variables that leave a process the device of that number among those visible now.

    A number counts among the devices that `environ` leaves, which may be named by number, UUID or MIG instance.
    """
    ours = HIP if hip and HIP in environ else CUDA
    inherited = [name.strip() for name in environ.get(ours, "").split(",") if name.strip()]
    device = inherited[index] if index < len(inherited) else str(index)
    # ROCm reads both names; the one that is not used must not hide the device
    return {HIP: device, CUDA: device} if hip else {CUDA: device}
