"""`optforge run -m`: everything that is wrong with any job is told before the first starts; then Hydra's sweeper runs.

OptForge's own launcher is the default. Others (joblib, submitit, ray) run the same jobs in their own way: each job then
writes its own record, and the records are gathered here at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from optforge import config, environment, preflight, verdicts
from optforge.cli.job import Settings, hydra_main
from optforge.cli.run import value_of
from optforge.config import Arguments
from optforge.config.store import quoted
from optforge.errors import EXIT_LIMIT, EXIT_OK, ConfigError, Problem
from optforge.spec import Json, Run, SweepOptions
from optforge.sweep import definition, devices, display, outcome, session, store
from optforge.sweep.session import Session, SweepStopped, key_of, new_job, of_the_jobs
from optforge.sweep.store import Definition, Job, Sweep

RESUME, LAUNCHER, SUBDIR = "sweep.resume", "hydra/launcher", "hydra.sweep.subdir"
OWN = "optforge"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A sweep as it was typed, checked."""

    arguments: Arguments
    runs: list[Run]
    cwd: Path
    search: bool
    own: bool
    """OptForge's launcher runs it."""

    @property
    def options(self) -> SweepOptions:
        return self.runs[0].sweep

    @cached_property
    def definitions(self) -> list[dict[str, Json]]:
        """What makes each job the same job, for resume."""
        return definition.of_all(self.runs)


def sweep_command(arguments: Arguments, settings: Settings, quiet: Sequence[str]) -> int:
    """Runs the sweep and returns the exit code.

    Args:
        quiet: overrides that keep Hydra's own logging out.

    Raises:
        ConfigError: with every problem of every job.
        KeyboardInterrupt, SystemExit: after the running jobs were ended and the table was printed.
    """
    asked = _checked(arguments, settings.cwd)
    slots = devices.slots(asked.options.devices)
    folder, sweep = _resumed(asked) if asked.options.resume else _new(asked)
    shown = display.Display(sweep, folder, slots=len(slots))
    held = Session(
        folder=folder,
        sweep=sweep,
        options=asked.options,
        display=shown,
        slots=slots,
        flags=_flags(asked.arguments, settings),
        varied=_varied(asked.arguments),
    )
    words = [*asked.arguments.hydra, *quiet, *_without_resume(asked.arguments.overrides), f"hydra.sweep.dir={quoted(str(folder))}"]
    with session.opened(held):
        if asked.options.resume:
            _keep_finished(held, asked)
        try:
            with shown:
                hydra_main(words, settings)
        except SweepStopped as stopped:
            shown.console.print(str(stopped))
        finally:
            if not asked.own:
                _gather(held, expected=None if asked.search else len(asked.runs))
            held.finish()
            display.print_table(sweep, folder)
    return outcome.exit_code(sweep.jobs)


# --- what was asked ----------------------------------------------------------------------------------------------------


def _checked(arguments: Arguments, cwd: Path) -> Asked:
    """Every job composed and checked, and the sweep's own keys.

    Raises:
        ConfigError
    """
    arguments = _with_stored(arguments, cwd)
    runs = config.compose_all(arguments, cwd)
    asked = Asked(
        arguments=arguments,
        runs=runs,
        cwd=cwd,
        search=config.searches(arguments),
        own=value_of(arguments.overrides, LAUNCHER) in (None, OWN),
    )
    problems = list(_problems(asked))
    if problems:
        raise ConfigError(*problems)
    return asked


def _problems(asked: Asked) -> list[Problem]:
    keys = [key_of(text) for text in asked.arguments.overrides]
    found = []
    if any(run.sweep != asked.options for run in asked.runs):
        found.append(Problem(where="sweep", what="is the same for all jobs of a sweep", fix="give one value"))
    if not asked.own:
        fix = "leave it out; the launcher has settings of its own under hydra.launcher"
        found += [Problem(where=key, what="is read by OptForge's own launcher alone", fix=fix) for key in keys if key.startswith("sweep.")]
    elif SUBDIR in keys:
        fix = "leave it out; hydra.sweep.dir=<folder> names the sweep's folder"
        found.append(Problem(where=SUBDIR, what="job folders are named after their number and what sets them apart", fix=fix))
    if asked.search and asked.options.resume:
        fix = "give the sweeper a storage instead: hydra.sweeper.storage=sqlite:///study.db hydra.sweeper.study_name=NAME"
        found.append(Problem(where=RESUME, what="a search chooses its jobs while it runs, so none can be taken over", fix=fix))
    if asked.options.resume and preflight.SWEEP_OVERRIDE in keys:
        found.append(Problem(where=preflight.SWEEP_OVERRIDE, what=f"is what {RESUME} names", fix="leave it out"))
    return found


