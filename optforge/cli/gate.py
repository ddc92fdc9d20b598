"""`optforge gate`: holds a run to limits against a stored baseline, or two versions against each other.

For a CI job: the exit code says whether a limit was missed, one line says which, and two files say it to the machines and
people that do not read logs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optforge import preflight
from optforge.errors import EXIT_OK, ConfigError, Problem

if TYPE_CHECKING:
    from optforge.gate.ab import Version
    from optforge.gate.judge import Judgement


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `gate` as Typer parsed them."""

    words: tuple[str, ...] = ()
    """Runs, or with `ab` the overrides of both sides."""
    baseline: Path | None = None
    limits: Path | None = None
    limit: tuple[str, ...] = ()
    update: bool = False
    strict: bool = False
    junit: Path | None = None
    markdown: Path | None = None
    ab: bool = False
    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    env_a: Path | None = None
    env_b: Path | None = None
    dir_a: Path | None = None
    dir_b: Path | None = None
    pairs: int | None = None


def gate_command(request: Request) -> int:
    """Runs the gate and returns the exit code: 0, or 3 where a limit was missed.

    Raises:
        UserError: something must be changed first.
    """
    _refuse(request)
    return _ab(request) if request.ab else _stored(request)


def _refuse(request: Request) -> None:
    """Options that do not go together, all at once."""
    sides: dict[str, object] = {"--a": request.a, "--b": request.b, "--env-a": request.env_a, "--env-b": request.env_b}
    sides |= {"--dir-a": request.dir_a, "--dir-b": request.dir_b, "--pairs": request.pairs}
    given = [name for name, value in sides.items() if value]
    problems = []
    if request.ab:
        for name, value in (("--baseline", request.baseline), ("--update", request.update)):
            if value:
                problems.append(Problem(where=name, what="has no meaning with --ab, whose baseline is side A", fix="leave it out"))
        if not [name for name in given if name != "--pairs"]:
            fix = "give --dir-a FOLDER, --env-a PYTHON, or --a recipe=NAME, and the same for b"
            problems.append(Problem(where="--ab", what="both sides are the same", fix=fix))
    else:
        problems += [Problem(where=name, what="is a side of --ab", fix="add --ab") for name in given]
        if not request.words:
            problems.append(Problem(where="optforge gate", what="needs a run to judge", fix="give the folder of a run, or its report.json"))
        if request.baseline is None:
            problems.append(Problem(where="--baseline", what="is needed", fix="give the baseline's file; --update writes it"))
    if problems:
        raise ConfigError(*problems)


# --- against a stored baseline -----------------------------------------------------------------------------------------


def _stored(request: Request) -> int:
    from optforge.gate import baseline, limits, stored
    from optforge.report import store

    assert request.baseline is not None
    rules = limits.Rules(limits=()) if request.update and not _has_limits(request) else limits.rules(request.limits, request.limit)
    runs = [store.read(Path(word).expanduser()) for word in request.words]
    if request.update:
        stored.check(runs, "run", require_target=rules.require_target)
        stored.alike(runs)
        baseline.write(request.baseline, runs)
        print(f"{request.baseline}: the baseline is {len(runs)} run{'s' if len(runs) != 1 else ''} from now on")
        return EXIT_OK
    judgement = stored.gate(runs, baseline.read(request.baseline), rules, strict=request.strict)
    return _tell(judgement, request)


def _has_limits(request: Request) -> bool:
    return request.limits is not None or bool(request.limit)


# --- two versions in one session ---------------------------------------------------------------------------------------


def _ab(request: Request) -> int:
    from optforge.gate import ab, limits

    rules = limits.rules(request.limits, request.limit)
    versions = _versions(request)
    pairs = ab.PAIRS if request.pairs is None else request.pairs
    if pairs < ab.LEAST_PAIRS:
        what = f"{pairs} is too few: the interval comes from how much pairs differ"
        raise ConfigError(Problem(where="--pairs", what=what, fix=f"give {ab.LEAST_PAIRS} or more"))
    folder = preflight.gate_folder(Path.cwd() / "outputs")
    for version in versions:
        _progress(f"{version.name.upper()}: {version.described}")
    measured = ab.measure(*versions, rules, pairs=pairs, folder=folder, tell=_progress)
    facts = {version.name.upper(): version.described for version in versions}
    judgement = ab.gate(measured, rules, strict=request.strict, facts={**facts, "folder": str(folder)})
    ab.write(folder, measured, judgement)
    return _tell(judgement, request)


def _versions(request: Request) -> tuple[Version, Version]:
    """Both sides, checked as far as this process can.

    Raises:
        ConfigError: with every problem at once.
    """
    from optforge.gate import ab

    problems: list[Problem] = []
    found = []
    sides = (("a", request.env_a, request.dir_a, request.a), ("b", request.env_b, request.dir_b, request.b))
    for name, env, folder, own in sides:
        python = _interpreter(env)
        cwd = (folder or Path()).expanduser().absolute()
        if env is not None and not python.is_file():
            problems.append(
                Problem(where=f"--env-{name}", what=f"there is no interpreter {env}", fix="give a python, or the folder of its environment")
            )
        if not cwd.is_dir():
            problems.append(
                Problem(where=f"--dir-{name}", what=f"there is no folder {folder}", fix="give a folder, such as a git worktree")
            )
        overrides = (*request.words, *own)
        found.append(ab.Version(name=name, python=python, cwd=cwd, overrides=overrides))
    if problems:
        raise ConfigError(*problems)
    return found[0], found[1]


def _interpreter(env: Path | None) -> Path:
    """The interpreter of a side; an environment's folder stands for its own. A link stays one: it tells the environment."""
    if env is None:
        return Path(sys.executable)
    path = env.expanduser().absolute()
    return path / "bin" / "python" if path.is_dir() else path


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- what is said ------------------------------------------------------------------------------------------------------


def _tell(judgement: Judgement, request: Request) -> int:
    from optforge.gate import documents

    for line in documents.lines(judgement):
        print(line)
    for path, text in ((request.junit, documents.junit), (request.markdown, documents.markdown)):
        if path is not None:
            preflight.write_text(path, text(judgement))
    return judgement.exit_code
