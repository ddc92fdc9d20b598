"""From what was typed to the runs it means: folders of runs and sweeps, report files, and names of recipes.

A run that left no report (its process was killed, it ran out of time) is still a run: it gets a place among the failures,
with what the sweep knows of it. Nothing that was asked for disappears without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optforge import config
from optforge import recipe as recipes
from optforge.errors import ConfigError, Problem, UserError, near
from optforge.preflight import slug
from optforge.report import figures, store
from optforge.spec import Report
from optforge.sweep import store as sweeps

REPORT_FILE = "report.json"
UNENDED = (sweeps.WAITING, sweeps.RUNNING, sweeps.NOT_STARTED, sweeps.INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run: its report, where that lies, and how a sweep varied it."""

    report: Report
    path: str
    overrides: tuple[str, ...] = ()
    reason: str = ""
    """Why it brought no figures, where that is so."""

    @property
    def finished(self) -> bool:
        """Whether it was measured to the end. A missed quality limit or a regression is a finished run."""
        return not _why(self.report)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Every run that was asked for, once each, in the order of the request, and what was chosen on the way."""

    entries: list[Entry]
    notes: list[str]


def load(arguments: Sequence[str], *, cwd: Path, outputs: str = "outputs") -> Loaded:
    """The runs that `arguments` mean.

    Args:
        arguments: each a run's folder, a sweep's folder, a folder that holds some of them, a report file, or the name of
            a recipe whose finished runs lie under `outputs`.
        cwd: what relative paths are relative to.
        outputs: folder of the runs that a recipe's name stands for.

    Raises:
        ConfigError: an argument means nothing that can be compared; every such argument at once.
        UserError: a report cannot be read.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    entries: dict[str, Entry] = {}
    for argument in arguments:
        try:
            found = _one(argument, cwd, cwd / outputs, notes)
        except UserError as error:
            problems.extend(error.problems)
            continue
        for entry in found:
            entries.setdefault(str((cwd / entry.path).resolve()), entry)
    if problems:
        raise ConfigError(*problems)
    return Loaded(entries=list(entries.values()), notes=notes)


def _one(argument: str, cwd: Path, outputs: Path, notes: list[str]) -> list[Entry]:
    path = cwd / Path(argument).expanduser()
    if path.is_dir():
        return _folder(path, argument, cwd)
    if path.is_file() and path.suffix == ".json":
        return _sweep(path.parent, cwd) if path.name == sweeps.SWEEP_FILE else [_report(path, cwd)]
    return _newest(argument, _recipe_name(argument, cwd), cwd, outputs, notes)


def _folder(path: Path, argument: str, cwd: Path) -> list[Entry]:
    """A sweep, a run, or whatever sweeps and runs lie below a folder that is neither."""
    found = list(_below(path, cwd))
    if not found:
        what, fix = "holds no run and no sweep", "give the folder of a run, a sweep, or a report.json"
        raise ConfigError(Problem(where=argument, what=what, fix=fix))
    return found


def _below(path: Path, cwd: Path) -> Iterator[Entry]:
    if sweeps.is_sweep(path):
        yield from _sweep(path, cwd)
    elif (path / REPORT_FILE).is_file():
        yield _report(path / REPORT_FILE, cwd)
    else:
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.is_symlink():
                yield from _below(child, cwd)


def _report(path: Path, cwd: Path) -> Entry:
    report = store.read(path)
    return Entry(report=report, path=_shown(path.parent if path.name == REPORT_FILE else path, cwd), reason=_why(report))


def _why(report: Report) -> str:
    """Why a report has no figures of the optimized model; empty where it has them."""
    if report.status == "complete":
        timed = report.optimized is not None and figures.exists(report.optimized.latency_ms.get("p50"))
        return "" if timed else "no time was measured"
    return report.reason or {"incomplete": "the run is not finished"}.get(report.status, report.status)


