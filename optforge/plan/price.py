"""The time of one kernel: its roofline at the published peaks, and what a calibration makes of it.

A kernel takes the longer of its arithmetic at the dense peak of its dtype and its bytes at the memory bandwidth; a
collective takes its bytes over the links. Method: Williams, Waterman, Patterson, Roofline, CACM 2009. No kernel is
faster than that; measured ones reach a share of it, which a calibration knows by kind and size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optforge.measure.utilization import peak
from optforge.plan.graph import COLLECTIVE, UNKNOWN, Kernel
from optforge.spec import Hardware, Scheme

if TYPE_CHECKING:
    from optforge.plan.calibration import Calibration

KERNEL_US = {"nvidia": 2.0, "amd": 2.0}
"""Shortest time of one kernel on a device without a calibration, microseconds. Our assumption, below the 2.5 us that one RMS
norm took in a captured graph on an H200 (docs/hardware.md). Devices that run one compiled program (XLA, CPU) are charged none."""

FALLBACK = {
    "bf16": ("fp16",),
    "fp16": ("bf16",),
    "fp32": ("bf16",),
    "fp8": ("bf16", "fp16"),
    "int8": ("bf16", "fp16"),
}
"""What multiplies in place of a dtype that the hardware has no peak for: T4 has no bf16; TPUs have bf16 alone, and XLA's default
precision for fp32 products there is one bf16 pass."""

MEMORY, ARITHMETIC, LAUNCH, LINKS = "memory", "arithmetic", "launch", "links"


@dataclass(frozen=True, kw_only=True)
class Price:
    """What one kernel costs, in seconds; None where the profile lacks the figure."""

    dtype: str
    """In which it multiplies there; `none` for kernels that multiply nothing."""
    arithmetic: float | None
    memory: float | None
    links: float | None
    efficiency: float
    """Share of the roofline that such a kernel reaches: 1 without a calibration."""
    floor: float
    """Seconds below which no kernel stays, without a calibration."""
    note: str | None = None
    missing: str | None = None
    """What the profile lacks, where the time is unknown."""

    @property
    def ideal(self) -> float:
        """At the published peaks."""
        return max(self.arithmetic or 0.0, self.memory or 0.0, self.links or 0.0)

    @property
    def seconds(self) -> float:
        return max(self.ideal / self.efficiency, self.floor)

    @property
    def bound(self) -> str:
        if self.floor > self.ideal:
            return LAUNCH
        limits = {MEMORY: self.memory or 0.0, ARITHMETIC: self.arithmetic or 0.0, LINKS: self.links or 0.0}
        return max(limits, key=lambda name: limits[name])


def price(kernel: Kernel, hardware: Hardware, calibration: Calibration | None = None) -> Price:
    """The cost of one kernel on `hardware`. A kernel of unknown work costs nothing here; the caller says so."""
    floor = KERNEL_US.get(hardware.backend, 0.0) * 1e-6 if calibration is None else 0.0
    if kernel.kind == UNKNOWN:
        return Price(dtype="none", arithmetic=0.0, memory=0.0, links=0.0, efficiency=1.0, floor=0.0)
    if kernel.kind == COLLECTIVE:
        return _collective(kernel, hardware, calibration, floor)
    dtype, arithmetic, note, missing = _arithmetic(kernel, hardware)
    memory = kernel.bytes / hardware.bandwidth_bytes_per_s if hardware.bandwidth_bytes_per_s else None
    if memory is None:
        missing = "no memory bandwidth: set hardware.bandwidth_bytes_per_s"
    known = missing is None
    efficiency = calibration.efficiency(kernel, hardware) if calibration is not None and known else 1.0
    return Price(
        dtype=dtype, arithmetic=arithmetic, memory=memory, links=0.0, efficiency=efficiency, floor=floor, note=note, missing=missing
    )


def product_dtype(hardware: Hardware, scheme: Scheme | None, dtype: str) -> str | None:
    """The dtype in which `hardware` multiplies: the scheme's activations where it has units for them, else the run's dtype.

    Weight-only schemes, and schemes whose units are missing, multiply in the run's dtype (or its `FALLBACK`). None where the
    profile has no peak for any of them.
    """
    wanted = [scheme.activation_dtype] if scheme and scheme.activation_dtype else []
    return _first_with_peak(hardware, [*wanted, dtype, *FALLBACK.get(dtype, ())])


def _first_with_peak(hardware: Hardware, names: list[str]) -> str | None:
    return next((name for name in names if peak(hardware, name) is not None), None)


def _arithmetic(kernel: Kernel, hardware: Hardware) -> tuple[str, float | None, str | None, str | None]:
    """Dtype, seconds at its peak, a note where another dtype multiplies, and what is missing where none does."""
    if not kernel.flops:
        return "none", 0.0, None, None
    dtype = _first_with_peak(hardware, [kernel.dtype, *FALLBACK.get(kernel.dtype, ())])
    limit = peak(hardware, dtype) if dtype else None
    if dtype is None or limit is None:
        return kernel.dtype, None, None, f"no peak for {kernel.dtype} products"
    note = None
    if dtype != kernel.dtype:
        note = f"{hardware.name} has no {kernel.dtype} matrix units: those products are counted at its {dtype} peak"
    return dtype, kernel.flops / limit, note, None


def _collective(kernel: Kernel, hardware: Hardware, calibration: Calibration | None, floor: float) -> Price:
    """Bytes on the wire over the links."""
    if not hardware.link_bytes_per_s:
        missing = "no link bandwidth for its collectives: set hardware.link_bytes_per_s"
        return Price(dtype=kernel.dtype, arithmetic=0.0, memory=0.0, links=None, efficiency=1.0, floor=floor, missing=missing)
    efficiency = calibration.efficiency(kernel, hardware) if calibration is not None else 1.0
    links = kernel.bytes / hardware.link_bytes_per_s
    return Price(dtype=kernel.dtype, arithmetic=0.0, memory=0.0, links=links, efficiency=efficiency, floor=floor)
