"""Kernels of a prediction put together: equal ones, those of one kind, and the costliest ten.

A decoder launches the same dozen kernels in every block, and a reader asks which kind of them the time goes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from optforge.plan.fusion import NO_REGION, region_of
from optforge.plan.graph import UNKNOWN, Kernel
from optforge.plan.price import LAUNCH, Price, price
from optforge.spec import Hardware, Json

if TYPE_CHECKING:
    from optforge.plan.calibration import Calibration

TOP = 10


@dataclass(frozen=True)
class Priced:
    """Equal kernels with the price of one."""

    kernel: Kernel
    """One of them; the numbers in its module path are `*`."""
    price: Price
    eager: bool
    """Launched by the host one by one, outside of every compiled region."""
    count: int

    @property
    def seconds(self) -> float:
        return self.count * self.price.seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of kernel in one call of the workload."""

    kind: str
    dtype: str
    """Dtype of the products; `none` for kernels that multiply nothing."""
    count: int
    flops: float
    bytes: float
    latency_ms: float | None
    bound: str | None
    """`memory`, `arithmetic`, `launch` or `links`."""


def alike(listed: Sequence[Kernel], hardware: Hardware, regions: Sequence[str], calibration: Calibration | None) -> list[Priced]:
    """Equal kernels together, priced once, in the order in which they first start."""
    found: dict[tuple[Kernel, bool], int] = {}
    for kernel in listed:
        eager = region_of(kernel.module, kernel.phase, regions) is NO_REGION
        key = replace(kernel, module=_pattern(kernel.module)), eager
        found[key] = found.get(key, 0) + 1
    return [Priced(kernel, price(kernel, hardware, calibration), eager, count) for (kernel, eager), count in found.items()]


def _pattern(module: str) -> str:
    """The path with its numbers as `*`: what repeated blocks have in common."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def rows(priced: Sequence[Priced], passes: int) -> list[Row]:
    """Kernels of one kind and product dtype together, over all passes of a call."""
    groups: dict[tuple[str, str], list[Priced]] = {}
    for item in priced:
        groups.setdefault((item.kernel.kind, item.price.dtype), []).append(item)
    return [
        Row(
            kind=kind,
            dtype=dtype,
            count=passes * sum(item.count for item in items),
            flops=passes * sum(item.count * item.kernel.flops for item in items),
            bytes=passes * sum(item.count * item.kernel.bytes for item in items),
            latency_ms=1e3 * passes * sum(item.seconds for item in items) if _known(items) else None,
            bound=largest(items) if _known(items) else None,
        )
        for (kind, dtype), items in groups.items()
    ]


def top(priced: Sequence[Priced], passes: int) -> list[dict[str, Json]]:
    """The costliest kernels of a call, all of them with a known time: see `Prediction.top`."""
    total = sum(item.seconds for item in priced)
    costliest = sorted(priced, key=lambda item: item.seconds, reverse=True)[:TOP]
    return [
        {
            "name": item.kernel.name,
            "module": item.kernel.module,
            "count": passes * item.count,
            "share": item.seconds / total if total else None,
            "latency_ms": 1e3 * passes * item.seconds,
            "bound": item.price.bound,
            "flops": passes * item.count * item.kernel.flops,
            "bytes": passes * item.count * item.kernel.bytes,
        }
        for item in costliest
        if item.kernel.kind != UNKNOWN
    ]


def largest(priced: Iterable[Priced], launched: float = 0.0) -> str:
    """The limit that most of the time goes to, `launched` seconds of it to launches."""
    spent = {LAUNCH: launched}
    for item in priced:
        spent[item.price.bound] = spent.get(item.price.bound, 0.0) + item.seconds
    return max(spent, key=lambda name: spent[name])


def _known(items: Iterable[Priced]) -> bool:
    return all(item.price.missing is None and item.kernel.kind != UNKNOWN for item in items)
