"""Which device a run executes on, and whether that is the hardware it is for.

A target that is not in the room gets a stand-in: the numerics run there, its figures carry its name, and the target's
figures are predictions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from optforge import registry
from optforge.backends.base import Backend
from optforge.errors import PlanError, Problem
from optforge.plan import measured
from optforge.spec import Hardware

PREFERENCE = ("nvidia", "amd", "xla", "cpu")
"""Families in the order in which a stand-in, or `hardware=auto`, is looked for."""

DEVICE_NAMES: tuple[tuple[str, str], ...] = (
    (r"A100.*80GB PCIe", "a100_pcie"),
    (r"A100.*PCIE-40GB|A100-PCIE", "a100_pcie_40gb"),
    (r"A100-SXM.*40GB", "a100_40gb"),
    (r"A100", "a100"),
    (r"H100 NVL", "h100_nvl"),
    (r"H100 PCIe", "h100_pcie"),
    (r"H100", "h100"),
    (r"H200", "h200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"L40S", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bT4\b", "t4"),
    (r"RTX 4090\b", "rtx4090"),
    (r"RTX 5090\b", "rtx5090"),
    (r"MI300X", "mi300x"),
    (r"MI325X", "mi325x"),
    (r"MI350X", "mi350x"),
)
"""Patterns over the name that a driver reports -> the profile with its published figures."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a run executes: the adapter, the device's facts, and whether it is the target itself."""

    backend: Backend
    hardware: Hardware
    is_target: bool


def profile_name(reported: str) -> str | None:
    """The profile of a device by the name its driver reports; None for one without published figures here."""
    return next((name for pattern, name in DEVICE_NAMES if re.search(pattern, reported)), None)


def detect(profile: Callable[[str], Hardware]) -> list[Device]:
    """Every device of this machine, best first. A known one gets its profile's figures and keeps its real memory; others get the
    peaks that were measured on them, where they were."""
    found = []
    available = registry.names("backends")
    preferred = [name for name in PREFERENCE if name in available]
    for name in [*preferred, *(other for other in available if other not in PREFERENCE)]:
        backend: Backend = registry.get("backends", name)()
        seen = backend.detect()
        if seen is None:
            continue
        known = profile_name(seen.name)
        facts = measured.filled(seen, backend) if known is None else replace(profile(known), memory_bytes=seen.memory_bytes, arch=seen.arch)
        found.append(Device(backend=backend, hardware=facts, is_target=False))
    return found


def choose(target: Hardware, profile: Callable[[str], Hardware], *, require_target: bool = False) -> tuple[Hardware, Device]:
    """The target with `auto` resolved, and the device that runs it.

    Raises:
        PlanError: `require_target` is set and the target is not in this machine.
    """
    devices = detect(profile)
    if not devices:
        raise PlanError(Problem(where="hardware", what="no backend found a device", fix="optforge doctor"))
    if target.name == "auto":
        return devices[0].hardware, replace(devices[0], is_target=True)
    for device in devices:
        if device.hardware.name == target.name:
            known = target if target.peak_flops or not device.hardware.peak_flops else device.hardware
            return known, replace(device, is_target=True)
        if target.description == device.hardware.description:  # a profile that was measured on this device
            return target, replace(device, is_target=True)
    if require_target:
        present = ", ".join(device.hardware.name for device in devices)
        raise PlanError(
            Problem(
                where="hardware",
                what=f"{target.name} is not in this machine (found: {present}) and require_target is true",
                fix=f"hardware={devices[0].hardware.name}, or require_target=false to run on it as a stand-in",
            )
        )
    return target, devices[0]


def measure_unknown(target: Hardware, profile: Callable[[str], Hardware], tell: Callable[[str], object]) -> None:
    """Measures this machine's device, when it is the target and neither published nor measured figures are known of it.

    Takes under a minute, once per device and version of torch; `tell` hears of each part. Whoever predicts calls it first.
    """
    if target.peak_flops or target.backend not in ("auto", *registry.names("backends")):
        return
    device = next((found for found in detect(profile) if target.name in ("auto", found.hardware.name)), None)
    seen = None if device is None or device.hardware.peak_flops else device.backend.detect()
    if device is not None and seen is not None:
        tell("measuring this machine's peaks, once; optforge hardware measure does it again")
        measured.measure(seen, device.backend, tell)
