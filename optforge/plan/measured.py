"""The measured profile of this machine: looked up in the user's cache, or measured and put there.

Vendors publish no peaks of a CPU that hold for the machine at hand, so a profile without figures gets measured ones. They are
kept per device, torch version and thread count. Nothing here measures unless it is asked to: a run without a stored profile shows
n/a and the command to type.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optforge.atomic import write_bytes
from optforge.backends.base import Backend
from optforge.cache import cache_dir
from optforge.config.build import profile
from optforge.measure.machine.point import Peaks
from optforge.plan import calibration_file
from optforge.plan.efficiency import Calibration
from optforge.safe_yaml import dumps, read
from optforge.spec import Hardware

if TYPE_CHECKING:
    from optforge.measure.machine.survey import Survey

COMMAND = "optforge hardware measure"
CALIBRATE_S = 240.0
"""Seconds that measuring single operators may take, by default."""
ISA = ("amx_tile", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "sve", "i8mm")
"""Instruction sets that tell CPUs of one name apart (clouds hide the model); the first two that are there are named."""

Tell = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured profile, and the calibration beside it."""

    hardware: Hardware
    calibration: Calibration
    """Without points it holds the overheads alone."""


def identity(seen: Hardware, backend: Backend) -> str:
    """What tells this device from others: its name, and for a CPU its threads and instruction sets."""
    if backend.name != "cpu":
        return seen.description or seen.name
    from optforge.backends.cpu import isa, physical_threads

    present, threads = set(isa()), physical_threads()
    return ", ".join([seen.description, f"{threads} thread{'s' if threads > 1 else ''}", *[flag for flag in ISA if flag in present][:2]])


def stored(seen: Hardware, backend: Backend) -> Measured | None:
    """What an earlier measurement of this device left, or None."""
    path = _path(identity(seen, backend))
    if not path.exists() or not _beside(path).exists():
        return None
    return Measured(hardware=profile(read(path), str(path)), calibration=calibration_file.read(_beside(path)))


def calibration_of(hardware: Hardware) -> Calibration | None:
    """What was measured on the device of that description, from this user's cache; None where nothing was."""
    path = _beside(_path(hardware.description))
    return calibration_file.read(path) if hardware.description and path.exists() else None


def filled(seen: Hardware, backend: Backend) -> Hardware:
    """The detected device with the peaks that were measured on it, if they were."""
    named = replace(seen, description=identity(seen, backend))
    found = stored(seen, backend)
    if found is None:
        return named
    return replace(
        named,
        peak_flops=found.hardware.peak_flops,
        bandwidth_bytes_per_s=found.hardware.bandwidth_bytes_per_s,
        sources=found.hardware.sources,
    )


def measure(seen: Hardware, backend: Backend, tell: Tell, *, calibrate_s: float | None = None) -> Measured:
    """Measures the device and stores what was found.

    Args:
        seen: what `backend.detect()` says.
        tell: hears of each part as it begins.
        calibrate_s: seconds for single operators as well; None for peaks and overheads alone, in under a minute.
    """
    from optforge.measure.machine.survey import quick, survey  # loads Inductor, which takes seconds and no plan needs

    device = backend.torch_device()
    with backend.session(0):
        result = quick(device, tell) if calibrate_s is None else survey(device, tell, budget_s=calibrate_s)
    hardware = described(seen, backend, result.peaks)
    path = _path(identity(seen, backend))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, to_yaml(hardware).encode())
    beside = _beside(path)
    if result.points or not beside.exists():  # overheads alone do not replace points
        save(beside, hardware, hardware.description, result, command=_typed())
        calibration_file.read.cache_clear()
    return Measured(hardware=hardware, calibration=calibration_file.read(beside))


def save(path: Path, hardware: Hardware | str, device: str, result: Survey, *, command: str) -> None:
    """Writes a survey as a calibration file."""
    calibration_file.write(
        path,
        device=device,
        hardware=hardware,
        date=date.today().isoformat(),
        command=command,
        versions=versions(),
        overheads=result.overheads,
        points=result.points,
        left_out=len(result.left_out),
    )


def versions() -> dict[str, str]:
    """What a measured figure depends on besides the device."""
    import torch

    found = {"torch": str(torch.__version__), "python": platform.python_version()}
    if torch.cuda.is_available():
        import triton

        found |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
    return found


def to_yaml(hardware: Hardware) -> str:
    """A profile as a file that `hardware=./mine.yaml` takes."""
    from optforge.config.schema import plain_fields

    return dumps(
        plain_fields(hardware), [hardware.description, f"Measured figures, written by `{COMMAND}`. Use it as hardware=./FILE.yaml"]
    )


def described(seen: Hardware, backend: Backend, peaks: Peaks) -> Hardware:
    """The device with measured peaks, under a name that says whose they are."""
    import torch

    when = f"measured on {date.today().isoformat()} with torch {torch.__version__}"
    described = identity(seen, backend)
    return replace(
        seen,
        name=_slug(described),
        description=described,
        peak_flops={dtype: float(f"{rate:.4g}") for dtype, rate in peaks.flops.items()},
        bandwidth_bytes_per_s=float(f"{peaks.bandwidth_bytes_per_s:.4g}"),
        fp8_format="e4m3fn" if "fp8" in peaks.flops else None,
        sources={key: f"{when}: {how}" for key, how in peaks.how.items()},
    )


def _path(described: str) -> Path:
    import torch

    return cache_dir() / "hardware" / f"{_slug(described)}_torch_{torch.__version__.replace('+', '_')}.yaml"


def _beside(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".yaml") + ".calibration.yaml")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _typed() -> str:
    return shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