def _with_stored(arguments: Arguments, cwd: Path) -> Arguments:
    """`-m sweep.resume=DIR` without other overrides means the jobs that the sweep in DIR had."""
    resume = value_of(arguments.overrides, RESUME)
    if resume is None or of_the_jobs(arguments.overrides):
        return arguments
    stored = store.read(cwd / Path(resume).expanduser()).definition.overrides
    parsed = config.parse(["-m", *stored], cwd=cwd)
    given = {key_of(text) for text in arguments.overrides}
    kept = [text for text in parsed.overrides if key_of(text) not in given]
    return replace(arguments, overrides=(*kept, *arguments.overrides))


def _without_resume(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if key_of(text) not in (RESUME, preflight.SWEEP_OVERRIDE)]


def _flags(arguments: Arguments, settings: Settings) -> list[str]:
    """The options of the command line that each job gets too."""
    flags = [name for name, given in (("--debug", settings.debug), ("--verbose", settings.verbose)) if given]
    return flags + (["--config-dir", str(arguments.config_dir)] if arguments.config_dir else [])


def _varied(arguments: Arguments) -> frozenset[str]:
    """The keys whose values differ between jobs; of a search, all that it may vary."""
    fixed = set(arguments.overrides)
    return frozenset(key_of(text) for overrides, _ in config.jobs_of(arguments) for text in overrides if text not in fixed)


# --- its folder and its records ----------------------------------------------------------------------------------------


def _new(asked: Asked) -> tuple[Path, Sweep]:
    """A folder of its own, and the records of jobs that all wait."""
    named = value_of(asked.arguments.overrides, preflight.SWEEP_OVERRIDE)
    if named is None:
        folder = preflight.sweep_folder(Path(asked.runs[0].output_dir))
    else:
        folder = preflight.claim(asked.cwd / named, preflight.SWEEP_OVERRIDE)
        if store.is_sweep(folder):
            fix = f"type {RESUME}={named} to go on with it, or name another folder"
            raise ConfigError(Problem(where=preflight.SWEEP_OVERRIDE, what=f"{folder} holds a sweep already", fix=fix))
    sweep = Sweep(definition=_definition(asked), jobs=[] if asked.search or not asked.own else _jobs(asked))
    store.write(sweep, folder)
    if not asked.search:
        definition.write(folder, asked.definitions)
    return folder.absolute(), sweep


def _definition(asked: Asked) -> Definition:
    ours = [text for text in asked.arguments.overrides if not key_of(text).startswith("sweep.")]
    return Definition(
        overrides=[text for text in ours if key_of(text) != preflight.SWEEP_OVERRIDE],
        recipes=list(dict.fromkeys(run.recipe.name for run in asked.runs)),
        hardware=list(dict.fromkeys(run.hardware.name for run in asked.runs)),
        versions=environment.versions(),
    )


def _jobs(asked: Asked) -> list[Job]:
    varied = _varied(asked.arguments)
    return [new_job(index, of_the_jobs(overrides), varied) for index, (overrides, _) in enumerate(config.jobs_of(asked.arguments))]


def _resumed(asked: Asked) -> tuple[Path, Sweep]:
    """The folder and the records of the sweep to go on with.

    Raises:
        UserError: there is no sweep, or it is one of other jobs.
    """
    folder = preflight.claim((asked.cwd / Path(str(asked.options.resume)).expanduser()).absolute(), RESUME)
    sweep = store.read(folder)
    definition.require_same(folder, asked.definitions)
    sweep.definition = _definition(asked)
    return folder, sweep


def _keep_finished(held: Session, asked: Asked) -> None:
    """Sorts the jobs of an earlier run of this sweep: what still counts is kept, the rest waits again, and why is said."""
    before, now = definition.read(held.folder), asked.definitions
    for job in held.sweep.jobs:
        report = definition.finished(held.folder / job.folder)
        why = definition.stale(report, before[job.index], now[job.index])
        if report is not None and why is None:
            if job.status != store.DONE:  # the sweep was killed between the job's report and its record
                code = EXIT_LIMIT if verdicts.failures(report, asked.runs[job.index]) else EXIT_OK
                outcome.conclude(job, held.folder / job.folder, code)
            held.keep.add(job.index)
            continue
        if job.status == store.DONE:
            held.display.console.print(f"job {job.index} runs again: {why}", highlight=False, markup=False)
        held.sweep.jobs[job.index] = new_job(job.index, job.overrides, held.varied)
    definition.write(held.folder, now)
    store.write(held.sweep, held.folder)


def _gather(held: Session, expected: int | None) -> None:
    """The records that the jobs of a foreign launcher have written; one that left none has failed."""
    found = {job.index: job for job in (store.read_status(path.parent) for path in sorted(held.folder.glob(f"*/{store.STATUS_FILE}")))}
    for index in range(max([expected or 0, *(number + 1 for number in found)])):
        missing = Job(index=index, name="job", overrides=[], folder="", status=store.FAILED, error="the launcher brought no result")
        held.sweep.jobs.append(found.get(index, missing))
