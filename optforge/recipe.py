"""Recipe files: found by name or path, read as data, checked against a strict schema, and extended.

A recipe is what people send each other, so a recipe file can describe steps and limits and nothing else. It is read by
`safe_yaml`, never by Hydra: composed as it is, a file could set `hydra.callbacks` and run code.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optforge import __version__, registry, safe_yaml
from optforge.errors import ConfigError, Problem, near
from optforge.measure.limits import LIMITS
from optforge.spec import GOALS, Json

SCHEMA_VERSION = 1
KEYS = ("name", "description", "extends", "goal", "steps", "limits", "schema_version", "optforge_version")
STEP_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MAX_CHAIN = 16
_HYDRA_WORDS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_", "defaults", "hydra")

Steps = dict[str, dict[str, Json]]


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """A recipe as its file and the files it extends say it; steps are still plain mappings without defaults."""

    name: str
    description: str = ""
    goal: str = "throughput"
    steps: Steps = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    source: str = ""
    origins: dict[str, str] = field(default_factory=dict)
    """Key below the recipe (`steps.weights.use`, `steps.weights.ignore_extra.0`) -> the file that wrote it."""

    def mapping(self) -> dict[str, Json]:
        """The recipe as it stands in a composed configuration."""
        return {"name": self.name, "description": self.description, "goal": self.goal, "steps": self.steps, "limits": self.limits}


def is_path(text: str) -> bool:
    """Whether a recipe is meant as a file and not as a name."""
    return "/" in text or "\\" in text or text.startswith("~") or text.endswith((".yaml", ".yml"))


def known(cwd: Path, shipped: Path) -> dict[str, list[Path]]:
    """Every recipe that can be given by name: shipped ones, those of installed packages, those in `./recipes`."""
    found: dict[str, list[Path]] = {}
    for folder in dict.fromkeys([shipped.resolve(), *_installed(), (cwd / "recipes").resolve()]):
        for path in sorted(folder.glob("*.yaml")) if folder.is_dir() else []:
            found.setdefault(path.stem, []).append(path)
    return found


def _installed() -> Iterator[Path]:
    """Folders of recipes that installed packages offer: the entry point's value is the package that holds them."""
    for name in registry.names("recipes"):
        package = registry.value("recipes", name).split(":")[0]
        found = importlib.util.find_spec(package)
        yield from (Path(location) for location in (found.submodule_search_locations or [] if found else []))


def find(name_or_path: str, *, cwd: Path, shipped: Path) -> Path:
    """The file of a recipe.

    Raises:
        ConfigError: no recipe has that name, two have it, or there is no such file.
    """
    if is_path(name_or_path):
        path = Path(name_or_path).expanduser()
        path = path if path.is_absolute() else cwd / path
        if not path.exists():
            raise ConfigError(Problem(where=f"recipe={name_or_path}", what=f"there is no file {path.resolve()}", fix="check the path"))
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(
                Problem(where=f"recipe={name_or_path}", what="is not a recipe file", fix="a recipe file is named <name>.yaml")
            )
        return path.resolve()
    names = known(cwd, shipped)
    paths = names.get(name_or_path, [])
    if not paths:
        listed = f"known: {', '.join(sorted(names)) or 'none'}; a file is given as ./{name_or_path or 'name'}.yaml"
        fix = f"{near(name_or_path, names)} {listed}".strip()
        raise ConfigError(Problem(where="recipe", what=f"unknown recipe {name_or_path!r}", fix=fix))
    if len(paths) > 1:
        both = " and ".join(str(path) for path in paths)
        raise ConfigError(Problem(where="recipe", what=f"{name_or_path!r} is {both}", fix=f"give the path: recipe={paths[-1]}"))
    return paths[0]


def load(path: Path, *, cwd: Path, shipped: Path) -> RecipeFile:
    """Reads, checks and extends the recipe in `path`.

    Raises:
        ConfigError: with every problem of the file, or first and alone that it was written for another version.
    """
    return _load(path, cwd, shipped, ())


