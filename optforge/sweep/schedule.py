"""Jobs over devices, in order: one process at a time on each, every end recorded when it happens."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from optforge.sweep import outcome
from optforge.sweep.devices import Slot
from optforge.sweep.process import POLL_S, JobProcess, job_command
from optforge.sweep.session import Session, SweepStopped, key_of
from optforge.sweep.store import DONE, INTERRUPTED, RUNNING, TIMEOUT, Job

OF_THE_SWEEP = ("hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper", "hydra.sweep", "hydra.mode", "hydra.run.dir")
LOGGING = ("hydra/job_logging", "hydra/hydra_logging")
"""Which `optforge run` sets anew for each run."""


@dataclass
class _Running:
    job: Job
    process: JobProcess
    slot: Slot


def run(session: Session, jobs: Sequence[Job], hydra: Sequence[str] = ()) -> None:
    """Runs `jobs`, except for those whose result is kept; returns when all have ended.

    Args:
        hydra: overrides of Hydra's own for every job, such as hydra.searchpath.

    Raises:
        SweepStopped: a job failed, and `sweep.on_error` is stop; those that ran already have ended.
        KeyboardInterrupt, SystemExit: after the running jobs were ended and recorded.
    """
    _Schedule(session, [text for text in hydra if not _of_the_sweep(text)]).run(list(jobs))


def _of_the_sweep(override: str) -> bool:
    key = key_of(override)
    return key in LOGGING or any(key == ours or key.startswith((f"{ours}.", f"{ours}/")) for ours in OF_THE_SWEEP)


class _Schedule:
    def __init__(self, session: Session, hydra: Sequence[str]) -> None:
        self.session, self.hydra = session, hydra
        self.free = list(session.slots)
        self.running: list[_Running] = []

    def run(self, jobs: list[Job]) -> None:
        display = self.session.display
        for job in jobs:
            if job.index in self.session.keep:
                display.kept(job)
        waiting = [job for job in jobs if job.index not in self.session.keep]
        failed: Job | None = None
        try:
            while self.running or (waiting and failed is None):
                while waiting and self.free and failed is None:
                    self._start(waiting.pop(0))
                for ended in map(self._ended, list(self.running)):
                    if ended is not None and ended.status != DONE and self.session.options.on_error == "stop":
                        failed = failed or ended
                display.refresh(len(waiting))
                time.sleep(POLL_S)
        except BaseException:
            self._interrupt()
            raise
        if failed is not None:
            raise SweepStopped(f"job {failed.index} failed, and sweep.on_error is stop")

    def _start(self, job: Job) -> None:
        session, slot = self.session, self.free.pop(0)
        folder = session.folder / job.folder
        if folder.exists():  # what an earlier attempt left must not be taken for this one's
            shutil.rmtree(folder)
        job.status, job.started, job.device = RUNNING, datetime.now().astimezone().isoformat(timespec="seconds"), slot.name
        job.verdict = job.exit_code = job.seconds = job.error = job.objective = None
        session.save(job)
        words = ["run", *session.flags, *job.overrides, *self.hydra, _run_dir(str(folder))]
        self.running.append(_Running(job, JobProcess(job_command(words), folder / job.log, slot.variables), slot))
        session.display.started(job)

    def _ended(self, entry: _Running) -> Job | None:
        """The job, recorded, if it has ended or its time is up."""
        code = entry.process.poll()
        limit = self.session.options.timeout_s
        if code is None and (limit is None or entry.process.seconds < limit):
            return None
        if code is None:
            self._record(entry, entry.process.stop())
            entry.job.status, entry.job.error = TIMEOUT, f"ended after {limit:g} s (sweep.timeout_s)"
        else:
            self._record(entry, code)
        self._put_away(entry)
        return entry.job

    def _record(self, entry: _Running, code: int) -> None:
        entry.job.seconds = round(entry.process.seconds, 3)
        folder = self.session.folder / entry.job.folder
        outcome.conclude(entry.job, folder, code, killed_for_memory=entry.process.was_killed_for_memory())

    def _put_away(self, entry: _Running) -> None:
        self.running.remove(entry)
        self.free.append(entry.slot)
        self.session.save(entry.job)
        self.session.display.ended(entry.job)

    def _interrupt(self) -> None:
        """Ends what runs; all are asked before the first is waited for."""
        for entry in self.running:
            entry.process.ask_to_stop()
        for entry in list(self.running):
            self._record(entry, entry.process.stop())
            if entry.job.status != DONE:
                entry.job.status, entry.job.error = INTERRUPTED, "the sweep was stopped while it ran"
            self._put_away(entry)


def _run_dir(folder: str) -> str:
    from optforge.config.store import quoted

    return f"hydra.run.dir={quoted(folder)}"
