"""The file that later runs are held against: one or several reports, without what no gate reads.

It is meant to be committed beside the code, so it keeps the samples and drops receipts, plans and texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optforge import preflight
from optforge.errors import ConfigError, Problem, UserError
from optforge.report import store
from optforge.spec import Report

SCHEMA_VERSION = 1
KIND = "optforge gate baseline"


def write(path: Path, reports: Sequence[Report]) -> None:
    """Replaces the file.

    Raises:
        OutputError: it cannot be written.
    """
    runs = [json.loads(store.to_json(_lean(report))) for report in reports]
    text = json.dumps({"schema_version": SCHEMA_VERSION, "kind": KIND, "runs": runs}, indent=1, allow_nan=False) + "\n"
    preflight.write_text(path, text)


def read(path: Path) -> list[Report]:
    """The reports of a baseline file, of a run's folder, or of a report.json.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if not path.exists():
        fix = "write it with optforge gate RUN --baseline FILE --update"
        raise ConfigError(Problem(where="--baseline", what=f"there is no {path}", fix=fix))
    if path.is_dir():
        return [store.read(path)]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(Problem(where=str(path), what=f"cannot be read ({error})", fix="write it anew with --update")) from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        return [store.read(path)]
    if found.get("schema_version") != SCHEMA_VERSION or not found.get("runs"):
        what = f"has schema_version {found.get('schema_version')!r}; this OptForge reads {SCHEMA_VERSION}, with a run at least"
        raise UserError(Problem(where=str(path), what=what, fix="write it anew with --update"))
    return [store.from_json(json.dumps(run), f"{path}, run {index + 1}") for index, run in enumerate(found["runs"])]


def _lean(report: Report) -> Report:
    """What a gate reads of a report."""
    return replace(report, steps=[], plan={}, generations=[], predicted={}, artifact=None, downgrades=[], folder="")
