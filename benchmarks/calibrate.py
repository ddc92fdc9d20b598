"""Measures single operators of one device and writes them as a calibration: what predictions for it are made from.

    python benchmarks/calibrate.py --device cpu --out conf/calibration/cpu.yaml
    python benchmarks/calibrate.py --device cuda --out conf/calibration/h200.yaml --seconds 220
    python benchmarks/calibrate.py --device cuda --out conf/calibration/h200.yaml --only aten.clone     # these again, the rest stays

Single operators on random numbers, never a model: benchmarks/prediction.py holds predictions against whole models, and the two
share no point. A file that is replaced loses the errors that prediction.py recorded in it, since they were of other points. Run it
on an idle machine: a point that spreads widely is measured again, and left out if it still does.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from optforge import config, registry
from optforge.cli.hardware import teller
from optforge.measure.machine.point import Point
from optforge.measure.machine.survey import Survey, survey
from optforge.plan import calibration_file, measured
from optforge.plan.calibration import Calibration
from optforge.plan.devices import profile_name

BACKENDS = {"cpu": "cpu", "cuda": "nvidia"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=sorted(BACKENDS), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seconds", type=float, default=280.0, help="no operator begins after this many")
    parser.add_argument("--only", default="", help="measure the operators whose title holds this text, and add them to the file")
    return parser.parse_args()


def added(result: Survey, before: Calibration) -> Survey:
    """The points of the file, those measured again in their new form; the overheads stay what they were."""

    def key(point: Point) -> tuple[object, ...]:
        return point.kind, point.name, point.dtype, point.detail, point.phase, point.size

    points = {key(point): point for point in (*before.points, *result.points)}
    return replace(result, points=list(points.values()), overheads=before.overheads)


def main() -> None:
    options, tell = arguments(), teller()
    backend = registry.get("backends", BACKENDS[options.device])()
    seen = backend.detect()
    if seen is None:
        sys.exit(f"there is no {options.device} device here")
    tell(f"load average {os.getloadavg()[0]:.1f}")
    with backend.session(0):
        result = survey(backend.torch_device(), tell, budget_s=options.seconds, only=options.only)
    if options.only and options.out.exists():
        result = added(result, calibration_file.read(options.out))
    published = profile_name(seen.name)
    named = config.hardware(published).name if published is not None else measured.described(seen, backend, result.peaks)
    command = shlex.join(["python", "benchmarks/calibrate.py", *sys.argv[1:]])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    measured.save(options.out, named, measured.identity(seen, backend), result, command=command)
    for line in result.left_out:
        tell(f"left out: {line}")
    points = calibration_file.read(options.out).points
    tell(f"{len(points)} points, {len(result.left_out)} left out, in {result.seconds:.0f} s; measured peaks: {result.peaks}")


if __name__ == "__main__":
    main()
