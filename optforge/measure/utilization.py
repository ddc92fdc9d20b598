"""What a piece of hardware can multiply, and which share of its peaks a measured figure reaches (MFU, MBU).

A throughput means little without the peak it is held against, so every figure carries its share. An unknown peak gives
None: a share of a guessed peak would be a guess that looks like a measurement.
"""

from __future__ import annotations

import re

from optforge.spec import Hardware

CUDA_UNITS = {"fp32": (0, 0), "fp16": (7, 0), "int8": (7, 5), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}
"""First CUDA compute capability whose tensor cores multiply a dtype (CUDA C++ Programming Guide, arithmetic of the tensor
cores). fp32 runs on the ordinary cores of every device."""

CPU_UNITS = ("fp32", "bf16", "int8")
"""Products that oneDNN runs natively on a CPU, through AMX, AVX-512 or their fallbacks. fp8 there is an emulation."""


def compute_capability(hardware: Hardware) -> tuple[int, int] | None:
    """The CUDA compute capability behind an arch such as `sm_80` or `sm_120`; None where the arch is not CUDA's."""
    found = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", hardware.arch)
    return (int(found[1]), int(found[2])) if found else None


def has_units(hardware: Hardware, dtype: str) -> bool:
    """Whether `hardware` multiplies two `dtype` operands (`fp8`, `int8`, ...) without converting them first.

    A profile that lists peaks is believed: a dtype that is absent there has no units. A device without peaks (a CPU, a
    GPU without a profile) is judged by its family: compute capability on CUDA, `CPU_UNITS` on a CPU. What is known
    neither way has no units, so that a plan never relies on them.
    """
    if hardware.peak_flops:
        return dtype in hardware.peak_flops
    if hardware.backend == "cpu":
        return dtype in CPU_UNITS
    capability = compute_capability(hardware)
    return capability is not None and dtype in CUDA_UNITS and capability >= CUDA_UNITS[dtype]


def peak(hardware: Hardware, dtype: str) -> float | None:
    """Dense operations per second of `dtype` products, or None where no figure is published."""
    return hardware.peak_flops.get(dtype) or None


def mfu(flops: float | None, seconds: float | None, hardware: Hardware, dtype: str) -> float | None:
    """Model FLOP utilization: `flops` in `seconds` as a share (0 to 1) of the dense peak for `dtype` products.

    None where the work, the time or the peak is unknown. `flops` counts a multiply and an add as two.
    """
    limit = peak(hardware, dtype)
    if limit is None or not flops or not seconds:
        return None
    return flops / seconds / limit


def mbu(bytes_moved: float | None, seconds: float | None, hardware: Hardware) -> float | None:
    """Memory bandwidth utilization: `bytes_moved` in `seconds` as a share (0 to 1) of the memory bandwidth.

    `bytes_moved` is the fewest bytes that the work needs (weights, KV cache), not what a profiler counted. None where the
    work, the time or the bandwidth is unknown.
    """
    if not hardware.bandwidth_bytes_per_s or not bytes_moved or not seconds:
        return None
    return bytes_moved / seconds / hardware.bandwidth_bytes_per_s
