"""MFU, MBU and matrix units, by hand arithmetic and by what the vendors' tables say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optforge.measure.utilization import compute_capability, has_units, mbu, mfu
from optforge.spec import Hardware

A100 = Hardware(name="a100", backend="nvidia", arch="sm_80", peak_flops={"bf16": 312e12, "int8": 624e12}, bandwidth_bytes_per_s=2039e9)
UNKNOWN = Hardware(name="some_gpu", backend="nvidia", arch="sm_86")
CPU = Hardware(name="cpu", backend="cpu", arch="x86_64")


def test_share_of_the_peak_by_hand() -> None:
    assert mfu(156e12, 1.0, A100, "bf16") == pytest.approx(0.5)
    assert mfu(156e12, 1.0, A100, "int8") == pytest.approx(0.25)
    assert mbu(1019.5e9, 1.0, A100) == pytest.approx(0.5)


@pytest.mark.parametrize("hardware", [UNKNOWN, CPU])
def test_unknown_peak_gives_none_and_not_zero(hardware: Hardware) -> None:
    assert mfu(1e12, 1.0, hardware, "bf16") is None
    assert mbu(1e12, 1.0, hardware) is None


def test_unknown_work_or_time_gives_none() -> None:
    assert mfu(None, 1.0, A100, "bf16") is None
    assert mfu(1e12, None, A100, "bf16") is None
    assert mbu(None, 1.0, A100) is None
    assert mfu(1e12, 1.0, A100, "fp8") is None


def test_a_profile_with_peaks_is_believed() -> None:
    assert has_units(A100, "int8") and not has_units(A100, "fp8")
    assert not has_units(replace(A100, arch="sm_90"), "fp8")


@pytest.mark.parametrize(
    ("arch", "units", "missing"),
    [("sm_75", "int8", "bf16"), ("sm_86", "bf16", "fp8"), ("sm_89", "fp8", "fp4"), ("sm_90", "fp8", "fp4"), ("sm_120", "fp4", "int3")],
)
def test_a_gpu_without_a_profile_is_judged_by_its_compute_capability(arch: str, units: str, missing: str) -> None:
    hardware = replace(UNKNOWN, arch=arch)
    assert has_units(hardware, units) and not has_units(hardware, missing)


def test_a_cpu_multiplies_int8_and_not_fp8() -> None:
    assert has_units(CPU, "int8") and has_units(CPU, "bf16") and not has_units(CPU, "fp8")


def test_compute_capability_of_an_arch() -> None:
    assert [compute_capability(replace(UNKNOWN, arch=arch)) for arch in ("sm_75", "sm_90a", "sm_103", "sm_120", "gfx942")] == [
        (7, 5),
        (9, 0),
        (10, 3),
        (12, 0),
        None,
    ]
