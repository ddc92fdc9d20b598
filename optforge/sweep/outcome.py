"""How a job ended, from the two things that can be trusted: the end of its process, and the report that it left."""

from __future__ import annotations

from pathlib import Path

from optforge import processes
from optforge.errors import EXIT_LIMIT, EXIT_OK, EXIT_USER
from optforge.spec import Report
from optforge.sweep.definition import finished
from optforge.sweep.store import DONE, FAILED, OOM, Job

TAIL_LINES = 12
"""Lines of a job's own output that are shown with its failure."""


def conclude(job: Job, folder: Path, code: int, *, killed_for_memory: bool = False) -> None:
    """Fills in how `job` ended.

    Args:
        folder: the job's own.
        code: of its process, negative for a signal.
        killed_for_memory: the system ended it to get memory back.
    """
    report = finished(folder)
    job.exit_code = code
    job.verdict = report.verdict if report is not None else None
    job.objective = objective(report)
    if report is not None and report.status == "complete" and code in (EXIT_OK, EXIT_LIMIT):
        job.status = DONE
    elif killed_for_memory or (report is not None and report.status == "oom"):
        job.status = OOM
        job.error = _reason(report) if report is not None and report.status == "oom" else "the system killed it when memory ran out"
    else:
        job.status = FAILED
        job.error = (_reason(report) if code >= 0 else None) or complaint(folder / job.log, code)


def objective(report: Report | None) -> float | None:
    """What a searching sweeper minimizes: the goal's figure relative to the compiled (else the eager) baseline.

    None for a job that failed, was not measured, or missed a limit of quality: it is no candidate.
    """
    if report is None or report.status != "complete" or report.verdict == "failed_quality":
        return None
    ratio = report.speedup.get("vs_compiled_baseline") or report.speedup.get("vs_baseline")
    return 1.0 / ratio.value if ratio is not None and ratio.value > 0 else None


def exit_code(jobs: list[Job]) -> int:
    """Of a whole sweep: the first of 1 (a job crashed), 2 (something to change), 3 (a limit was missed) that any job has."""
    codes = {_code(job) for job in jobs}
    return next((code for code in (1, EXIT_USER, EXIT_LIMIT) if code in codes), EXIT_OK)


def _code(job: Job) -> int:
    if job.status == DONE:
        return job.exit_code or EXIT_OK
    return EXIT_USER if job.status == FAILED and job.exit_code == EXIT_USER else 1


def _reason(report: Report | None) -> str | None:
    """What the report says of its own failure, in one line."""
    if report is None or report.error is None:
        return None
    message = str(report.error.get("message") or "").strip()
    first = message.splitlines()[0] if message else "no message"
    return f"{report.error.get('type')}: {first}"


def complaint(log: Path, code: int) -> str:
    """Why a process ended that left no report: the signal that killed it, else its last `error: ...` line, else its last line."""
    if code < 0:
        return f"the process {processes.ending(code)}"
    lines = processes.tail(log, TAIL_LINES)
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"the process {processes.ending(code)} and left no result"])[-1]
