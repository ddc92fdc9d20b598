"""Which calibration speaks for a device: its own, the one that ships for it, or a borrowed one.

Looked for in this order: what `optforge hardware measure --calibrate` left in the user's cache for this device; a file of
`conf/calibration/` that was measured on it; the nearest file of its family, whose shares of the roofline are taken over and
whose errors are not.
"""

from __future__ import annotations

import math
from dataclasses import replace

from optforge.config import conf_dir
from optforge.measure.machine.point import Overheads, Point
from optforge.plan import calibration_file, measured
from optforge.plan.efficiency import Band, Calibration, Estimate, ideal_seconds
from optforge.spec import Hardware

__all__ = ["Band", "Calibration", "Estimate", "Overheads", "Point", "calibration_for", "ideal_seconds", "shipped"]


def calibration_for(hardware: Hardware) -> Calibration | None:
    """The calibration for a target; `exact` says whether it was measured on that very hardware. None where no device of its family
    was ever measured."""
    own = measured.calibration_of(hardware)
    if own is not None and own.points:
        return own
    candidates = [found for found in shipped() if found.hardware.backend == hardware.backend]
    for found in candidates:
        if found.device == hardware.description or (found.hardware.name == hardware.name and hardware.backend != "cpu"):
            return found
    nearest = min(candidates, key=lambda found: _distance(found.hardware, hardware), default=None)
    if nearest is None:
        return own
    return replace(nearest, exact=False, bands=(), overheads=own.overheads if own is not None else nearest.overheads)


def shipped() -> list[Calibration]:
    """Every calibration of `conf/calibration/`.

    Raises:
        ConfigError: a file is wrong.
    """
    return [calibration_file.read(path) for path in sorted((conf_dir() / "calibration").glob("*.yaml"))]


def _distance(measured_on: Hardware, wanted: Hardware) -> tuple[bool, float]:
    """Another architecture is further than any bandwidth; among equals the nearer bandwidth wins."""
    have, want = measured_on.bandwidth_bytes_per_s, wanted.bandwidth_bytes_per_s
    return measured_on.arch != wanted.arch, abs(math.log(have / want)) if have and want else math.inf