def _load(path: Path, cwd: Path, shipped: Path, chain: tuple[Path, ...]) -> RecipeFile:
    if path in chain or len(chain) >= _MAX_CHAIN:
        names = " -> ".join(entry.name for entry in (*chain, path)[-4:])
        raise ConfigError(Problem(where=str(chain[-1]), what=f"extends itself or more than {_MAX_CHAIN} files: {names}"))
    data = safe_yaml.read(path)
    check(data, str(path))
    base = None
    if data.get("extends"):
        parent = data["extends"]
        base = _load(_parent(parent, path, cwd, shipped), cwd, shipped, (*chain, path))
    return _extended(data, base, path)


def _parent(name: str, path: Path, cwd: Path, shipped: Path) -> Path:
    """The file that `path` extends; a path there is relative to the folder of the file that names it."""
    try:
        return find(name, cwd=path.parent if is_path(name) else cwd, shipped=shipped)
    except ConfigError as error:
        problems = (replace(problem, where=f"{path}: extends: {name}") for problem in error.problems)
        raise ConfigError(*problems) from error


def check(data: Json, where: str) -> None:
    """Holds the content of a recipe file against the schema.

    Raises:
        ConfigError: a version mismatch or a saved run first and alone, then what is Hydra's, else every problem.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            Problem(where=where, what="is not a recipe", fix="a recipe is a mapping with the keys name, description, goal, steps, limits")
        )
    check_version(data, where)
    if isinstance(data.get("recipe"), dict) and "steps" not in data:
        raise ConfigError(Problem(where=where, what="is a whole run, not a recipe", fix=f"type --config {where}"))
    problems = _foreign(data, where) or [*_top(data, where), *_steps(data.get("steps"), where), *_limits(data.get("limits"), where)]
    if problems:
        raise ConfigError(*problems)


def check_version(data: Mapping[str, Json], where: str) -> None:
    """Refuses a file that was written for another schema or, where it names one, another release.

    Raises:
        ConfigError: with both versions.
    """
    check_schema(data, where)
    written = str(data.get("optforge_version", __version__))
    if written.split(".")[:2] != __version__.split(".")[:2]:
        what = f"was written for OptForge {written}, this is {__version__}"
        raise ConfigError(Problem(where=where, what=what, fix=f"pip install 'optforge=={written}.*', or remove optforge_version"))


def check_schema(data: Mapping[str, Json], where: str) -> None:
    """Refuses a file that was written for another schema.

    Raises:
        ConfigError: with both versions.
    """
    schema = data.get("schema_version", SCHEMA_VERSION)
    if schema != SCHEMA_VERSION:
        what = f"has schema_version {schema}, this OptForge ({__version__}) reads {SCHEMA_VERSION}"
        raise ConfigError(Problem(where=where, what=what, fix="install the release it was written for, or write it anew"))


def _foreign(node: Json, where: str, key: str = "") -> list[Problem]:
    """Keys that mean something to Hydra and nothing in a recipe, at any depth."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = [
        Problem(where=where, what=f"has the key {f'{key}{name}'!r}, which is Hydra's; a recipe is data", fix="remove it")
        for name in (node if isinstance(node, dict) else ())
        if name in _HYDRA_WORDS or "@" in name or "/" in name
    ]
    for name, child in children:
        found += _foreign(child, where, f"{key}{name}.")
    return found[:1]


