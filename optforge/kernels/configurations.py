"""Which tile, split and conversion an operator is launched with: tuned on this device, else shipped, else by reasoning.

A launch asks `chosen` with what it is about to do (`Shape`). Measured configurations lie in the user's cache folder, in a file whose
name holds the device and the versions of all that decides a kernel's speed, so that an upgrade makes them unseen; `optforge kernels
tune` writes them (`kernels.tuning`). The shipped file says of each entry whether anybody measured it. What is in neither comes from
`reasoned`, whose rules are written down there and are predictions.

Standard library only: a plan asks for configurations on machines without Triton.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from optforge.kernels.launches import FP8, INT4, INT8

PLAIN_KIND = 3
KINDS = {"plain": PLAIN_KIND, "int8": INT8, "int4": INT4, "e4m3fn": FP8, "e4m3fnuz": FP8}
"""Storage -> the kernels' KIND."""

BITS, PACKED = 0, 1
"""How stored bits become numbers for the matrix units (the kernels' CONVERT): Triton's operations, or PTX on whole registers."""

ROWS = (1, 2, 4, 8, 16)
"""Rows that are tuned for; what lies between takes the next."""

Config = Mapping[str, int]
"""Constants of a kernel, `num_warps` and `num_stages`; `vector` is 1 where an operator has two kernels and the first is meant."""

SHIPPED = Path(__file__).with_name("shipped.json")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is launched, as far as the best configuration depends on it."""

    operator: str
    form: str
    """Storage of the weight or cache, and what is fused, in words: `int4`, `e4m3fn gate`."""
    dtype: str
    """Of the activations: `bf16`, `fp16`, `fp32`."""
    rows: int
    outputs: int
    columns: int
    group: int = 0

    @property
    def bucket(self) -> int:
        return next((rows for rows in ROWS if rows >= self.rows), self.rows)

    @property
    def key(self) -> str:
        """`fused_linear|int4 gate|bf16|1|28672x4096|128`."""
        size = f"{self.outputs}x{self.columns}"
        return "|".join((self.operator, self.form, self.dtype, str(self.bucket), size, *([str(self.group)] if self.group else [])))


@dataclass(frozen=True)
class Device:
    """What a configuration depends on of a device."""

    arch: str
    """`sm_90`, `gfx942`."""
    name: str
    """As the driver says it: `NVIDIA H200`."""
    units: int
    """Multiprocessors or compute units."""

    @property
    def amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def wave(self) -> int:
        """Threads that run in step."""
        return 64 if self.arch.startswith("gfx9") else 32

    @property
    def shared_memory_bytes(self) -> int:
        """Of one thread block: CDNA 3 and 4 white papers; CUDA C++ Programming Guide, technical specifications."""
        known = {"gfx942": 65536, "gfx950": 163840, "sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_103": 232448}
        return known.get(self.arch, 65536 if self.amd else 101376)

    @property
    def launches_early(self) -> bool:
        """Whether a kernel may start before the one ahead of it has ended (programmatic dependent launch)."""
        return not self.amd and int("".join(filter(str.isdigit, self.arch)) or 0) >= 90


INTERPRETER = Device("interpreter", "interpreter", 4)


def chosen(shape: Shape, device: Device) -> Config:
    """The configuration to launch `shape` with on `device`."""
    return _chosen(shape, device)[0]


def origin(shape: Shape, device: Device) -> str:
    """Where it comes from: `tuned`, `shipped` (measured by whoever shipped it), `shipped, untuned`, or `reasoned`."""
    return _chosen(shape, device)[1]


def forget() -> None:
    """Reads files anew at the next launch; called after tuning."""
    _chosen.cache_clear()
    _shipped.cache_clear()


@cache
def _chosen(shape: Shape, device: Device) -> tuple[Config, str]:
    if device != INTERPRETER:
        from optforge.kernels.tuned import kept

        if (found := kept(device).get(shape.key)) is not None:
            return found, "tuned"
        entry = _shipped().get(device.arch, {}).get(shape.key)
        if entry is not None:
            return entry["config"], "shipped, untuned" if entry["untuned"] else "shipped"
    return reasoned(shape, device), "reasoned"


@cache
def _shipped() -> dict[str, Any]:
    """Arch -> key -> {config, untuned}."""
    found: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))["arches"] if SHIPPED.exists() else {}
    return found


# By reasoning.


def reasoned(shape: Shape, device: Device) -> Config:
    """What should be near the best, by these rules; nobody measured it.

    Enough programs for three on each multiprocessor; 16 bytes a thread and load, several loads of a thread under way; conversions where
    they cost the fewest instructions. Counted in the code for sm_90, a loop over one row takes 6.2 instructions a weight in bf16 and
    5.5 in fp8 on the ordinary cores, 3.4 in fp8 and 3.3 in int4 on the matrix units, which serve all rows at once: so one and two
    rows of bf16 go to the former, everything else to the latter.
    """
    rule = {"fused_linear": _linear, "decode_attention": _attention, "argmax": _argmax}[shape.operator]
    return rule(shape, device)


def _linear(shape: Shape, device: Device) -> Config:
    storage = shape.form.partition(" ")[0]
    if storage == "plain" and shape.rows <= 2:
        # fewer words along K than threads: x is then read where it is needed, without an exchange between threads
        return {"vector": 1, "BLOCK_N": 16, "BLOCK_K": 128, "PDL": 0, "num_warps": 4, "num_stages": 2}
    narrow = 16 if device.amd or shape.rows > 8 else 8
    block_k = 256 if KINDS[storage] in (INT8, FP8) else 128
    block_n = 32 if device.amd else 128 if KINDS[storage] == INT4 else 64
    programs = -(-shape.outputs // block_n)
    split = 1
    while programs * split < 3 * device.units and split < 16 and shape.columns // (2 * split) >= 4 * block_k:
        split *= 2
    common = {"vector": 0, "BLOCK_M": narrow, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT": split}
    common |= {"CONVERT": _conversion(storage, device), "PDL": 0}
    return common | {"num_warps": 4, "num_stages": 2 if device.amd else 3 if "gate" in shape.form else 4}


def _conversion(storage: str, device: Device) -> int:
    """PTX on NVIDIA from sm_80 on, where bf16 arithmetic exists; elsewhere Triton's own operations."""
    return BITS if device.amd or device == INTERPRETER or storage == "plain" else PACKED


