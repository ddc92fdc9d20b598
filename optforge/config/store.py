"""Recipes and saved runs as options that Hydra can choose, put into its ConfigStore before it parses a command line.

A file's option is named after its absolute path (`file/home/me/team.yaml`, other characters percent-encoded), so that
two files never share a name, and so that a process that only sees the overrides can find the file again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from hydra.core.config_store import ConfigStore

from optforge import recipe as recipes
from optforge import safe_yaml
from optforge.config import build, paths
from optforge.errors import ConfigError, Problem
from optforge.spec import Json

FILE_PREFIX = "file/"
RUN_PREFIX = "run/"


def option_of(prefix: str, path: Path) -> str:
    """The option name of a file: letters, digits and `/._-%` only, all of which Hydra takes without quotes."""
    return prefix + quote(str(path.resolve()).lstrip("/"), safe="/").replace("~", "%7E")


def file_of(option: str) -> Path | None:
    """The file that an option name stands for; None for a plain name."""
    for prefix in (FILE_PREFIX, RUN_PREFIX):
        if option.startswith(prefix):
            return Path("/" + unquote(option.removeprefix(prefix)))
    return None


def run_file_of(option: str) -> Path | None:
    """The saved run that an option name stands for; None for any other name."""
    return file_of(option) if option.startswith(RUN_PREFIX) else None


def register(group: str, option: str, node: Mapping[str, Json]) -> None:
    """Makes `node` the option of that name; the slashes of a name are folders to Hydra."""
    folder, _, name = f"{group}/{option}".rpartition("/")
    ConfigStore.instance().store(group=folder, name=name, node=dict(node), package=group, provider="optforge")


def load_recipe(option: str, *, cwd: Path) -> recipes.RecipeFile:
    """The recipe that a name, a path or an option name of a recipe file stands for.

    Raises:
        ConfigError: there is none, or its file is wrong.
    """
    path = file_of(option) or recipes.find(option, cwd=cwd, shipped=paths.recipes_dir())
    return recipes.load(path, cwd=cwd, shipped=paths.recipes_dir())


def register_recipe(name: str, *, cwd: Path) -> str:
    """Reads, checks and registers a recipe; returns its option name.

    A path, and a name that a shipped option does not bear alone, gets an option name of its own.
    """
    loaded = load_recipe(name, cwd=cwd)
    named = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name) is not None
    option = name if named or file_of(name) else option_of(FILE_PREFIX, Path(loaded.source))
    register("recipe", option, loaded.mapping())
    return option


def register_hardware(name: str, *, cwd: Path) -> str:
    """Reads, checks and registers a profile's file, given by path or by an option name made here; returns its option name.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or describes no device.
    """
    path = file_of(name) or cwd / Path(name).expanduser()
    node = safe_yaml.read(path)
    if not isinstance(node, dict):
        raise ConfigError(Problem(where=str(path), what="is no hardware profile", fix="write one with optforge hardware measure > FILE"))
    build.profile(node, str(path))
    option = option_of(FILE_PREFIX, path)
    register("hardware", option, node)
    return option


def quoted(value: str) -> str:
    """`value` in the double quotes of Hydra's grammar, where a backslash counts only before a quote."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    trailing = re.search(r"\\+$", escaped)
    return f'"{escaped}{trailing[0] if trailing else ""}"'
