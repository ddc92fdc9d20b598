"""`optforge list`: the names that a run can use, each with one line."""

from __future__ import annotations

import ast
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from optforge import config, registry, schemes
from optforge.cli import tables
from optforge.cli.completion import NOUNS
from optforge.errors import ConfigError, Problem, near

GROUPS = {
    "recipes": "recipe",
    "transforms": "transform",
    "hardware": "hardware",
    "models": "model",
    "workloads": "workload",
    "data": "data",
}
"""What is typed after `list`, and the config group that holds it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One name, what it is, and the file or module that it comes from."""

    name: str
    description: str
    source: str


def list_command(what: str, *, as_json: bool) -> None:
    """Prints the names of one noun (`recipes`, `backends`, ...).

    Raises:
        ConfigError: there is no such noun.
    """
    if what not in NOUNS:
        said = f"cannot list {what!r}" if what else "needs to know what to list"
        raise ConfigError(Problem(where="optforge list", what=said, fix=near(what, NOUNS) or f"type one of {', '.join(NOUNS)}"))
    if what == "schemes":
        _schemes(as_json=as_json)
        return
    rows = _backends() if what == "backends" else _options(GROUPS[what])
    if as_json:
        print(json.dumps([vars(row) for row in rows], indent=2))
    else:
        tables.show([(row.name, row.description) for row in rows])


def _schemes(*, as_json: bool) -> None:
    """The table of docs/schemes.md, without what is stored where a person reads it: that fills the line of any terminal."""
    found = [dict(zip(schemes.COLUMNS, row, strict=True)) for row in schemes.rows()]
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        shown = [name for name in schemes.COLUMNS if name != "storage"]
        tables.show([shown, *([row[name] for name in shown] for row in found)])


def _options(group: str) -> list[Row]:
    return [Row(name=option.name, description=option.description, source=str(option.path)) for option in config.options(group)]


def _backends() -> list[Row]:
    rows = []
    for name in registry.names("backends"):
        address = registry.value("backends", name)
        rows.append(Row(name=name, description=first_line(address.split(":")[0]), source=address))
    return rows


def first_line(module: str) -> str:
    """The first line of a module's docstring, read without importing the module, which would load torch."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return f"{module} is not installed"
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.split("\n", 1)[0]
