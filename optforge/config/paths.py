"""Where option files lie: beside the package in a source tree, inside it in a wheel, and in installed plug-ins."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from optforge import recipe as recipes
from optforge import registry, safe_yaml
from optforge.errors import ConfigError, Problem, UserError, near

GROUPS = {"model": "models", "data": "data", "workload": "workloads", "hardware": "", "transform": "transforms"}
"""Config group -> registry group whose classes its option files fill; hardware profiles fill `spec.Hardware`."""

PLURALS = {
    "model": "models",
    "data": "data",
    "workload": "workloads",
    "hardware": "hardware",
    "recipe": "recipes",
    "transform": "transforms",
}
"""Config group -> what is typed after `optforge list`."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One choice of a config group, and the line that describes it."""

    name: str
    description: str
    path: Path


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / name, package.parent / name
    return inside if inside.is_dir() else beside


def conf_dir() -> Path:
    """The folder of the shipped option files."""
    return _shipped("conf")


def recipes_dir() -> Path:
    """The folder of the shipped recipes."""
    return _shipped("recipes")


@cache
def plugin_dirs() -> tuple[Path, ...]:
    """The folders `conf/` of packages that register transforms, models, data or workloads, without importing them."""
    found: dict[Path, None] = {}
    for group in filter(None, GROUPS.values()):
        for name in registry.names(group):
            package = registry.value(group, name).split(":")[0].split(".")[0]
            if package == __name__.split(".")[0]:
                continue
            spec = importlib.util.find_spec(package)
            locations = (spec.submodule_search_locations or []) if spec else []
            found |= {Path(place) / "conf": None for place in locations if (Path(place) / "conf").is_dir()}
    return tuple(found)


def option_files(group: str, extra: tuple[Path, ...] = ()) -> dict[str, Path]:
    """Option name -> file, for a config group; transform options are named `<kind>/<option>`."""
    found: dict[str, Path] = {}
    for folder in (conf_dir(), *plugin_dirs(), *extra):
        root = folder / group
        for path in sorted(root.glob("*/*.yaml" if group == "transform" else "*.yaml")):
            found.setdefault(path.relative_to(root).with_suffix("").as_posix(), path)
    return found


def options(group: str, *, cwd: Path | None = None) -> list[Option]:
    """The choices of a group: model, data, workload, hardware, recipe or transform."""
    if group == "recipe":
        return list(_recipe_options(cwd or Path.cwd()))
    return [Option(name=name, description=_description(path), path=path) for name, path in option_files(group).items()]


def _recipe_options(cwd: Path) -> Iterator[Option]:
    for name, paths in recipes.known(cwd, recipes_dir()).items():
        for path in paths:
            try:
                description = recipes.load(path, cwd=cwd, shipped=recipes_dir()).description
            except UserError as error:  # one bad file in ./recipes must not hide the others from a listing
                description = f"cannot be read: {error.problems[0].what}"
            yield Option(name=name, description=description, path=path)


def _description(path: Path) -> str:
    """The first comment line of an option file."""
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def option_file(group: str, name: str, extra: tuple[Path, ...] = ()) -> Path:
    """The file of one option.

    Raises:
        ConfigError: there is none of that name; near names are given.
    """
    files = option_files(group, extra)
    if name not in files:
        raise ConfigError(unknown_option(group, name, files))
    return files[name]


def unknown_option(group: str, name: str, files: dict[str, Path]) -> Problem:
    """The problem of a wrong option name."""
    known = f"known: {', '.join(files)}"
    if group == "transform":
        kind = name.split("/", maxsplit=1)[0]
        same = [option for option in files if option.startswith(f"{kind}/")]
        known = f"known: {', '.join(same or files)}"
    fix = near(name, files) or known
    if group == "model" and recipes.is_path(name):
        fix = f"a checkpoint is given as model=hf model.path={name}"
    return Problem(where=group, what=f"unknown {group} {name!r}", fix=fix)


@cache
def defaults_of(path: Path) -> dict[str, object]:
    """The content of an option file that is read without Hydra (a transform's or a hardware profile's)."""
    data = safe_yaml.read(path)
    if not isinstance(data, dict):
        raise ConfigError(Problem(where=str(path), what="must be a mapping"))
    return data