def step(group: int, most: int) -> int:
    """The longest step along K, at most `most`, that stays within one group: a power of two that divides it."""
    return min(group & -group, most)


def _attention(shape: Shape, device: Device) -> Config:
    """`outputs` are places of the cache, `rows` sequences times groups, `columns` the width of a head."""
    block = 64 if device.amd or shape.columns > 128 else 128
    split = 1
    while split * shape.rows < 2 * device.units and split < 128 and shape.outputs // (2 * split) >= 2 * block:
        split *= 2
    convert = _conversion(shape.form, device)
    return {"BLOCK_L": block, "SPLIT": split, "CONVERT": convert, "PDL": 0, "num_warps": 4, "num_stages": 2 if device.amd else 3}


def _argmax(shape: Shape, device: Device) -> Config:
    split = 1
    while split * shape.rows < device.units and split < 64 and shape.columns // (2 * split) >= 1024:
        split *= 2
    return {"SPLIT": split, "BLOCK": 1024, "PDL": 0, "num_warps": 4, "num_stages": 2}


# What is tried.


def space(shape: Shape, device: Device) -> Iterator[Config]:
    """The configurations that tuning tries for a shape on a device: those that fit its shared memory, the reasoned one first."""
    first = reasoned(shape, device)
    yield first
    spaces = {"fused_linear": _linear_space, "decode_attention": _attention_space, "argmax": _argmax_space}
    for config in spaces[shape.operator](shape, device):
        if config != first and _fits(config, shape, device):
            yield config


