"""How near to its roofline each kind of kernel comes on a device, from measured points; how far predictions made so were off.

A roofline alone is a bound. What real kernels reach of it differs by kind, dtype and size, so a calibration holds measured
times of single operators (`conf/calibration/`, or the user's own from `optforge hardware measure --calibrate`) and gives any
kernel the share that the nearest of them reached, weighted by nearness in the logarithms of their sizes. At a size that was
measured it gives the measured time back. The error band comes from whole models, which are no points (benchmarks/prediction.py).

A device without measurements of its own borrows the shares of another of its family. That is said, and carries no error band,
since nobody measured how far off it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from optforge.measure.machine.point import BACKWARD, BACKWARD_PRODUCTS, FUSED, Overheads, Point, compiled_name
from optforge.plan import graph as g
from optforge.plan.price import FALLBACK
from optforge.spec import Hardware

NAMED = 4
"""Operators that a sentence names."""
NEAREST = 4
"""Points that a value between points is weighted from."""
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}

EXACT, SAME_DTYPE, SAME_KIND, NONE = "measured", "same kind and dtype", "same kind", "none"


@dataclass(frozen=True, kw_only=True)
class Band:
    """How far predictions with this calibration were off whole models: |predicted / measured - 1|."""

    workload: str
    dtype: str = ""
    """Of the products; empty: all dtypes together."""
    points: int
    median_error: float
    p90_error: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The share of its roofline that a kernel is expected to reach, and what that rests on."""

    efficiency: float
    basis: str
    """`measured` (points of the same operator), `same kind and dtype`, `same kind`, or `none`: then the share is 1."""
    distance: float = 0.0
    """To the nearest point, in doublings of its size; 0 at a size that was measured."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured points of one device, and what follows from them."""

    name: str
    device: str
    """What was measured, as its driver names it."""
    hardware: Hardware
    """The profile of the measured device; borrowed shares are shares of its peaks."""
    exact: bool
    """Measured on the very hardware that predictions are for."""
    source: str
    """Date, versions and command."""
    overheads: Overheads
    points: tuple[Point, ...] = ()
    bands: tuple[Band, ...] = ()

    def efficiency(self, kernel: g.Kernel, hardware: Hardware) -> float:
        """The share of `ideal_seconds` that `kernel` reaches; above 1 where the cache serves what the roofline takes from memory.

        The time of a kernel is its ideal time over this, plus the overheads of the mode it is launched in.
        """
        return self.estimate(kernel, hardware).efficiency

    def estimate(self, kernel: g.Kernel, hardware: Hardware) -> Estimate:
        """The share with what it rests on, so that a caller can say how much of a time is measured."""
        ideal = ideal_seconds(kernel, hardware)
        found, basis = self._like(kernel)
        if not found or not ideal:
            return Estimate(efficiency=1.0, basis=NONE)
        reference = hardware if self.exact else self.hardware
        at = coordinates(kernel.kind, kernel.size, kernel.bytes)
        share, distance = _interpolated(at, [(_coordinates(point), _share(point, reference)) for point in found])
        # points and kernels may count a kernel's flops and bytes by different customs: the time is what was measured
        own = _roofline(*_work(kernel), kernel.dtype, hardware)
        return Estimate(efficiency=share * ideal / own if own else share, basis=basis, distance=distance)

    def near(self, kernel: g.Kernel, count: int = NEAREST) -> list[Point]:
        """The points that the share of `kernel` is weighted from, the nearest first."""
        at = coordinates(kernel.kind, kernel.size, kernel.bytes)
        return sorted(self._like(kernel)[0], key=lambda point: _distance(at, _coordinates(point)))[:count]

    def band(self, workload: str, dtype: str = "") -> Band | None:
        """The error band of predictions for a kind of workload, of that dtype where it was measured apart; None for a borrowed
        calibration and for a workload that was never compared."""
        if not self.exact:
            return None
        of_kind = [band for band in self.bands if band.workload == workload]
        return next((band for band in of_kind if band.dtype == dtype), next((band for band in of_kind if not band.dtype), None))

    def told(self) -> str:
        """One sentence on where the shares come from."""
        if self.exact:
            return f"efficiencies measured on {self.device} ({self.source})"
        return f"efficiencies of {self.device}, not of this device; no error known"

    def unmeasured(self, kernels: Iterable[g.Kernel]) -> list[str]:
        """A sentence for each way in which operators without points of their own were counted."""
        told: dict[str, dict[str, None]] = {}
        for kernel in kernels:
            _, basis = self._like(kernel)
            if basis != EXACT:
                told.setdefault(basis, {})[f"{_named(kernel)} in {kernel.dtype}"] = None
        counted = {basis: "at the peak" if basis == NONE else f"like other operators of the {basis}" for basis in told}
        return [f"not measured, so counted {counted[basis]}: {_listed(list(names))}" for basis, names in told.items()]

    def _like(self, kernel: g.Kernel) -> tuple[Sequence[Point], str]:
        """The points that speak for a kernel, and how near they come to it."""
        same: Sequence[Point] = next(filter(None, (self._by_name.get((*names, kernel.dtype)) for names in _names(kernel))), ())
        narrowed = [point for point in same if (point.phase == BACKWARD) == (kernel.phase == BACKWARD)] or same
        narrowed = [point for point in narrowed if point.detail == kernel.detail] or narrowed
        if narrowed:
            return narrowed, EXACT
        if of_dtype := self._by_dtype.get((kernel.kind, kernel.dtype)):
            return of_dtype, SAME_DTYPE
        of_kind = self._by_kind.get((kernel.kind,), ())
        return of_kind, SAME_KIND if of_kind else NONE

    @cached_property
    def _by_name(self) -> dict[tuple[str, ...], list[Point]]:
        return _grouped(self.points, lambda point: (point.kind, point.name, point.dtype))

    @cached_property
    def _by_dtype(self) -> dict[tuple[str, ...], list[Point]]:
        return _grouped(self.points, lambda point: (point.kind, point.dtype))

    @cached_property
    def _by_kind(self) -> dict[tuple[str, ...], list[Point]]:
        return _grouped(self.points, lambda point: (point.kind,))


