"""`optforge plan`: what a recipe would do on hardware that need not be there, printed and written as plan.json and plan.md.

Comma lists (`hardware=a100,h100`) need no `-m`: each combination is one plan, and a target that refuses the recipe is a
row with its reason. Nothing is written unless there is at least one plan.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from optforge import config, logs, preflight
from optforge.cli.run import Request
from optforge.errors import EXIT_OK, ConfigError, PlanError, Problem
from optforge.spec import Run

if TYPE_CHECKING:
    from optforge.plan.document import PlanFile, Study

PIPE_WIDTH = 160
"""Columns of the output where it is no terminal and COLUMNS does not say."""


def plan_command(request: Request, *, as_json: bool, kernels: bool) -> int:
    """Plans every combination that was asked for, prints it, writes its folder, and returns the exit code.

    Raises:
        ConfigError: a key or value is wrong, or a flag of Hydra's asks for something that only `run` does.
        PlanError: no combination can be planned; every reason at once.
        OutputError: the folder cannot be written.
    """
    from rich.console import Console

    from optforge.report.terminal import Progress

    cwd = Path.cwd()
    with Progress(Console(stderr=True)) as progress:
        runs = _runs(request, cwd)
        with progress.stage("load PyTorch"):
            import torch  # noqa: F401  the longest import of all, told by itself

            from optforge.plan.devices import measure_unknown
            from optforge.plan.study import plan_or_refusal
        for run in runs:
            measure_unknown(run.hardware, config.hardware, progress.note)
        with nullcontext() if request.debug else logs.quiet("torch", "transformers"):
            studies = [plan_or_refusal(run, kernels=kernels, xla=kernels, progress=progress) for run in runs]
    _refuse(studies)
    file = _file(request, studies)
    folder = _write(file, runs, studies)
    if as_json:
        print(json.dumps(file.describe(), indent=2, allow_nan=False))
    else:
        from optforge.report import plan_terminal

        narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
        plan_terminal.show(file, Console(width=None if narrow else PIPE_WIDTH), str(folder))
    return EXIT_OK


def _runs(request: Request, cwd: Path) -> list[Run]:
    """Every combination of the command's comma lists, each with its own command."""
    given = [word for word in request.argv if word not in ("-m", "--multirun")]
    arguments = replace(request, argv=("-m", *given)).parse(cwd)
    others = [flag for flag in arguments.hydra if flag != "-m"]
    if others:
        what = "does not go with plan, which runs nothing"
        raise ConfigError(Problem(where=others[0], what=what, fix="leave it out, or use optforge run"))
    runs = config.compose_all(arguments, cwd=cwd)
    commands = list(_commands(request, given, cwd))
    assert len(commands) == len(runs)
    return [replace(run, command=shlex.join(["optforge", "plan", *words])) for run, words in zip(runs, commands, strict=True)]


def _commands(request: Request, given: Sequence[str], cwd: Path) -> Iterator[list[str]]:
    """The words of each combination as they would be typed alone, in the order of `config.compose_all`."""
    first = [word for word in given if word.lstrip("+").startswith("recipe=")]
    words = [*first, *(word for word in given if word not in first)]
    named = [("--config", [str(request.config)])] if request.config is not None else []
    options = [*named, *(("--set", [text]) for text in request.set_)]
    options += [*(("--drop", [text]) for text in request.drop), *(("--add", [text]) for text in request.add)]
    choices = [[[one] for one in config.choices(word, cwd=cwd)] for word in words]
    for flag, texts in options:
        choices.append([[flag, one] for one in (config.choices(texts[0], cwd=cwd) if flag == "--set" else texts)])
    for combination in itertools.product(*choices):
        yield [word for part in combination for word in part]


def _refuse(studies: Sequence[Study]) -> None:
    """Raises every reason at once where no combination can be planned."""
    if any(not study.refused for study in studies):
        return
    found: dict[Problem, list[str]] = {}
    for study in studies:
        for item in study.refused:
            problem = Problem(where=item.where, what=item.what, fix=item.fix)
            found.setdefault(problem, []).append(f"recipe={study.recipe['name']} hardware={study.target['name']}")
    raise PlanError(
        *(
            problem if len(places) == len(studies) else replace(problem, where=f"{problem.where} [{places[0]}]")
            for problem, places in found.items()
        )
    )


def _file(request: Request, studies: list[Study]) -> PlanFile:
    from optforge import environment
    from optforge.plan.document import PlanFile

    made = datetime.now().astimezone().isoformat(timespec="seconds")
    return PlanFile(command=request.command, made=made, environment={"versions": environment.versions()}, plans=studies)


def _write(file: PlanFile, runs: Sequence[Run], studies: Sequence[Study]) -> Path:
    """Claims the folder and writes plan.json and plan.md into it."""
    from optforge import atomic
    from optforge.report import plan_markdown

    recipe, target = (",".join(dict.fromkeys(str(getattr(study, key)["name"]) for study in studies)) for key in ("recipe", "target"))
    folder = preflight.run_folder(Path(runs[0].output_dir) / "plans", recipe, target)
    atomic.write_bytes(folder / "plan.json", (json.dumps(file.describe(), indent=2, allow_nan=False) + "\n").encode("ascii"))
    atomic.write_bytes(folder / "plan.md", plan_markdown.render(file).encode("utf-8", "replace"))
    return folder