def _linear_space(shape: Shape, device: Device) -> Iterator[Config]:
    storage = shape.form.partition(" ")[0]
    early = (0, 1) if device.launches_early else (0,)
    if KINDS[storage] != INT4 and shape.rows <= 4:
        for n, k, pdl, warps in product((2, 4, 8, 16), (256, 512, 1024, 2048, 4096), early, (2, 4, 8)):
            words = n * k // (2 if storage == "plain" else 4) * (2 if "gate" in shape.form else 1) // (warps * device.wave)
            if words >= 4 and words * (2 + shape.rows) <= 160 and k <= 2 * shape.columns:  # 16 bytes a thread; sums and tiles in registers
                yield {"vector": 1, "BLOCK_N": n, "BLOCK_K": k, "PDL": pdl, "num_warps": warps, "num_stages": 2}
    steps = {128, 256} if KINDS[storage] == INT4 else {64, 128, 256} if storage == "plain" else {128, 256, 512}
    narrow = (16,) if device.amd or shape.rows > 8 else (8, 16)
    found = conversions(storage, device)
    tiles = product(narrow, (16, 32, 64, 128), sorted(steps), (1, 2, 4, 8, 16), found, early, (1, 2, 4, 8), (2, 3, 4, 5))
    for m, n, k, split, convert, pdl, warps, stages in tiles:
        if warps * 16 <= n * 2 and 16 * warps >= n // 2 and shape.columns >= split * k and (stages <= 3 or not device.amd):
            yield {
                "vector": 0,
                "BLOCK_M": m,
                "BLOCK_N": n,
                "BLOCK_K": k,
                "SPLIT": split,
                "CONVERT": convert,
                "PDL": pdl,
                "num_warps": warps,
                "num_stages": stages,
            }


def conversions(storage: str, device: Device) -> tuple[int, ...]:
    """The conversions that exist for a storage on a device."""
    if storage == "plain" or device.amd or device == INTERPRETER:
        return (BITS,)
    return (PACKED, BITS)


def _attention_space(shape: Shape, device: Device) -> Iterator[Config]:
    early = (0, 1) if device.launches_early else (0,)
    for block, split, convert, pdl, warps, stages in product(
        (32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64, 128), conversions(shape.form, device), early, (2, 4, 8), (2, 3, 4)
    ):
        if split == 1 or shape.outputs >= split * block:
            yield {"BLOCK_L": block, "SPLIT": split, "CONVERT": convert, "PDL": pdl, "num_warps": warps, "num_stages": stages}


def _argmax_space(shape: Shape, device: Device) -> Iterator[Config]:
    early = (0, 1) if device.launches_early else (0,)
    for block, split, pdl, warps in product((512, 1024, 2048, 4096), (4, 8, 16, 32, 64, 128), early, (4, 8)):
        yield {"SPLIT": split, "BLOCK": block, "PDL": pdl, "num_warps": warps, "num_stages": 2}


def _fits(config: Config, shape: Shape, device: Device) -> bool:
    """Whether the tiles that wait in shared memory leave room; the compiler has the last word."""
    size = {"plain": 2.0, "int4": 0.5}.get(shape.form.partition(" ")[0], 1.0)
    if "BLOCK_L" in config:
        tile = 2 * config["BLOCK_L"] * shape.columns * size
    elif config.get("vector") == 0:
        tile = config["BLOCK_K"] * (config["BLOCK_N"] * size * (2 if "gate" in shape.form else 1) + 2 * config["BLOCK_M"])
    else:
        return True
    return tile * (config["num_stages"] - (1 if device.amd else 0)) <= device.shared_memory_bytes * 0.9


def constants(config: Config) -> dict[str, int]:
    """What goes to the kernel; `num_warps` and `num_stages` among it, `vector` not."""
    return {name: value for name, value in config.items() if name != "vector"}


def described(device: Device) -> dict[str, Any]:
    return asdict(device)
