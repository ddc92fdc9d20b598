"""Writes and reads the report of a run: report.json, report.md and report.html.

report.json comes first and is the truth; the other two are views of it. Each file is replaced atomically, because the
report is written again after every step and a kill between two steps must leave a whole one.
"""

from __future__ import annotations

import json
from pathlib import Path

from optforge import atomic
from optforge.errors import Problem, UserError
from optforge.report import html, markdown
from optforge.report.codec import build, plain
from optforge.spec import Json, Report

SCHEMA_VERSION = 1
ALWAYS = ("vs_baseline", "vs_compiled_baseline")
"""Keys of `speedup` that are written even where there is no figure, as null."""
LATENCY = ("p50", "p90", "mean", "stdev", "n")
MEMORY = ("allocated", "reserved", "process")


def to_json(report: Report) -> str:
    """`report` as strict JSON text, keys in the schema's order, ASCII only (any reader and any terminal can take it).

    A figure that is NaN or infinite is written as null and its dotted path is added to `nonfinite`.
    """
    nonfinite: list[str] = []
    values: dict[str, Json] = plain(report, nonfinite)
    values["nonfinite"] = sorted(set(values["nonfinite"]) | set(nonfinite))
    values["speedup"] = _with_nulls(values["speedup"], ALWAYS)
    for row in (values, *values["steps"]):
        for key in ("baseline", "compiled_baseline", "optimized", "measured"):
            if row.get(key) is not None:
                row[key]["latency_ms"] = _with_nulls(row[key]["latency_ms"], LATENCY)
                row[key]["memory"] = _with_nulls(row[key]["memory"], MEMORY)
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def _with_nulls(values: dict[str, Json], keys: tuple[str, ...]) -> dict[str, Json]:
    """`values` with each of `keys` present, first and in order; what does not exist is null, never zero."""
    return {**{key: values.get(key) for key in keys}, **values}


def from_json(text: str, where: str = "report.json") -> Report:
    """The report that `to_json` wrote.

    Raises:
        UserError: the text is no JSON, has another `schema_version`, or a key or type that the schema lacks.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise _unreadable(where, f"is not JSON ({error.msg} at line {error.lineno})") from error
    version = values.get("schema_version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise _unreadable(where, f"has schema_version {version!r}; this OptForge reads {SCHEMA_VERSION}")
    try:
        report: Report = build(Report, values)
    except ValueError as error:
        raise _unreadable(where, str(error)) from error
    return report


def _unreadable(where: str, what: str) -> UserError:
    return UserError(Problem(where=where, what=what, fix="read it with the OptForge that wrote it, or repeat the run"))


def write(report: Report, folder: Path | str) -> None:
    """Writes report.json, report.md and report.html into `folder`, which is made when missing.

    Raises:
        OutputError: the folder cannot be written or its volume is full.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("report.json", "report.md", "report.html"):
            atomic.remove_stale(folder, name)
    except OSError as error:
        raise atomic.cannot_write(folder, 0, error) from error
    text = to_json(report)
    atomic.write_bytes(folder / "report.json", text.encode("ascii"))
    written = from_json(text)  # the views show exactly what the file says, nulls included
    atomic.write_bytes(folder / "report.md", markdown.render(written).encode("utf-8", "replace"))
    atomic.write_bytes(folder / "report.html", html.render(written).encode("utf-8", "replace"))


def read(folder: Path | str) -> Report:
    """The report in `folder` (a run's folder, or the path of a report.json).

    Raises:
        UserError: there is none, or it cannot be read; says why.
    """
    path = Path(folder)
    path = path / "report.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(Problem(where=str(path), what="there is no report here", fix="give the folder of a run")) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(str(path), f"cannot be read ({error})") from error
    return from_json(text, str(path))
