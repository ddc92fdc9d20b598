"""A resolved run as one self-contained file, and back: what `optforge show`, `--config run.yaml` and artifacts use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optforge import __version__, recipe, safe_yaml, spec
from optforge.config import build, paths, schema, store
from optforge.config.origins import Sources
from optforge.errors import ConfigError, Problem, TrustError
from optforge.spec import Json

CODE_KEYS = ("factory", "metric", "trust", "trust_remote_code")
"""Keys whose value makes a run import or execute code that is not OptForge's."""
CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""What `callables` would import, under whatever key a kind of model, data or workload has it."""
LITERAL_KEYS = ("schema_version", "optforge_version", "command")


def to_yaml(run: spec.Run) -> str:
    """The resolved run as YAML; `optforge run --config FILE` repeats it exactly.

    `trust` is left out: it is given anew, by whoever loads the file.
    """
    head = {"schema_version": recipe.SCHEMA_VERSION, "optforge_version": __version__}
    body = {key: value for key, value in run.resolved.items() if key != "trust"}
    return safe_yaml.dumps(head | body, [f"Repeat this run: optforge run --config FILE. Written by OptForge {__version__}."])


def run_from_yaml(source: str | Path, *, cwd: Path | None = None, trust: bool = False) -> spec.Run:
    """The run that `to_yaml` wrote, from a path or from the text itself.

    Raises:
        ConfigError: it was written for another schema, or a key or value is wrong.
        TrustError: it names code, and `trust` is False.
    """
    where = str(source) if isinstance(source, Path) else "run.yaml"
    tree = _tree(safe_yaml.read(source) if isinstance(source, Path) else safe_yaml.loads(source, where), where, trusted=trust)
    return build.run(tree | {"trust": trust}, Sources(base=where), cwd=cwd or Path.cwd())


def register(path: Path, *, trusted: bool) -> dict[str, Json]:
    """Makes the sections of a run file options that Hydra can choose, and returns the file's content.

    Args:
        trusted: the command line says `trust=true`.

    Raises:
        ConfigError, TrustError: as `run_from_yaml`.
    """
    tree = _tree(safe_yaml.read(path), str(path), trusted=trusted)
    option = store.option_of(store.RUN_PREFIX, path)
    for group in build.SECTIONS:
        if group in tree:
            store.register(group, option, _without_defaults(tree[group]) if group == "recipe" else tree[group])
    return tree


def as_overrides(path: Path, given: frozenset[str], *, trusted: bool) -> list[str]:
    """Registers a run file, and returns the overrides that make it the run, except for the keys `given` beside it."""
    tree = register(path, trusted=trusted)
    option = store.option_of(store.RUN_PREFIX, path)
    chosen = [f"{group}={option}" for group in build.SECTIONS if group in tree and group not in given]
    return chosen + [f"++{key}={_hydra_value(value)}" for key, value in _settings(tree) if key not in given]


def recipe_of(path: Path) -> recipe.RecipeFile:
    """The recipe section of a run file, whose every value came from that file."""
    node = safe_yaml.read(path).get("recipe") or {}
    steps = _without_defaults(node)["steps"]
    return recipe.RecipeFile(name=str(node.get("name")), steps=steps, source=str(path))


def _tree(data: Json, where: str, *, trusted: bool) -> dict[str, Json]:
    """The content of a run file, checked for what makes it unsafe or foreign."""
    if not isinstance(data, dict):
        raise ConfigError(Problem(where=where, what="is not a run", fix="write one with optforge show recipe=NAME > run.yaml"))
    recipe.check_schema(data, where)
    if "steps" in data and "recipe" not in data:
        raise ConfigError(Problem(where=where, what="is a recipe, not a run", fix=f"type recipe={where}"))
    tree = {key: value for key, value in data.items() if key not in LITERAL_KEYS}
    unknown = [build.unknown_top(key, where) for key in tree if key not in build.TOP or key == "trust"]
    sections = [key for key in build.SECTIONS if key in tree and not isinstance(tree[key], dict)]
    unknown += [Problem(where=where, what=f"{key} must be a mapping", fix="write a run with optforge show") for key in sections]
    if unknown:
        raise ConfigError(*unknown)
    # steps cannot name code, and their selectors may look as if they did
    code = list(_code({key: value for key, value in tree.items() if key != "recipe"}))
    if code and not trusted:
        named = ", ".join(f"{key}: {value}" for key, value in code)
        raise TrustError(Problem(where=where, what=f"would run code ({named})", fix="add trust=true if you trust the file"))
    return tree


def _code(node: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if (key in CODE_KEYS and value not in (None, False)) or (isinstance(value, str) and CALLABLE.fullmatch(value)):
            yield f"{prefix}{key}", value
        yield from _code(value, f"{prefix}{key}.")


def _without_defaults(node: Mapping[str, Any]) -> dict[str, Json]:
    """A resolved recipe without the values that its steps' options have anyway, which resolving adds back.

    So a step whose `use` the command line changes takes the new option's values and not the old one's.
    """
    files = paths.option_files("transform")
    steps: dict[str, Json] = {}
    for name, step in (node.get("steps") or {}).items():
        defaults = paths.defaults_of(files[step["use"]]) if isinstance(step, dict) and step.get("use") in files else {}
        steps[name] = (
            {key: value for key, value in step.items() if key not in defaults or defaults[key] != value} if isinstance(step, dict) else step
        )
    return {**node, "steps": steps}


def _settings(tree: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    for key, value in tree.items():
        if key in ("quality", "measure", "launch") and isinstance(value, dict):
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        elif key not in build.SECTIONS:
            yield key, value


def _hydra_value(value: Json) -> str:
    """Plain data in the grammar of Hydra's overrides."""
    value = schema.plain(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_hydra_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_hydra_value(item) for item in value) + "]"
    if isinstance(value, str):
        return store.quoted(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
