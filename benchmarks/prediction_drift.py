"""The calibration of the minute: the points that a prediction rests on, timed again next to what is predicted.

A CPU that others share drifts: the same programs took 1.2 times as long after 24 minutes, and the memory's bandwidth was 67 GB/s in
one quarter of an hour and 45 in another. A calibration cannot know that. So the operators whose points weigh most in a prediction
are timed before and after the whole model is, and the prediction is also told from those times. They are single operators
still; nothing of the whole model's own time goes into its prediction.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from optforge.measure.machine import overheads
from optforge.measure.machine.case import Case
from optforge.measure.machine.point import Overheads, Peaks, Point
from optforge.measure.machine.survey import Survey, _Surveyor, cases
from optforge.plan.calibration import Calibration
from optforge.plan.summary import Priced
from optforge.spec import Hardware

Key = tuple[str, str, str, tuple[int, ...], str, str]
MOST = 14
"""Points that are timed again for one prediction: about three seconds."""
EACH = 2
"""Of the points nearest to one kernel."""
COVERED = 0.95
"""Share of the predicted time whose kernels have their points timed again, if `MOST` is enough."""


@dataclass(frozen=True)
class Moment:
    """Times now over times in the calibration."""

    points: dict[Key, float]
    host: float

    def told(self) -> dict[str, float]:
        """Medians, for the record."""
        found = list(self.points.values())
        return {"points": float(len(found)), "median": statistics.median(found) if found else 1.0, "host": self.host}


class Drift:
    """Times points of one calibration again."""

    def __init__(self, device: torch.device, calibration: Calibration, hardware: Hardware) -> None:
        self.device, self.calibration = device, calibration
        peaks = Peaks(flops=dict(hardware.peak_flops), bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s or 1.0, how={})
        self.surveyor = _Surveyor(device, Survey(peaks=peaks, overheads=calibration.overheads))
        # programs of a compiler would have to be compiled anew for every row: their points take the drift of the others
        self.cases = {_key(case): case for case in cases(device) if not case.compiled}

    def points(self, priced: Sequence[Priced]) -> list[Point]:
        """Those that the costliest kernels rest on."""
        total, covered = sum(item.seconds for item in priced), 0.0
        found: dict[Key, Point] = {}
        for item in sorted(priced, key=lambda item: -item.seconds):
            if covered >= COVERED * total or len(found) >= MOST:
                break
            found |= {_key(point): point for point in self.calibration.near(item.kernel, EACH) if _key(point) in self.cases}
            covered += item.seconds
        return list(found.values())[:MOST]

    def now(self, points: Iterable[Point]) -> Moment:
        known = {_key(point): point.seconds for point in points}
        found = {key: self.surveyor.measured(self.cases[key]) for key in known}
        ratios = {key: point.seconds / known[key] for key, point in found.items() if isinstance(point, Point)}
        return Moment(ratios, overheads.eager_operator(self.device) / self.calibration.overheads.eager_operator)


def between(before: Moment, after: Moment) -> Moment:
    """The mean of two moments."""
    both = before.points.keys() & after.points.keys()
    return Moment({key: (before.points[key] + after.points[key]) / 2 for key in both}, (before.host + after.host) / 2)


def refreshed(calibration: Calibration, moment: Moment) -> Calibration:
    """The calibration with the points of the moment; all others by the median of what was timed again of their kind, or of all."""
    every = statistics.median(moment.points.values()) if moment.points else 1.0
    kinds = {key[0] for key in moment.points}
    of_kind = {kind: statistics.median(ratio for key, ratio in moment.points.items() if key[0] == kind) for kind in kinds}

    def now(point: Point) -> Point:
        return replace(point, seconds=point.seconds * moment.points.get(_key(point), of_kind.get(point.kind, every)))

    host = {name: getattr(calibration.overheads, name) * moment.host for name in Overheads.__dataclass_fields__}
    return replace(calibration, points=tuple(map(now, calibration.points)), overheads=Overheads(**host))


def _key(item: Case | Point) -> Key:
    return item.kind, item.name, item.dtype, item.size, item.detail, item.phase
