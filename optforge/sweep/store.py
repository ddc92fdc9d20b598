"""The records of a sweep: sweep.json for all of it, status.json in each job's folder; written whole or not at all.

Who reads a sweep (a table, a comparison, a resume) reads these and the reports, and never asks the process that ran it.
Folders are written relative to the sweep's, so that a sweep can be moved.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from optforge import atomic
from optforge.errors import Problem, UserError
from optforge.report.codec import build
from optforge.spec import Json

SCHEMA_VERSION = 1
SWEEP_FILE, STATUS_FILE, LOG_FILE = "sweep.json", "status.json", "job.log"

WAITING, RUNNING, NOT_STARTED = "waiting", "running", "not_started"
DONE, FAILED, OOM, TIMEOUT, INTERRUPTED = "done", "failed", "oom", "timeout", "interrupted"
ENDED_BADLY = (FAILED, OOM, TIMEOUT)

Record = TypeVar("Record")


@dataclass(kw_only=True)
class Job:
    """One job as sweep.json and its own status.json hold it."""

    index: int
    name: str
    """What sets the job apart, as its folder is named."""
    overrides: list[str]
    """As Hydra takes them; the job's own, without those of the sweep."""
    folder: str
    """Relative to the sweep's folder."""
    status: str = WAITING
    verdict: str | None = None
    """The report's; None for a job that left no report."""
    exit_code: int | None = None
    """Of the job's process; negative for the signal that ended it."""
    seconds: float | None = None
    """From the start of the process to its end."""
    started: str | None = None
    error: str | None = None
    """Why it failed, in one line."""
    log: str = LOG_FILE
    """What the process printed, relative to the job's folder."""
    device: str | None = None
    """The device that the job was given, where the sweep shares out several."""
    objective: float | None = None
    """What a searching sweeper minimizes: time, memory or size relative to the compiled (else the eager) baseline."""

    @property
    def ended(self) -> bool:
        return self.status not in (WAITING, RUNNING)


@dataclass(kw_only=True)
class Definition:
    """What was asked for, and with which versions."""

    overrides: list[str] = field(default_factory=list)
    """Of the whole sweep, as Hydra takes them."""
    recipes: list[str] = field(default_factory=list)
    hardware: list[str] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)


@dataclass(kw_only=True)
class Sweep:
    """sweep.json, schema_version 1."""

    schema_version: int = SCHEMA_VERSION
    definition: Definition = field(default_factory=Definition)
    jobs: list[Job] = field(default_factory=list)


def write(sweep: Sweep, folder: Path) -> None:
    """Replaces sweep.json in the sweep's `folder`.

    Raises:
        OutputError: the folder cannot be written.
    """
    atomic.write_json(folder / SWEEP_FILE, asdict(sweep))


def write_status(job: Job, folder: Path) -> None:
    """Replaces status.json in the job's folder, below the sweep's `folder`.

    Raises:
        OutputError: the folder cannot be written.
    """
    atomic.write_json(folder / job.folder / STATUS_FILE, {"schema_version": SCHEMA_VERSION, **asdict(job)})


def read(folder: Path | str) -> Sweep:
    """The sweep in `folder` (a sweep's folder, or the path of a sweep.json).

    Raises:
        UserError: there is none, or it cannot be read; says why.
    """
    path = Path(folder)
    path = path / SWEEP_FILE if path.is_dir() else path
    return _built(Sweep, _values(path, "give the folder of a sweep, outputs/sweeps/<date>_<time>"), path)


def read_status(folder: Path | str) -> Job:
    """The record in a job's folder.

    Raises:
        UserError: there is none, or it cannot be read; says why.
    """
    path = Path(folder) / STATUS_FILE
    values = _values(path, "give the folder of a job")
    return _built(Job, {key: value for key, value in values.items() if key != "schema_version"}, path)


def is_sweep(folder: Path | str) -> bool:
    """Whether a sweep was written into `folder`."""
    return (Path(folder) / SWEEP_FILE).is_file()


def _values(path: Path, fix: str) -> dict[str, Json]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(Problem(where=str(path), what="there is no such record", fix=fix)) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"cannot be read ({error})") from error
    version = values.get("schema_version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise _unreadable(path, f"has schema_version {version!r}; this OptForge reads {SCHEMA_VERSION}")
    return dict(values)


def _built(kind: type[Record], values: dict[str, Json], path: Path) -> Record:
    try:
        made: Record = build(kind, values)
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    return made


def _unreadable(path: Path, what: str) -> UserError:
    return UserError(Problem(where=str(path), what=what, fix="read it with the OptForge that wrote it, or start a new sweep"))
