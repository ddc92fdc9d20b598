"""`optforge sensitivity`: which layers bear being rounded, and the `ignore` list to paste; as table, files and a page."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optforge import config, logs, preflight
from optforge.cli.run import Request
from optforge.errors import EXIT_OK, ConfigError, Problem
from optforge.spec import Run

if TYPE_CHECKING:
    from optforge.sensitivity.findings import Sensitivity
    from optforge.sensitivity.measure import Options

PIPE_WIDTH = 140
"""Columns of the output where it is no terminal and COLUMNS does not say."""
BASELINE = "recipe=baseline"
FILES = ("sensitivity.json", "sensitivity.csv", "sensitivity.md", "sensitivity.html")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The command's own options; None takes the default of `sensitivity.measure.Options`."""

    schemes: str | None = None
    samples: int | None = None
    tokens: int | None = None
    check: int | None = None
    as_json: bool = False


def sensitivity_command(request: Request, wanted: Wanted) -> int:
    """Measures, prints, writes the folder, and returns the exit code.

    Raises:
        ConfigError: random weights or data, or a wrong option; before any weight is loaded.
        UserError: the recipe's own steps, or rounding itself, refuse the model.
    """
    from rich.console import Console

    from optforge.report.terminal import Progress

    cwd = Path.cwd()
    run = replace(_run(request, cwd), command=request.command)
    with Progress(Console(stderr=True)) as progress:
        with progress.stage("load PyTorch"):
            import torch  # noqa: F401  the longest import of all, told by itself
        with nullcontext() if request.debug else logs.quiet("torch", "transformers"):
            from optforge import engine, environment
            from optforge.sensitivity import measure

            options = _options(wanted)
            measure.require(run, options)
            plan = engine.plan(run)
            folder = preflight.run_folder(Path(run.output_dir) / "sensitivity", run.model.name, run.hardware.name)
            found = measure.measure(plan, options, progress)
            found.environment = environment.collect(plan.backend)
    _write(found, folder)
    _show(found, folder, cwd, as_json=wanted.as_json)
    return EXIT_OK


def _run(request: Request, cwd: Path) -> Run:
    """The run that the overrides describe; without a recipe that of the model as it is.

    Raises:
        ConfigError
    """
    named = request.config is not None or any(word.lstrip("+").startswith("recipe=") for word in request.argv)
    arguments = (request if named else replace(request, argv=(BASELINE, *request.argv))).parse(cwd)
    if arguments.multirun or arguments.hydra:
        what = "does not go with sensitivity, which looks at one model"
        raise ConfigError(Problem(where=(arguments.hydra or ["-m"])[0], what=what, fix="leave it out"))
    return config.compose(arguments, cwd=cwd)


def _options(wanted: Wanted) -> Options:
    from optforge.sensitivity.measure import Options

    default = Options()
    names = default.schemes
    if wanted.schemes is not None:
        names = tuple(dict.fromkeys(name.strip() for name in wanted.schemes.split(",") if name.strip()))
    return Options(
        schemes=names,
        samples=default.samples if wanted.samples is None else wanted.samples,
        sample_tokens=default.sample_tokens if wanted.tokens is None else wanted.tokens,
        check=default.check if wanted.check is None else wanted.check,
    )


def _write(found: Sensitivity, folder: Path) -> None:
    from optforge.sensitivity import page, record

    for name, text in zip(FILES, (record.to_json, record.to_csv, record.to_markdown, page.render), strict=True):
        preflight.write_text(folder / name, text(found))


def _show(found: Sensitivity, folder: Path, cwd: Path, *, as_json: bool) -> None:
    from optforge.sensitivity import record, terminal

    if as_json:
        sys.stdout.write(record.to_json(found))
        return
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    shown = folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder
    terminal.show(found, Console(width=None if known else PIPE_WIDTH), str(shown))
