"""The sweep that this process runs: what the command line knows and Hydra's launcher needs.

Hydra makes the launcher itself and passes it nothing of ours, so the command line leaves the session here while Hydra
runs, and the launcher finds it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from optforge import atomic
from optforge.errors import ConfigError, OptForgeError, Problem
from optforge.spec import SweepOptions
from optforge.sweep import names, store
from optforge.sweep.devices import Slot
from optforge.sweep.display import Display
from optforge.sweep.store import Job, Sweep

LOCK = ".lock"


class SweepStopped(OptForgeError):
    """A job failed under `sweep.on_error: stop`; the sweeper must ask for no more."""


@dataclass(kw_only=True)
class Session:
    """One sweep while it runs."""

    folder: Path
    sweep: Sweep
    options: SweepOptions
    display: Display
    slots: Sequence[Slot] = (Slot(),)
    flags: Sequence[str] = ()
    """Of the command line, for each job too: `--debug`, `--config-dir FOLDER`."""
    varied: frozenset[str] = frozenset()
    """Keys whose values differ between jobs."""
    keep: set[int] = field(default_factory=set)
    """Numbers of the jobs whose result an earlier run of this sweep has left."""

    def batch(self, overrides: Sequence[Sequence[str]], first: int) -> list[Job]:
        """The jobs that a sweeper asks for, from number `first` on; a search asks for jobs that nobody knew before."""
        jobs = []
        for index, given in enumerate(overrides, first):
            own = of_the_jobs(given)
            if index == len(self.sweep.jobs):
                self.sweep.jobs.append(new_job(index, own, self.varied))
            job = self.sweep.jobs[index]
            job.overrides = own
            jobs.append(job)
        store.write(self.sweep, self.folder)
        return jobs

    def save(self, job: Job) -> None:
        """Writes the job's record and the sweep's, in this order: the sweep never says more than the job."""
        (self.folder / job.folder).mkdir(exist_ok=True)
        store.write_status(job, self.folder)
        store.write(self.sweep, self.folder)

    def finish(self) -> None:
        """Says of every job that still waits that it was not started."""
        for job in self.sweep.jobs:
            if job.status == store.WAITING:
                job.status = store.NOT_STARTED
                (self.folder / job.folder).mkdir(exist_ok=True)
                store.write_status(job, self.folder)
        store.write(self.sweep, self.folder)


def new_job(index: int, overrides: list[str], varied: frozenset[str]) -> Job:
    """A job that waits, in the folder that its number and its varied overrides name."""
    name = names.folder_name(index, [text for text in overrides if key_of(text) in varied])
    return Job(index=index, name=name.partition("_")[2], overrides=overrides, folder=name)


def key_of(override: str) -> str:
    """The key of an override, without Hydra's signs."""
    return override.lstrip("+~").partition("=")[0]


def of_the_jobs(overrides: Sequence[str]) -> list[str]:
    """Those that say something of a run, and nothing of the sweep or of Hydra."""
    return [text for text in overrides if not key_of(text).startswith(("sweep.", "hydra.", "hydra/"))]


_current: list[Session] = []


@contextmanager
def opened(session: Session) -> Iterator[Session]:
    """Makes `session` the one that the launcher finds, and its folder this process's alone, while it holds.

    Raises:
        ConfigError: another process runs a sweep in the folder.
    """
    with _alone(session.folder):
        _current.append(session)
        try:
            yield session
        finally:
            _current.remove(session)
            session.finish()


def current() -> Session:
    """The session that is open.

    Raises:
        ConfigError: there is none, because something else than `optforge run -m` has started Hydra.
    """
    if not _current:
        what, fix = "runs the jobs of optforge run -m alone", "choose another hydra/launcher for this application"
        raise ConfigError(Problem(where="hydra/launcher=optforge", what=what, fix=fix))
    return _current[-1]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """An exclusive lock that the system lets go of when this process ends, however it ends."""
    try:
        handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise atomic.cannot_write(folder / LOCK, 0, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "wait until it has ended, or stop it"
            raise ConfigError(Problem(where=str(folder), what="this sweep is running in another process", fix=fix)) from error
        yield
    finally:
        os.close(handle)