def _top(data: Mapping[str, Json], where: str) -> list[Problem]:
    problems = [
        Problem(where=where, what=f"unknown key {key!r}", fix=near(key, KEYS) or f"a recipe has the keys {', '.join(KEYS)}")
        for key in data
        if key not in KEYS
    ]
    for key in ("name", "description", "extends"):
        if data.get(key) is not None and not isinstance(data[key], str):
            problems.append(Problem(where=where, what=f"{key} must be text, got {data[key]!r}", fix=f'write {key}: "{data[key]}"'))
    name = data.get("name")
    if isinstance(name, str) and not NAME.fullmatch(name):
        problems.append(Problem(where=where, what=f"the name {name[:40]!r} names a folder later", fix="use letters, digits, _ . and -"))
    goal = data.get("goal")
    if goal is not None and goal not in GOALS:
        problems.append(
            Problem(where=where, what=f"unknown goal {goal!r}", fix=near(str(goal), GOALS) or f"write one of {', '.join(GOALS)}")
        )
    return problems


def _steps(steps: Json, where: str) -> list[Problem]:
    if steps is None:
        return []
    if not isinstance(steps, dict):
        what = f"steps must be a mapping of names to steps, got a {type(steps).__name__}"
        return [Problem(where=where, what=what, fix="write steps: {weights: {use: quantize/int8_weight}}")]
    problems = []
    for name, step in steps.items():
        if not STEP_NAME.fullmatch(name):
            problems.append(Problem(where=where, what=f"step name {name[:40]!r}", fix="use letters, digits, _ and -, a letter first"))
        elif step is not None and not isinstance(step, dict):
            problems.append(
                Problem(where=where, what=f"steps.{name} must be a mapping, got {step!r}", fix=f"write {name}: {{use: {step}}}")
            )
    return problems


def _limits(limits: Json, where: str) -> list[Problem]:
    if limits is None:
        return []
    if not isinstance(limits, dict):
        return [Problem(where=where, what="limits must be a mapping", fix="write limits: {max_kl: 0.05}")]
    return [
        Problem(where=where, what=f"unknown limit {key!r}", fix=near(key, LIMITS) or f"known: {', '.join(LIMITS)}")
        for key in limits
        if key not in LIMITS
    ]


def _extended(data: Mapping[str, Any], base: RecipeFile | None, path: Path) -> RecipeFile:
    """The recipe of one file laid over the one it extends: keys win, `ignore_extra` adds up, a step of null is dropped."""
    source = str(path)
    origins = dict(base.origins) if base else {}
    steps: Steps = {name: dict(step) for name, step in base.steps.items()} if base else {}
    for name, written in (data.get("steps") or {}).items():
        if written is None:
            if name not in steps:
                fix = near(name, steps) or f"steps it extends: {', '.join(steps) or 'none'}"
                raise ConfigError(Problem(where=source, what=f"steps.{name} is null, but there is no step {name!r} to drop", fix=fix))
            del steps[name]
            origins = {key: origin for key, origin in origins.items() if not key.startswith(f"steps.{name}.")}
            continue
        step = steps.setdefault(name, {})
        _lay_over(step, written, f"steps.{name}", source, origins)
    for key in ("name", "description", "goal"):
        if data.get(key) is not None:
            origins[key] = source
    limits = {**(base.limits if base else {}), **(data.get("limits") or {})}
    origins |= {f"limits.{key}": source for key in data.get("limits") or {}}
    return RecipeFile(
        name=data.get("name") or path.stem,
        description=data.get("description") or (base.description if base else ""),
        goal=data.get("goal") or (base.goal if base else "throughput"),
        steps=steps,
        limits={key: limit for key, limit in limits.items() if limit is not None},
        source=source,
        origins=origins,
    )


def _lay_over(step: dict[str, Json], written: Mapping[str, Json], key: str, source: str, origins: dict[str, str]) -> None:
    for name, value in written.items():
        earlier = step.get(name)
        if name == "ignore_extra" and isinstance(value, list) and isinstance(earlier, list):
            origins |= {f"{key}.{name}.{len(earlier) + index}": source for index in range(len(value))}
            step[name] = [*earlier, *value]
            continue
        if name == "ignore_extra" and isinstance(value, list):
            origins |= {f"{key}.{name}.{index}": source for index in range(len(value))}
        step[name] = value
        origins[f"{key}.{name}"] = source
