"""`optforge tune`: everything that is wrong is told before the first job; then the search runs, and its best is kept.

Exit codes: 0 a recipe was found; 1 nothing was measured; 2 something to change; 3 no recipe meets the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optforge import config, environment, preflight
from optforge import recipe as recipes
from optforge.errors import EXIT_CRASH, EXIT_LIMIT, EXIT_OK, ConfigError, PlanError, Problem, UserError
from optforge.measure.limits import flat
from optforge.spec import Json, Run
from optforge.sweep import definition, display, session, store
from optforge.sweep.session import Session
from optforge.sweep.store import Definition, Job, Sweep
from optforge.tune import options, record, sampling
from optforge.tune.candidate import HAND_WRITTEN, MISSED, REFUSED, Candidate
from optforge.tune.options import Words
from optforge.tune.search import Search


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `tune` as Typer parsed them."""

    argv: tuple[str, ...] = ()
    debug: bool = False
    command: str = ""


def tune_command(request: Request) -> int:
    """Searches, prints what was found, and returns the exit code.

    Raises:
        ConfigError: a key or value is wrong, or a resume is one of another search.
        PlanError: the plan refuses every recipe.
        KeyboardInterrupt, SystemExit: after the best so far was written and printed.
    """
    cwd = Path.cwd()
    words = _with_target(options.read(request.argv, cwd=cwd))
    sampling.require(words.options)
    candidates = _written(words, cwd)
    run = _composed(candidates, words, cwd)
    options.refuse_contradictions(words, quality_enabled=run.quality.enabled)
    about = {"model": run.model.name, "workload": run.workload.name, "hardware": run.hardware.name}
    folder, sweep, kept = _folder(run, words, cwd)
    shown = display.Display(sweep, folder)
    held = Session(folder=folder, sweep=sweep, options=run.sweep, display=shown, flags=["--debug"] if request.debug else [])
    search = Search(
        session=held,
        options=words.options,
        limits=words.limits,
        base=words.base,
        cwd=cwd,
        measure=run.measure,
        candidates=candidates,
        kept=kept,
        changed=lambda search: record.write(search, folder, command=request.command, about=about),
    )
    with session.opened(held):
        try:
            with shown:
                search.run()
        except BaseException:
            search.ended = search.ended or "it was stopped"
            raise
        finally:
            record.write(search, folder, command=request.command, about=about)
            if any(job.ended for job in sweep.jobs):
                record.show(search, folder)
    return _code(search)


def final_command(folder: Path) -> int:
    """`optforge tune-final FOLDER`, the process of the final round."""
    from optforge.tune import final

    final.measure(folder)
    return EXIT_OK


def _code(search: Search) -> int:
    """
    Raises:
        PlanError: nothing could be planned; every reason at once.
    """
    if search.best() is not None:
        return EXIT_OK
    if all(one.state == REFUSED for one in search.candidates):
        found = {(each.where, each.what): each for one in search.candidates for each in one.foreseen.refused}
        raise PlanError(*(Problem(where=each.where, what=each.what, fix=each.fix) for each in found.values()))
    return EXIT_LIMIT if any(one.state == MISSED for one in search.everyone) else EXIT_CRASH


# --- what was asked ----------------------------------------------------------------------------------------------------


def _with_target(words: Words) -> Words:
    """A search on a stand-in finds the fastest recipe for the stand-in, so it has to be asked for."""
    if any(word.lstrip("+").startswith("require_target=") for word in words.base):
        return words
    return replace(words, base=(*words.base, "require_target=true"))


def _written(words: Words, cwd: Path) -> list[Candidate]:
    """The recipes to start from: those that were named, else every one that can be named. One without steps is the baseline
    of every run, and no candidate.

    Raises:
        ConfigError: a named recipe is wrong; of those that were only found, a wrong one is left to the plan to refuse.
    """
    shipped = config.recipes_dir()
    names = list(dict.fromkeys(words.recipes or recipes.known(cwd, shipped)))
    found: list[Candidate] = []
    problems: list[Problem] = []
    for name in names:
        try:
            loaded = recipes.load(recipes.find(name, cwd=cwd, shipped=shipped), cwd=cwd, shipped=shipped)
        except UserError as error:
            problems += error.problems
            continue
        if loaded.steps:
            found.append(_candidate(loaded, words, {one.name for one in found}))
    if problems:
        raise ConfigError(*problems)
    if not found:
        fix = "name recipes that have steps: recipe=NAME,NAME"
        raise ConfigError(Problem(where="recipe", what="there is no recipe with steps to start from", fix=fix))
    return found


def _candidate(loaded: recipes.RecipeFile, words: Words, taken: set[str]) -> Candidate:
    name = loaded.name if loaded.name not in taken else f"{loaded.name}-{len(taken)}"
    limits = dict(words.limits.quality) or flat(loaded.limits)
    return Candidate(name=name, origin=HAND_WRITTEN, steps=loaded.steps, limits=limits, source=loaded.source)


def _composed(candidates: Sequence[Candidate], words: Words, cwd: Path) -> Run:
    """The run of the first candidate: its keys besides the recipe are those of all.

    Raises:
        ConfigError
    """
    return config.compose(config.parse([f"recipe={candidates[0].source}", *words.base], cwd=cwd), cwd=cwd)


# --- its folder --------------------------------------------------------------------------------------------------------


def _folder(run: Run, words: Words, cwd: Path) -> tuple[Path, Sweep, dict[tuple[str, int], Job]]:
    """A new folder, or that of the search to go on with and its finished jobs."""
    own = _definition(run)
    if words.options.resume is not None:
        folder = (cwd / Path(words.options.resume).expanduser()).absolute()
        kept = _kept(folder, own)
        return folder, store.read(folder), kept
    folder = preflight.tune_folder(Path(run.output_dir)).absolute()
    versions = environment.versions()
    sweep = Sweep(definition=Definition(overrides=list(words.base), hardware=[run.hardware.name], versions=versions))
    store.write(sweep, folder)
    definition.write(folder, [own])
    return folder, sweep, {}


def _definition(run: Run) -> dict[str, Json]:
    """What all candidates share; the recipes are told apart by their own keys."""
    found = definition.of(run)
    return {**found, "resolved": {key: value for key, value in found["resolved"].items() if key != "recipe"}}


def _kept(folder: Path, own: dict[str, Json]) -> dict[tuple[str, int], Job]:
    """Jobs of an earlier search whose results still count.

    Raises:
        UserError: there is no search in the folder, or it is one for something else.
    """
    before = record.earlier(folder)
    try:
        definition.require_same(folder, [own])
    except ConfigError as error:
        raise ConfigError(*(replace(problem, where="tune.resume") for problem in error.problems)) from error
    made_of = definition.read(folder)[0]
    jobs = {job.index: job for job in store.read(folder).jobs}
    kept: dict[tuple[str, int], Job] = {}
    for one in before:
        for result in one.results:
            job = jobs.get(result.job)
            report = definition.finished(folder / job.folder) if job is not None else None
            if job is not None and job.status == store.DONE and definition.stale(report, made_of, own) is None:
                kept[one.key, result.rung] = job
    return kept
