"""The Hydra application inside the command line: one call of `_job` is one run, alone or as part of a sweep.

Hydra composes, makes the folder and decides how often to call. A job never lets an exception out to Hydra, which would
end the sweep with it and print its own trace: it is told on stderr, written to the job's log and report, and counted.
Under a launcher that is not OptForge's the job may be in another process, or on another machine: it writes its record
itself.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from optforge import config, logs, preflight
from optforge.cli.failures import tell
from optforge.errors import EXIT_CRASH, EXIT_OK, ConfigError, OutputError, Problem, Terminated, message
from optforge.spec import Report, Run

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from optforge.plan.make import Plan


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the jobs of one command share."""

    command: str
    cwd: Path
    debug: bool = False
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one job ended."""

    folder: Path
    code: int
    verdict: str


def hydra_main(argv: Sequence[str], settings: Settings) -> list[Outcome]:
    """Runs Hydra's own application over `argv` and returns how each job ended; empty when Hydra ran none (`--cfg`).

    Raises:
        ConfigError: Hydra refuses the arguments.
        OutputError: Hydra cannot make a job's folder.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    outcomes: list[Outcome] = []

    def _job(cfg: DictConfig) -> float:
        started, clock = datetime.now().astimezone(), time.monotonic()
        outcomes.append(run_job(cfg, settings))
        return record_job(outcomes[-1], started=started, seconds=time.monotonic() - clock)

    application = hydra.main(version_base="1.3", config_path=config.CONFIG_PATH, config_name="config")(_job)
    with _hydras_argv(argv):
        try:
            application()
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(Problem(where="hydra", what=" ".join(str(error).split()))) from error
        except OSError as error:
            raise OutputError(
                Problem(where=str(error.filename or ""), what=error.strerror or str(error), fix="give hydra.run.dir=<folder>")
            ) from error
    return outcomes


def run_job(cfg: DictConfig, settings: Settings) -> Outcome:
    """One run in the folder that Hydra made for it."""
    from hydra.core.hydra_config import HydraConfig

    folder = Path(HydraConfig.get().runtime.output_dir)
    logfile = folder / "optforge.log"
    with logs.to_file(logfile, verbose=settings.verbose):
        try:
            run = config.run_from_cfg(cfg, cwd=settings.cwd, command=settings.command)
            report, code = _execute(run, folder)
            return Outcome(folder=folder, code=code, verdict=report.verdict)
        except Terminated:
            raise
        except (Exception, SystemExit) as error:  # told, logged and counted; the next job of a sweep must run
            code = tell(error, debug=settings.debug, logfile=logfile)
            return Outcome(folder=folder, code=code, verdict="failed")


def record_job(ended: Outcome, *, started: datetime, seconds: float) -> float:
    """Writes the record of a job that Hydra runs as part of a sweep, and returns what a sweeper may minimize."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from optforge.sweep import outcome, store

    hydra = HydraConfig.get()
    job = store.Job(
        index=hydra.job.num if hydra.mode == RunMode.MULTIRUN else 0,
        name=ended.folder.name.partition("_")[2],
        overrides=[str(text) for text in hydra.overrides.task],
        folder=ended.folder.name,
        log="optforge.log",
        started=started.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
    )
    outcome.conclude(job, ended.folder, ended.code)
    if hydra.mode == RunMode.MULTIRUN:
        store.write_status(job, ended.folder.parent)
    return math.inf if job.objective is None else job.objective


def _execute(run: Run, folder: Path) -> tuple[Report, int]:
    """Plan, run, print; the folder then holds the resolved run and the report."""
    from rich.console import Console

    from optforge import engine
    from optforge.report import terminal

    (folder / "run.yaml").write_text(config.to_yaml(run), encoding="utf-8")
    out, err = Console(), Console(stderr=True)
    with logs.adopted("torch", "transformers"), preflight.compiler_cache(folder) as moved:
        try:
            plan = engine.plan(run)
        except (Exception, SystemExit) as error:
            _write_failure(run, folder, error)
            raise
        if plan.compile is not None:
            plan.warnings.extend(moved)
        terminal.print_plan(plan.describe(), out)
        _write_plan(plan, folder)
        with terminal.Progress(err) as progress:
            report = engine.execute(plan, folder=folder, progress=progress)
    terminal.print_report(report, out)
    return report, engine.exit_code(report, run)


def _write_plan(plan: Plan, folder: Path) -> None:
    """plan.md and environment.json: what was about to run, and on what, whatever becomes of the run."""
    from rich.console import Console

    from optforge import environment
    from optforge.report import terminal

    text = io.StringIO()
    terminal.print_plan(plan.describe(), Console(file=text, width=140))
    (folder / "plan.md").write_text(f"# Plan\n\n```text\n{text.getvalue()}```\n", encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(environment.collect(plan.backend), indent=2) + "\n", encoding="utf-8")


def _write_failure(run: Run, folder: Path, error: BaseException) -> None:
    """A report of a run that ended before it had a plan, so that every folder says what became of it."""
    from optforge.report import store

    report = Report(
        status="failed",
        verdict="failed",
        reason=message(error).splitlines()[0] if message(error) else type(error).__name__,
        recipe={"name": run.recipe.name, "description": run.recipe.description, "goal": run.recipe.goal, "source": run.recipe.source},
        target={"name": run.hardware.name},
        model={"name": run.model.name},
        workload={"name": run.workload.name},
        command=run.command,
        error={"type": type(error).__name__, "message": message(error)},
        folder=str(folder),
    )
    store.write(report, folder)


@contextmanager
def _hydras_argv(argv: Sequence[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and lets exceptions out instead of ending the process only under HYDRA_FULL_ERROR."""
    saved_argv, saved_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["optforge run", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = saved_argv
        if saved_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = saved_error


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """The code of a command from those of its jobs: the first of 1 (crashed), 2, 3 that any of them has, else 0."""
    codes = {outcome.code for outcome in outcomes}
    return next((code for code in (EXIT_CRASH, 2, 3) if code in codes), max(codes, default=EXIT_OK))