def _shown(path: Path, cwd: Path) -> str:
    """A path as a reader types it: relative to the current folder where it lies below it."""
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def _sweep(folder: Path, cwd: Path) -> list[Entry]:
    """Every job of a sweep, those without a report too."""
    return [_job(folder, job, cwd) for job in sweeps.read(folder).jobs]


def _job(folder: Path, job: sweeps.Job, cwd: Path) -> Entry:
    place, overrides = folder / job.folder, tuple(job.overrides)
    failed = job.error or job.status
    if (place / REPORT_FILE).is_file():
        try:
            found = _report(place / REPORT_FILE, cwd)
        except UserError as error:  # half of a report is a failed job of this sweep, and no reason to hide the other jobs
            failed = "; ".join(problem.what for problem in error.problems)
        else:
            return Entry(report=found.report, path=found.path, overrides=overrides, reason=found.reason and failed)
    return Entry(report=_unreported(job, failed), path=_shown(place, cwd), overrides=overrides, reason=failed)


def _unreported(job: sweeps.Job, reason: str) -> Report:
    """What is known of a job that left no report: what it was asked to do, and how it ended."""
    asked = dict(text.lstrip("+").split("=", 1) for text in job.overrides if "=" in text)
    status = "oom" if job.status == sweeps.OOM else "incomplete" if job.status in UNENDED else "failed"
    return Report(
        status=status,
        verdict=status,
        reason=reason,
        recipe={"name": asked.get("recipe", job.name)},
        target={"name": asked.get("hardware")},
        model={"name": asked.get("model")},
        workload={"name": asked.get("workload")},
    )


def _recipe_name(argument: str, cwd: Path) -> str:
    """The name of a recipe from its name or its file."""
    if recipes.is_path(argument) and (cwd / Path(argument).expanduser()).is_file():
        return recipes.load(cwd / Path(argument).expanduser(), cwd=cwd, shipped=config.recipes_dir()).name
    return argument


def _newest(argument: str, name: str, cwd: Path, outputs: Path, notes: list[str]) -> list[Entry]:
    """The newest finished run of a recipe for each hardware, model and workload under `outputs`."""
    folder = outputs / slug(name)
    runs = [_report(path, cwd) for path in sorted(folder.glob(f"*/*/{REPORT_FILE}"))]
    newest: dict[tuple[str, ...], Entry] = {}
    for entry in sorted((run for run in runs if run.finished), key=lambda run: (run.report.started, run.path)):
        report = entry.report
        asked = (report.target, report.model.get("name"), report.model.get("digest"), report.workload)
        newest[tuple(map(str, asked))] = entry
    if not newest:
        raise ConfigError(_nothing(argument, name, runs, cwd, outputs))
    notes.extend(f"recipe {name}: took {entry.path}" for entry in newest.values())
    if len(runs) > len(newest):
        notes.append(f"recipe {name}: left out {len(runs) - len(newest)} older or unfinished runs under {_shown(folder, cwd)}")
    return list(newest.values())


def _nothing(argument: str, name: str, runs: list[Entry], cwd: Path, outputs: Path) -> Problem:
    """Why a name brought no run, and what to type."""
    known = recipes.known(cwd, config.recipes_dir())
    shown = _shown(outputs / slug(name), cwd)
    if runs:
        what = f"none of the {len(runs)} runs under {shown} is finished ({runs[-1].reason})"
        return Problem(where=argument, what=what, fix=f"type optforge run recipe={argument} hardware=NAME")
    if name in known:
        return Problem(
            where=argument, what=f"the recipe has no run under {shown}", fix=f"type optforge run recipe={argument} hardware=NAME"
        )
    ran = [path.name for path in outputs.iterdir() if path.is_dir()] if outputs.is_dir() else []
    fix = near(argument, {*known, *ran}) or "give a run's folder, a sweep's folder, a report.json, or the name of a recipe"
    return Problem(where=argument, what="is no folder, no report and no recipe", fix=fix)
