"""`optforge compare`: runs side by side, in the terminal, in files, and on a page with plots.

Nothing is run and no torch is loaded: the reports say everything. The page is always written, since a table is not where
one sees which of a hundred runs to keep.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from optforge import preflight
from optforge.errors import EXIT_OK, ConfigError, Problem

if TYPE_CHECKING:
    from optforge.compare import Comparison

PIPE_WIDTH = 1000
"""Columns of the output where it is no terminal and COLUMNS does not say: one row a line, however long its name."""
STDOUT = Path("-")
PAGE = "compare.html"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `compare` as Typer parsed them."""

    runs: tuple[str, ...]
    by: str | None = None
    anyway: bool = False
    files: Mapping[str, Path | None] = field(default_factory=dict)
    """markdown, csv, json, html -> where to write it; `-` is stdout, None is not asked for."""


def compare_command(request: Request) -> int:
    """Prints and writes the comparison, and returns the exit code.

    Raises:
        ConfigError: there is nothing to compare, or it was measured under different conditions.
        OutputError: a file cannot be written.
    """
    from optforge import compare
    from optforge.compare import page, records, table

    _refuse(request)
    cwd = Path.cwd()
    loaded = compare.load(request.runs, cwd=cwd)
    found = compare.compare(loaded.entries, by=request.by, anyway=request.anyway, notes=loaded.notes)
    texts = {"markdown": table.to_markdown, "csv": records.to_csv, "json": records.to_json, "html": page.render}
    for kind, make in texts.items():
        path = request.files.get(kind)
        if path == STDOUT:
            sys.stdout.write(make(found))
        elif path is not None:
            preflight.write_text(path, make(found))
    if STDOUT in request.files.values():
        return EXIT_OK
    _print(found)
    if request.files.get("html") is None:
        path = _folder(request.runs, cwd) / PAGE
        preflight.write_text(path, page.render(found))
        print(f"page: {path.relative_to(cwd) if path.is_relative_to(cwd) else path}")
    return EXIT_OK


def _refuse(request: Request) -> None:
    """What is wrong with the request itself."""
    problems = []
    if not request.runs:
        fix = "give folders of runs or sweeps, report.json files, or names of recipes"
        problems.append(Problem(where="optforge compare", what="needs to know what to compare", fix=fix))
    printed = [kind for kind, path in request.files.items() if path == STDOUT]
    if len(printed) > 1:
        named = " and ".join(f"--{kind}" for kind in printed)
        problems.append(Problem(where=named, what="cannot both be written to stdout", fix="give a file to one of them"))
    if problems:
        raise ConfigError(*problems)


def _print(found: Comparison) -> None:
    from rich.console import Console

    from optforge.compare import table

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    table.show(found, Console(width=None if known else PIPE_WIDTH))


def _folder(runs: Sequence[str], cwd: Path) -> Path:
    """Where the page goes: into the sweep, where one is all that is compared, else into a folder of its own."""
    from optforge.sweep import store

    only = cwd / Path(runs[0]).expanduser()
    if len(runs) == 1 and store.is_sweep(only):
        return only
    return preflight.comparison_folder(cwd / "outputs")
