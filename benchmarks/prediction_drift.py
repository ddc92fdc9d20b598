"""How fast the machine is now beside what it was when its calibration was made.

A CPU that others share drifts: the same programs took 1.2 times as long after 24 minutes, and those that the interpreter bounds 1.7
times. A prediction cannot know that. So a few of the calibration's own operators are timed again next to each point, and the
prediction is also told in units of the machine as it is then. These operators are part of no model that is predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optforge.measure.machine import overheads
from optforge.measure.machine.case import FLOWING, Case
from optforge.measure.machine.point import FUSED, POINTWISE, PRODUCT, REDUCTION, Peaks, Point
from optforge.measure.machine.survey import Survey, _Surveyor, cases
from optforge.plan.calibration import Calibration
from optforge.plan.price import MEMORY
from optforge.plan.summary import Priced
from optforge.spec import Hardware

ARITHMETIC = (
    (PRODUCT, "aten.mm", "bf16", (1, 64, 576, 576)),
    (PRODUCT, "aten.mm", "bf16", (1, 256, 576, 1536)),
    (PRODUCT, "aten.mm", "fp32", (1, 64, 576, 576)),
    (PRODUCT, "optforge.int8_packed", "int8", (1, 64, 960, 576)),
    (REDUCTION, "aten._softmax", "bf16", (64, 576)),
)
STREAMING = (
    (PRODUCT, "aten.mm", "bf16", (1, 1, 3072, 576)),
    (PRODUCT, "aten.mm", "bf16", (1, 4, 49152, 576)),
    (REDUCTION, FUSED, "bf16", (1024, 576)),
    (POINTWISE, "aten.add", "bf16", (1024, 1536)),
)
"""Kinds, names, dtypes and sizes of points whose time the cores' arithmetic, or the memory, sets."""


@dataclass(frozen=True)
class Moment:
    """Times now over times in the calibration, by what bounds them."""

    arithmetic: float
    memory: float
    host: float


class Drift:
    """Times the reference operators of one device."""

    def __init__(self, device: torch.device, calibration: Calibration, hardware: Hardware) -> None:
        self.device, self.known = device, calibration.overheads
        peaks = Peaks(flops=dict(hardware.peak_flops), bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s or 1.0, how={})
        self.surveyor = _Surveyor(device, Survey(peaks=peaks, overheads=calibration.overheads))
        points = {_key(point): point for point in calibration.points}
        named = {_key(case): case for case in cases(device)}
        self.arithmetic, self.streaming = (
            [(named[key], points[key].seconds) for key in keys if key in named and key in points] for keys in (ARITHMETIC, STREAMING)
        )

    def now(self) -> Moment:
        """Under two seconds."""
        return Moment(
            self._ratio(self.arithmetic), self._ratio(self.streaming), overheads.eager_operator(self.device) / self.known.eager_operator
        )

    def _ratio(self, references: Sequence[tuple[Case, float]]) -> float:
        found = [(self.surveyor.measured(case), then) for case, then in references]
        ratios = [point.seconds / then for point, then in found if isinstance(point, Point)]
        return statistics.median(ratios) if ratios else 1.0


def between(before: Moment, after: Moment) -> Moment:
    """The mean of two moments."""
    return Moment(*((getattr(before, name) + getattr(after, name)) / 2 for name in Moment.__dataclass_fields__))


def drifted_ms(priced: Sequence[Priced], passes: int, launch_ms: float, moment: Moment) -> float:
    """The time of one call with each kernel and the host at the moment's speed, in milliseconds."""
    streams = (item.price.bound == MEMORY and item.kernel.bytes > FLOWING for item in priced)
    kernels = sum(item.seconds * (moment.memory if flows else moment.arithmetic) for item, flows in zip(priced, streams, strict=True))
    return 1e3 * passes * kernels + launch_ms * moment.host


def _key(item: Case | Point) -> tuple[str, str, str, tuple[int, ...]]:
    return item.kind, item.name, item.dtype, item.size
