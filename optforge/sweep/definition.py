"""What makes a sweep the same sweep: the resolved configuration of every job, and the files that it names.

A resume must not mix two experiments in one table. So the resolved configurations are kept beside the sweep, a changed
one is refused with the keys that differ, and a finished job counts only while its report, the versions that made it and
the files it read are what they were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from optforge import atomic, environment
from optforge.config.origins import as_typed
from optforge.errors import ConfigError, Problem, UserError
from optforge.report import store as reports
from optforge.spec import Json, Part, Report, Run

FILE = "definition.json"
NOT_PART_OF_IT = ("output_dir", "trust")
"""Keys of a run that change neither its figures nor its outputs."""
MAX_TOLD = 8
"""Differing keys named in one refusal."""


def of(run: Run) -> dict[str, Json]:
    """What decides the outcome of a job, as plain data: its resolved configuration and a digest of the files it names."""
    return of_all([run])[0]


def of_all(runs: Sequence[Run]) -> list[dict[str, Json]]:
    """`of` each run; a path that several name is looked through once."""
    digest = cache(_digest)
    return [
        {
            "resolved": _as_json({key: value for key, value in run.resolved.items() if key not in NOT_PART_OF_IT}),
            "files": {str(path): digest(path) for part in (run.model, run.data) for path in _paths(part)},
        }
        for run in runs
    ]


def write(folder: Path, jobs: Sequence[Mapping[str, Json]]) -> None:
    """Keeps the definitions of all jobs, in their order, beside sweep.json."""
    atomic.write_json(folder / FILE, {"jobs": list(jobs)})


def read(folder: Path) -> list[dict[str, Json]]:
    """What `write` kept.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = folder / FILE
    try:
        return list(json.loads(path.read_text(encoding="ascii"))["jobs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(Problem(where=str(path), what=f"cannot be read ({error})", fix="start a new sweep")) from error


def require_same(folder: Path, jobs: Sequence[Mapping[str, Json]]) -> None:
    """Refuses to resume the sweep in `folder` as one of other jobs.

    Raises:
        ConfigError: a line for each key that differs, with both values and a job that has them.
    """
    before = read(folder)
    if len(before) != len(jobs):
        what = f"the sweep in {folder} has {_count(len(before))}, this one {_count(len(jobs))}"
        raise ConfigError(Problem(where="sweep.resume", what=what, fix="start a new sweep, or type -m sweep.resume=<folder> alone"))
    told: dict[str, Problem] = {}
    for index, (old, new) in enumerate(zip(before, jobs, strict=True)):
        for key, was, now in _differing(old["resolved"], new["resolved"]):
            what = f"{as_typed(key)} is {now} in job {index} and was {was} in the sweep in {folder}"
            told.setdefault(key, Problem(where="sweep.resume", what=what, fix="start a new sweep, or give the old value"))
    if told:
        more = len(told) - MAX_TOLD
        rest = [Problem(where="sweep.resume", what=f"and {more} more keys differ")] if more > 0 else []
        raise ConfigError(*list(told.values())[:MAX_TOLD], *rest)


def stale(report: Report | None, before: Mapping[str, Json], now: Mapping[str, Json]) -> str | None:
    """Why a job must run again, or None where its result still counts.

    Args:
        report: what `finished` found.
        before, now: what `of` gave when the sweep began, and gives now.
    """
    if report is None:
        return "it has no report that can be read"
    if report.status != "complete":
        return f"its report says {report.status}"
    if before["files"] != now["files"]:
        changed = sorted(path for path in {**before["files"], **now["files"]} if before["files"].get(path) != now["files"].get(path))
        return f"{changed[0]} has changed"
    made_with = report.environment.get("versions") or {}
    for package, version in environment.versions().items():
        if made_with.get(package) != version:
            return f"it was made with {package} {made_with.get(package)}, which is {version} now"
    return None


def finished(folder: Path) -> Report | None:
    """The report in a job's folder; None where there is none or it is damaged."""
    try:
        return reports.read(folder)
    except UserError:  # a kill may leave a damaged file: the job runs again, as one without a report does
        return None


def _differing(old: Json, new: Json, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Dotted key, old and new value of each leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differing(old.get(key, _NOTHING), new.get(key, _NOTHING), f"{prefix}.{key}" if prefix else key)
    elif old != new:
        yield prefix, _shown(old), _shown(new)


_NOTHING = object()


def _shown(value: Json) -> str:
    return "absent" if value is _NOTHING else json.dumps(value)


def _paths(part: Part) -> list[Path]:
    """The files and folders that a model or data set names, and that are there."""
    from optforge.config.build import PATH_KEYS

    named = [Path(value) for key, value in part.options.items() if key in PATH_KEYS and isinstance(value, str)]
    return [path for path in named if path.is_absolute() and path.exists()]


def _digest(path: Path) -> str:
    """Of names, sizes and times of the files below a folder, or of one file."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _as_json(value: Json) -> Json:
    """The value as it comes back from a file: tuples as lists, so that both compare equal."""
    return json.loads(json.dumps(value))


def _count(jobs: int) -> str:
    return "1 job" if jobs == 1 else f"{jobs} jobs"
