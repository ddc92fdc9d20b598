"""Calibrations as files: plain data with device, date, versions and command, few characters a point.

    device: AMD EPYC, 2 threads, avx512_bf16     # what was measured
    hardware: h200                               # the profile with its published peaks; a CPU has `profile`, its measured one
    overheads: {eager_operator: 2.1e-06, ...}    # seconds
    errors: [...]                                # how far predictions were off whole models, by benchmarks/prediction.py --record
    points:                                      # single operators, by kind, name, dtype
      - kind: product
        name: aten.mm
        dtype: bf16
        at:
          - 1x4x576x576 673000 12.5 0.02         # size, bytes, microseconds, spread

They are read with the safe parser and a strict schema, like every file that may come from somebody else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from optforge import config, safe_yaml
from optforge.atomic import write_bytes
from optforge.config import schema
from optforge.config.build import profile
from optforge.errors import ConfigError, Problem
from optforge.measure.machine.point import FORWARD, Overheads, Point
from optforge.plan.efficiency import Band, Calibration
from optforge.spec import Hardware, Json

_POINT = re.compile(r"(?P<size>\d+(x\d+)*) (?P<bytes>\d+) (?P<microseconds>\d+(\.\d+)?) (?P<spread>\d+(\.\d+)?)")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a calibration file holds."""

    device: str
    hardware: str | None = None
    profile: Mapping[str, Any] | None = None
    date: str
    command: str
    versions: Mapping[str, str]
    overheads: Mapping[str, float]
    errors: tuple[Any, ...] = ()
    left_out: int = 0
    """Cases that were to be measured and were not."""
    points: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Group:
    kind: str
    name: str
    dtype: str
    detail: str = ""
    phase: str = FORWARD
    at: tuple[Any, ...] = field(default=())


@cache
def read(path: Path) -> Calibration:
    """The calibration in a file, `exact` until somebody borrows it.

    Raises:
        ConfigError: with every problem at once, each with the file.
    """
    node = safe_yaml.read(path)
    problems: list[Problem] = []
    contents = _built(Contents, node, "", str(path), problems)
    if contents is None:
        raise ConfigError(*problems)
    hardware = _hardware(contents, str(path), problems)
    overheads = _built(Overheads, contents.overheads, "overheads", str(path), problems)
    bands = tuple(_built(Band, entry, "errors", str(path), problems) for entry in contents.errors)
    points = tuple(point for entry in contents.points for point in _points(entry, str(path), problems))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    assert hardware is not None  # _hardware returns None only with a problem
    versions = ", ".join(f"{name} {version}" for name, version in contents.versions.items())
    return Calibration(
        name=path.name.split(".")[0],
        device=contents.device,
        hardware=hardware,
        exact=True,
        source=f"measured on {contents.date} with {versions}",
        overheads=overheads,
        points=points,
        bands=bands,
    )


def write(
    path: Path,
    *,
    device: str,
    hardware: Hardware | str,
    date: str,
    command: str,
    versions: Mapping[str, str],
    overheads: Overheads,
    points: Sequence[Point],
    errors: Sequence[Band] = (),
    left_out: int = 0,
) -> None:
    """Writes a file that `read` reads back.

    Raises:
        OutputError: the folder cannot be written.
    """
    head: dict[str, Json] = {
        "device": device,
        **({"hardware": hardware} if isinstance(hardware, str) else {"profile": schema.plain_fields(hardware)}),
        "date": date,
        "command": command,
        "versions": dict(versions),
        "overheads": {name: float(f"{value:.4g}") for name, value in vars(overheads).items()},
        "errors": [_band(band) for band in errors],
        "left_out": left_out,
    }
    comments = ("Measured single operators of one device. See optforge/plan/calibration_file.py for what stands where.",)
    write_bytes(path, (safe_yaml.dumps(head, comments) + "".join(_lines(points))).encode())


def with_errors(path: Path, errors: Sequence[Band]) -> None:
    """Replaces the errors in a file; everything else stays as it is."""
    old = safe_yaml.read(path)
    calibration = read(path)
    write(
        path,
        device=old["device"],
        hardware=old.get("hardware") or calibration.hardware,
        date=old["date"],
        command=old["command"],
        versions=old["versions"],
        overheads=calibration.overheads,
        points=calibration.points,
        errors=errors,
        left_out=old.get("left_out", 0),
    )


def _band(band: Band) -> dict[str, Json]:
    return {**vars(band), "median_error": float(f"{band.median_error:.3g}"), "p90_error": float(f"{band.p90_error:.3g}")}


def _lines(points: Sequence[Point]) -> Iterator[str]:
    """One line a point, under a line for each kind, name, dtype, detail and phase."""
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        groups.setdefault((point.kind, point.name, point.dtype, point.detail, point.phase), []).append(point)
    yield "points:\n" if groups else "points: []\n"
    for (kind, name, dtype, detail, phase), found in groups.items():
        yield f"  - kind: {kind}\n    name: {name}\n    dtype: {dtype}\n"
        yield f"    detail: '{detail}'\n    phase: {phase}\n    at:\n"
        for point in sorted(found, key=lambda point: point.size):
            yield f"      - {'x'.join(map(str, point.size))} {point.bytes:.0f} {point.seconds * 1e6:.4f} {point.spread:.3f}\n"


def _built(cls: type, node: Json, key: str, where: str, problems: list[Problem]) -> Any:
    if not isinstance(node, Mapping):
        problems.append(Problem(where=where, what=f"{key or 'a calibration'} must be a mapping", fix="see conf/calibration"))
        return None
    return schema.build(cls, node, "", kind=key or "a calibration", problems=problems, where=lambda name: f"{where}: {name}")


def _hardware(contents: Contents, where: str, problems: list[Problem]) -> Hardware | None:
    if (contents.hardware is None) == (contents.profile is None):
        problems.append(Problem(where=where, what="must have either hardware or profile", fix="name a profile, or write one"))
        return None
    try:
        return config.hardware(contents.hardware) if contents.hardware is not None else profile(contents.profile, where)
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def _points(node: Json, where: str, problems: list[Problem]) -> Iterator[Point]:
    group = _built(_Group, node, "points", where, problems)
    if group is None:
        return
    for entry in group.at:
        found = _POINT.fullmatch(str(entry))
        if found is None or float(found["microseconds"]) <= 0:
            what = f"{str(entry)!r:.80} under {group.name} is no point"
            problems.append(Problem(where=where, what=what, fix="write SIZE BYTES MICROSECONDS SPREAD, as 1x4x576x576 673000 12.5 0.02"))
            continue
        yield Point(
            kind=group.kind,
            name=group.name,
            dtype=group.dtype,
            size=tuple(int(extent) for extent in found["size"].split("x")),
            detail=group.detail,
            phase=group.phase,
            bytes=float(found["bytes"]),
            seconds=float(found["microseconds"]) / 1e6,
            spread=float(found["spread"]),
        )