def ideal_seconds(kernel: g.Kernel, hardware: Hardware) -> float:
    """The roofline: the longer of a kernel's arithmetic at the peak of its dtype and its bytes at the memory bandwidth. 0 where
    the profile has neither figure."""
    return _roofline(kernel.flops, kernel.bytes, kernel.dtype, hardware)


def coordinates(kind: str, size: Sequence[int], moved: float) -> tuple[float, ...]:
    """Where a kernel lies among others of its kind, in doublings. Products, attention, convolutions and look-ups by each of their
    sizes; reductions by bytes and rows (a long row takes longer than many short ones); all else by bytes."""
    if kind in (g.PRODUCT, g.ATTENTION, g.CONVOLUTION, g.EMBEDDING):
        return tuple(math.log2(max(1, extent)) for extent in size)
    at = math.log2(max(1.0, moved))
    return (at, math.log2(max(1, math.prod(size[:-1])))) if kind == g.REDUCTION else (at,)


def _coordinates(point: Point) -> tuple[float, ...]:
    return coordinates(point.kind, point.size, point.bytes)


def _interpolated(at: tuple[float, ...], points: Sequence[tuple[tuple[float, ...], float]]) -> tuple[float, float]:
    """The share at `at`, and the distance to the nearest point.

    Shepard's inverse-distance weighting (1968) of the nearest points' logarithms, with weights 1 / distance^2: exact at each
    point, between the least and the largest of its neighbours elsewhere.
    """
    near = sorted((_distance(at, place), math.log(share)) for place, share in points)[:NEAREST]
    distance = near[0][0]
    if distance < 1e-9:
        same = [value for other, value in near if other < 1e-9]
        return math.exp(sum(same) / len(same)), 0.0
    weights = [1.0 / other**2 for other, _ in near]
    total = sum(weights)
    if not total:  # sizes of another rank: nearness means nothing
        return math.exp(sum(value for _, value in near) / len(near)), math.inf
    return math.exp(sum(weight * value for weight, (_, value) in zip(weights, near, strict=True)) / total), distance


def _distance(at: tuple[float, ...], other: tuple[float, ...]) -> float:
    """In doublings; infinite between sizes of another rank."""
    return math.dist(at, other) if len(at) == len(other) else math.inf


def _share(point: Point, hardware: Hardware) -> float:
    """The share of its roofline that a point reached."""
    return max(_roofline(*_work(point), point.dtype, hardware), 1e-12) / point.seconds


def _roofline(flops: float, moved: float, dtype: str, hardware: Hardware) -> float:
    peak = next((found for name in (dtype, *FALLBACK.get(dtype, ())) if (found := hardware.peak_flops.get(name))), None)
    arithmetic = flops / peak if peak else 0.0
    memory = moved / hardware.bandwidth_bytes_per_s if hardware.bandwidth_bytes_per_s else 0.0
    return max(arithmetic, memory)


def _work(item: g.Kernel | Point) -> tuple[float, float]:
    """Flops and bytes from the size alone, the same for points and for kernels; bytes as they are where sizes do not tell."""
    size, each = item.size, BYTES.get(item.dtype, 2)
    if item.kind == g.PRODUCT and len(size) == 4:
        batch, m, n, k = size
        return 2.0 * batch * m * n * k, item.bytes
    if item.kind == g.ATTENTION and len(size) == 6:
        batch, heads, kv_heads, queries, keys, width = size
        pairs = queries * keys - (queries * (queries - 1) / 2 if item.detail == "causal" and queries <= keys else 0)
        factor = BACKWARD_PRODUCTS if item.phase == BACKWARD else 1.0
        return factor * 4.0 * batch * heads * width * pairs, 2.0 * each * batch * width * (heads * queries + kv_heads * keys)
    if item.kind == g.CONVOLUTION and len(size) == 6:
        batch, inputs, outputs, groups, kernel, pixels = size
        return 2.0 * batch * outputs * inputs / groups * kernel * pixels, item.bytes
    return 0.0, item.bytes


def _names(kernel: g.Kernel) -> list[tuple[str, str]]:
    """Kinds and names that points of such a kernel bear, the nearest first. What a compiler wrote has no operator's name, unless it
    was measured for itself (`fused aten.clone`); a library's kernel may have been measured in the compiler's layout."""
    own = (kernel.kind, kernel.name)
    if not kernel.compiled and kernel.operators == 1:
        return [own]
    measured = (kernel.kind, compiled_name(kernel.name))
    if kernel.kind in (g.PRODUCT, g.ATTENTION, g.CONVOLUTION):
        return [measured, own]
    return [measured, (g.REDUCTION if kernel.kind == g.REDUCTION else g.POINTWISE, FUSED)]


def _named(kernel: g.Kernel) -> str:
    return _names(kernel)[-1][1]


def _listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _grouped(points: Iterable[Point], key: Callable[[Point], tuple[str, ...]]) -> dict[tuple[str, ...], list[Point]]:
    found: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        found.setdefault(key(point), []).append(point)
    return found
