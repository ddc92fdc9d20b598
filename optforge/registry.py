"""Finds transforms, backends, workloads, models, data sets and recipes by name, through entry points.

OptForge's own are declared in pyproject.toml exactly as a plug-in declares its own, so there is one way to add one and
nothing registers itself on import. Names are read without importing what they point to.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from optforge.errors import ConfigError, MissingDependency, Problem, near

GROUPS = ("transforms", "backends", "workloads", "models", "data", "recipes")


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    """The entry points of `optforge.<group>` by name; two packages that claim one name are an error."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"optforge.{group}"):
        known = found.get(entry.name)
        if known is not None and known.value != entry.value:
            raise ConfigError(
                Problem(
                    where=f"entry point optforge.{group}",
                    what=f"{entry.name!r} is declared twice, as {known.value} and {entry.value}",
                    fix="uninstall one of the packages",
                )
            )
        found[entry.name] = entry
    return found


def names(group: str) -> list[str]:
    """Sorted names registered in a group (`transforms`, `backends`, ...)."""
    return sorted(_entries(group))


def kinds() -> list[str]:
    """Sorted kinds of transforms."""
    return [name for name in names("transforms") if "/" not in name]


def transform(use: str) -> Any:
    """The class behind `kind/option`: that of the kind, unless the option has an entry point of its own by its whole name.

    Raises:
        ConfigError, MissingDependency: as `get`.
    """
    return get("transforms", use if use in _entries("transforms") else use.partition("/")[0])


def value(group: str, name: str) -> str:
    """Where a name points, as `package.module:attribute`, without importing it."""
    return _entries(group)[name].value


def get(group: str, name: str) -> Any:
    """The object that a name points to.

    Raises:
        ConfigError: the name is not registered; near names are given.
        MissingDependency: a package that its module imports is not installed.
    """
    entries = _entries(group)
    if name not in entries:
        hint = near(name, entries) or f"known: {', '.join(sorted(entries)) or 'none'}"
        raise ConfigError(Problem(where=group, what=f"unknown {group.rstrip('s')} {name!r}", fix=hint))
    try:
        return entries[name].load()
    except ModuleNotFoundError as error:
        raise MissingDependency(
            Problem(where=f"{group} {name}", what=f"needs {error.name}, which is not installed", fix=f"pip install {error.name}")
        ) from error
