"""Hardware profiles against figures copied by hand from the vendors' tables, and against units x rate x clock."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from optforge import config
from optforge.config.build import FP8_FORMATS
from optforge.errors import ConfigError
from optforge.kernels.formats import FORMATS
from optforge.plan.devices import DEVICE_NAMES
from optforge.spec import Hardware

FOLDER = Path(__file__).resolve().parents[1] / "conf" / "hardware"
PROFILES = {path.stem: Hardware(**yaml.safe_load(path.read_text())) for path in sorted(FOLDER.glob("*.yaml"))}
PUBLISHED = {name: profile for name, profile in PROFILES.items() if name not in ("cpu", "auto")}

# Dense TFLOP/s or TOP/s as the vendors' tables print them, typed in from the datasheets and not from conf/.
DENSE = {
    "a100": {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624, "int4": 1248},
    "a100_40gb": {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624, "int4": 1248},
    "a100_pcie": {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624, "int4": 1248},
    "a100_pcie_40gb": {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624, "int4": 1248},
    "h100": {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9, "int8": 1978.9},
    "h100_pcie": {"fp32": 51.2, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513, "int8": 1513},
    "h100_nvl": {"fp32": 60, "tf32": 835 / 2, "fp16": 1671 / 2, "bf16": 1671 / 2, "fp8": 3341 / 2, "int8": 3341 / 2},
    "h200": {"fp32": 67, "tf32": 989 / 2, "fp16": 1979 / 2, "bf16": 1979 / 2, "fp8": 3958 / 2, "int8": 3958 / 2},
    "b200": {"fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000},
    "b300": {"fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500, "int8": 150, "fp4": 13500},
    "l4": {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 485 / 2, "int8": 485 / 2, "int4": 485},
    "l40s": {"fp32": 91.6, "tf32": 183, "fp16": 362.05, "bf16": 362.05, "fp8": 733, "int8": 733, "int4": 733},
    "t4": {"fp32": 8.1, "fp16": 65, "int8": 130, "int4": 260},
    "rtx4090": {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3, "int8": 660.6, "int4": 1321.2},
    "rtx5090": {"fp32": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419, "int8": 838, "fp4": 1676},
    "mi300x": {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9},
    "mi325x": {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9},
    "mi350x": {"fp32": 144.2, "fp16": 2300, "bf16": 2300, "fp8": 4600, "int8": 4600, "fp4": 9200},
    "tpu_v4": {"bf16": 275, "int8": 275},
    "tpu_v5e": {"bf16": 197, "int8": 394},
    "tpu_v5p": {"bf16": 459, "int8": 918},
    "tpu_v6e": {"bf16": 918, "int8": 1836},
    "tpu_v7": {"bf16": 2307, "fp8": 4614},
}

# Memory in GB (a `G` ending: GiB), bandwidth in GB/s, link in GB/s and direction, shared memory in KiB, arch.
FACTS = {
    "a100": (80, 2039, 300, 163, "sm_80"),
    "a100_40gb": (40, 1555, 300, 163, "sm_80"),
    "a100_pcie": (80, 1935, 32, 163, "sm_80"),
    "a100_pcie_40gb": (40, 1555, 32, 163, "sm_80"),
    "h100": (80, 3350, 450, 227, "sm_90"),
    "h100_pcie": (80, 2039, 64, 227, "sm_90"),
    "h100_nvl": (94, 3900, 300, 227, "sm_90"),
    "h200": (141, 4800, 450, 227, "sm_90"),
    "b200": (180, 8000, 900, 227, "sm_100"),
    "b300": (270, 8000, 900, 227, "sm_103"),
    "l4": (24, 300, 32, 99, "sm_89"),
    "l40s": (48, 864, 32, 99, "sm_89"),
    "t4": (16, 320, 16, 64, "sm_75"),
    "rtx4090": (24, 1008, 32, 99, "sm_89"),
    "rtx5090": (32, 1792, 64, 99, "sm_120"),
    "mi300x": (192, 5300, 448, 64, "gfx942"),
    "mi325x": (256, 6000, 448, 64, "gfx942"),
    "mi350x": (288, 8000, 537.6, 160, "gfx950"),
    "tpu_v4": ("32G", 1200, 300, None, "v4"),
    "tpu_v5e": (16, 819, 200, None, "v5e"),
    "tpu_v5p": ("95G", 2765, 600, None, "v5p"),
    "tpu_v6e": ("32G", 1638, 400, None, "v6e"),
    "tpu_v7": ("192G", 7380, 600, None, "tpu7x"),
}

# bf16 (fp16 on T4) from the chip: units, operations of one unit in a clock, clock in GHz. From the architecture white papers.
CHIPS = {
    "a100": ("bf16", 108, 2048, 1.41),  # SMs x (4 tensor cores x 256 FMA)
    "h100": ("bf16", 132, 4096, 1.83),
    "h100_pcie": ("bf16", 114, 4096, 1.62),
    "l4": ("bf16", 58, 1024, 2.04),
    "l40s": ("bf16", 142, 1024, 2.49),
    "t4": ("fp16", 40, 1024, 1.59),
    "rtx4090": ("bf16", 128, 512, 2.52),  # GeForce: half rate with fp32 accumulation
    "rtx5090": ("bf16", 170, 512, 2.407),
    "mi300x": ("bf16", 304, 2048, 2.1),  # compute units
    "mi350x": ("bf16", 256, 4096, 2.2),
    "tpu_v4": ("bf16", 8, 2 * 128 * 128, 1.05),  # matrix units of 128 x 128
    "tpu_v5e": ("bf16", 4, 2 * 128 * 128, 1.5),
    "tpu_v5p": ("bf16", 8, 2 * 128 * 128, 1.75),
}


def test_every_profile_that_the_issue_names_is_there() -> None:
    assert set(PROFILES) == {*DENSE, "cpu", "auto"}
    assert set(FACTS) == set(DENSE)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_profile_spells_out_every_field_with_a_comment(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert list(yaml.safe_load(text)) == [field.name for field in fields(Hardware)]
    assert PROFILES[name].name == name
    uncommented = [line for line in text.splitlines() if re.match(r"^[a-z]|^  (fp|tf|bf|int)\d+: \d", line) and "  # " not in line]
    assert not uncommented


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_config_reads_the_profile_as_it_is_written(name: str) -> None:
    assert config.hardware(name) == PROFILES[name]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_figure_has_a_source_and_every_source_a_figure(name: str) -> None:
    profile = PUBLISHED[name]
    single = ("memory_bytes", "bandwidth_bytes_per_s", "link_bytes_per_s", "shared_memory_bytes", "fp8_format")
    figures = {"arch", *profile.peak_flops, *(key for key in single if getattr(profile, key) is not None)}
    assert set(profile.sources) == figures
    assert all(len(source) > 15 for source in profile.sources.values())


@pytest.mark.parametrize("name", sorted(DENSE))
def test_peaks_are_the_dense_figures_of_the_datasheet(name: str) -> None:
    peaks = {dtype: value / 1e12 for dtype, value in PROFILES[name].peak_flops.items()}
    assert peaks.keys() == DENSE[name].keys()
    for dtype, published in DENSE[name].items():
        assert peaks[dtype] == pytest.approx(published, rel=0.005), dtype


@pytest.mark.parametrize("name", sorted(FACTS))
def test_memory_bandwidth_link_and_shared_memory(name: str) -> None:
    profile = PROFILES[name]
    memory, bandwidth, link, shared, arch = FACTS[name]
    expected = int(memory[:-1]) * 2**30 if isinstance(memory, str) else memory * 10**9
    assert profile.memory_bytes == expected
    assert profile.bandwidth_bytes_per_s == pytest.approx(bandwidth * 1e9)
    assert profile.link_bytes_per_s == pytest.approx(link * 1e9)
    assert profile.shared_memory_bytes == (None if shared is None else shared * 1024)
    assert profile.arch == arch


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_peak_is_units_times_rate_times_clock_so_not_the_sparse_figure(name: str) -> None:
    dtype, units, rate, clock = CHIPS[name]
    assert PROFILES[name].peak_flops[dtype] == pytest.approx(units * rate * clock * 1e9, rel=0.01)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_units_are_operations_and_bytes_per_second(name: str) -> None:
    profile = PUBLISHED[name]
    assert all(isinstance(value, float) and 1e12 < value < 1e17 for value in profile.peak_flops.values())
    assert isinstance(profile.memory_bytes, int) and 10**10 < profile.memory_bytes < 10**12
    assert profile.bandwidth_bytes_per_s and 1e11 < profile.bandwidth_bytes_per_s < 1e13
    assert profile.link_bytes_per_s and profile.link_bytes_per_s < profile.bandwidth_bytes_per_s
    assert profile.link


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_a_device_without_published_figures_has_none(name: str) -> None:
    profile = PROFILES[name]
    assert not profile.peak_flops and not profile.sources
    assert profile.memory_bytes is profile.bandwidth_bytes_per_s is profile.link_bytes_per_s is profile.fp8_format is None
    assert profile.backend == name


@pytest.mark.case("B40")
def test_B40_fp8_format_of_each_profile_has_the_vendors_largest_value() -> None:
    largest = {name: torch.finfo(getattr(torch, f"float8_{p.fp8_format}")).max for name, p in PROFILES.items() if p.fp8_format}
    assert {name for name, value in largest.items() if value == 240} == {"mi300x", "mi325x"}
    assert {value for name, value in largest.items() if name not in ("mi300x", "mi325x")} == {448}
    assert set(largest) == {name for name, profile in PROFILES.items() if "fp8" in profile.peak_flops}


def test_every_device_name_points_to_a_profile() -> None:
    assert {profile for _, profile in DEVICE_NAMES} <= set(PROFILES)


def test_backend_follows_from_the_arch() -> None:
    prefixes = {"nvidia": "sm_", "amd": "gfx", "xla": ("v", "tpu")}
    for profile in PUBLISHED.values():
        assert profile.arch.startswith(prefixes[profile.backend])


def test_the_checked_names_of_fp8_formats_are_those_of_the_kernels() -> None:
    assert set(FP8_FORMATS) == set(FORMATS)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("hardware.backend=nvida", "hardware.backend: unknown backend 'nvida'; did you mean nvidia?"),
        ("hardware.peak_flops={fp9: 1e12}", "hardware.peak_flops.fp9: unknown dtype 'fp9'; did you mean fp"),
        ("hardware.peak_flops={fp8: -1}", "hardware.peak_flops.fp8: must be above 0, got -1"),
        ("hardware.memory_bytes=0", "hardware.memory_bytes: must be above 0, got 0"),
        ("hardware.fp8_format=e4m3", "hardware.fp8_format: unknown format 'e4m3'; did you mean e4m3fn"),
        ("hardware.fp8_format=xyz", "hardware.fp8_format: unknown format 'xyz'; known: e4m3fn, e4m3fnuz, or null"),
    ],
)
def test_a_profile_that_no_device_can_have_is_refused(override: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.compose(config.parse(["recipe=baseline", "hardware=cpu", override], cwd=tmp_path), cwd=tmp_path)
    assert str(caught.value).startswith(told)
