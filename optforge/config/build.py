"""From a composed, plain mapping to a `Run`: every section checked against its dataclass, every problem told at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from optforge import recipe as recipes
from optforge import registry, spec
from optforge.config import paths, schema
from optforge.errors import ConfigError, Problem, UserError, near
from optforge.spec import ATTRIBUTIONS, GOALS, Json

SECTIONS = ("recipe", "model", "data", "workload", "hardware")
"""The config groups, which are also the first keys of a run."""
STEP_KEYS = ("use", "after", "before", "keep")
PART_KEYS = ("name", "kind")
COMMAND_LINE = "command line"
ABOVE_ZERO = ("tokens", "window", "items", "min_rounds", "max_s", "budget_s", "steady")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a run that stand alone, beside its sections."""

    save: bool = False
    downgrade: Literal["allow", "forbid"] = "allow"
    reorder: Literal["allow", "forbid"] = "allow"
    require_target: bool = False
    on_missing: Literal["error", "skip"] = "error"
    fail_on: tuple[Literal["regression", "no_gain", "downgrade", "stand_in"], ...] = ()
    seed: int = 0
    trust: bool = False
    output_dir: str = "outputs"


@dataclass(frozen=True, kw_only=True)
class Measure(spec.Measure):
    """`spec.Measure` with its choices."""

    attribution: Literal["prefix", "leave_one_out", "ends"] = "prefix"


SETTINGS = tuple(Settings.__dataclass_fields__)
TOP = (*SECTIONS, "quality", "measure", *SETTINGS)
"""Every key that a run may have."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the values of a composed run came from."""

    base: str = ""
    """What wrote a key that nothing below names: conf/config.yaml, or a saved run's file."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """Group -> option name."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Group -> file of its option."""
    recipe: recipes.RecipeFile | None = None
    overridden: frozenset[str] = frozenset()
    """Dotted keys given on the command line."""
    extra: tuple[Path, ...] = ()
    """Folders of the user's own option files."""

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from."""
        if any(key == given or key.startswith(f"{given}.") for given in self.overridden):
            return COMMAND_LINE
        group, _, rest = key.partition(".")
        if group == "recipe" and self.recipe is not None:
            while rest and rest not in self.recipe.origins:
                rest = rest.rpartition(".")[0]
            return self.recipe.origins.get(rest, self.recipe.source)
        return self.files.get(group, self.base)

    def where(self, key: str) -> str:
        """A dotted key as a message names it: as it is typed, with the file that holds it."""
        origin = self.origin(key)
        shown = key.removeprefix("recipe.")
        return shown if not origin or origin == COMMAND_LINE else f"{shown} (in {origin})"


def run(tree: Mapping[str, Json], sources: Sources, *, cwd: Path, command: str = "") -> spec.Run:
    """The checked run that a composed mapping describes.

    Raises:
        ConfigError: with every problem at once.
    """
    problems: list[Problem] = [unknown_top(key, sources.where(key)) for key in tree if key not in TOP]
    origins: dict[str, str] = {}
    built: dict[str, Any] = {}
    for group in ("model", "data", "workload"):
        built[group] = _collected(problems, part, group, tree.get(group), sources, cwd, origins)
    built["hardware"] = _collected(problems, _hardware, tree.get("hardware"), sources)
    built["recipe"] = _collected(problems, _recipe, tree.get("recipe"), sources, cwd, origins)
    built["quality"] = _section(spec.Quality, "quality", tree, sources, problems)
    built["measure"] = _section(Measure, "measure", tree, sources, problems)
    settings = schema.build(Settings, {key: tree[key] for key in SETTINGS if key in tree}, "", "a run", problems, sources.where)
    schema.raise_all(problems)
    resolved = _resolved(built, settings)
    origins |= {key: origins.get(key) or sources.origin(key) for key in _leaves(resolved)}
    values = schema.plain_fields(settings) | {"fail_on": tuple(settings.fail_on)}
    values["output_dir"] = str(cwd / Path(settings.output_dir).expanduser())
    measure = spec.Measure(**schema.plain_fields(built.pop("measure")))
    return spec.Run(**built, measure=measure, **values, command=command, resolved=resolved, origins=dict(sorted(origins.items())))


def _collected(problems: list[Problem], function: Any, *arguments: Any) -> Any:
    """The function's result, or None after taking over the problems that it raises."""
    try:
        return function(*arguments)
    except UserError as error:
        problems.extend(error.problems)
    return None


def unknown_top(key: str, where: str) -> Problem:
    """The problem of a key that no run has, with the likeliest thing that was meant."""
    fix = near(key, TOP)
    if key in ("steps", "limits", "goal"):
        fix = f"write recipe.{key}"
    elif not fix:
        fix = f"known: {', '.join(TOP)}; a field of a step is steps.<step>.{key}, a recipe file is given as recipe=./<file>.yaml"
    return Problem(where=where, what=f"unknown key {key!r}", fix=fix)


def part(group: str, node: Json, sources: Sources, cwd: Path, origins: dict[str, str]) -> spec.Part:
    """A model, data set or workload from its section.

    Raises:
        ConfigError: an unknown kind, key or value, or a missing one.
    """
    if not isinstance(node, Mapping) or not node:
        raise ConfigError(
            Problem(where=group, what="is required and has no value", fix=f"type {group}={'|'.join(paths.option_files(group)) or 'NAME'}")
        )
    kind = node.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(
            Problem(
                where=sources.where(f"{group}.kind"),
                what="is required and has no value",
                fix=f"name one of: {', '.join(registry.names(paths.GROUPS[group]))}",
            )
        )
    cls = registry.get(paths.GROUPS[group], kind)
    options = {key: _absolute(key, value, cwd) for key, value in node.items() if key not in PART_KEYS}
    problems: list[Problem] = []
    source = schema.build(cls, options, group, f"{group} {kind}", problems, sources.where)
    schema.raise_all(problems)
    filled = schema.plain_fields(source)
    origins |= {
        f"{group}.{key}": f"default of {kind}" for key in filled if key not in node and sources.origin(f"{group}.{key}") != COMMAND_LINE
    }
    name = node.get("name") or sources.choices.get(group, kind)
    return spec.Part(name=str(name), kind=kind, options=filled, source=source)


def _absolute(key: str, value: Json, cwd: Path) -> Json:
    """A path option made absolute: a relative path means the folder that the command was started in.

    A bare name that does not exist there may be a name on a hub and stays as it is.
    """
    if not isinstance(value, str) or not (key in ("path", "folder") or key.endswith(("_path", "_folder"))):
        return value
    explicit = value.startswith(("./", "../", "~")) or value in (".", "..")
    if explicit or (value and value != schema.MISSING and (cwd / value).exists()):
        return os.path.normpath(cwd / Path(value).expanduser())
    return value


def _hardware(node: Json, sources: Sources) -> spec.Hardware:
    if not isinstance(node, Mapping) or not node:
        raise ConfigError(
            Problem(where="hardware", what="is required and has no value", fix="type hardware=auto, or the name of a profile")
        )
    problems: list[Problem] = []
    built: spec.Hardware | None = schema.build(spec.Hardware, node, "hardware", "a hardware profile", problems, sources.where)
    schema.raise_all(problems)
    assert built is not None  # build returns None only with a problem
    return built


def hardware(name: str) -> spec.Hardware:
    """The profile of that name.

    Raises:
        ConfigError: there is none; near names are given.
    """
    path = paths.option_file("hardware", name)
    return _hardware(paths.defaults_of(path), Sources(files={"hardware": str(path)}))


def _section(cls: type, name: str, tree: Mapping[str, Json], sources: Sources, problems: list[Problem]) -> Any:
    node = tree.get(name)
    if node is not None and not isinstance(node, Mapping):
        problems.append(Problem(where=sources.where(name), what=f"must be a mapping, got {node!r}", fix=f"write {name}.<key>=VALUE"))
        return None
    built = schema.build(cls, node or {}, name, name, problems, sources.where)
    for key in ABOVE_ZERO if built is not None else ():
        value = getattr(built, key, None)
        if value is not None and value <= 0:
            problems.append(Problem(where=sources.where(f"{name}.{key}"), what=f"must be above 0, got {value}"))
    return built


def _recipe(node: Json, sources: Sources, cwd: Path, origins: dict[str, str]) -> spec.Recipe:
    if not isinstance(node, Mapping) or not node:
        names = ", ".join(sorted(recipes.known(cwd, paths.recipes_dir()))) or "none"
        raise ConfigError(
            Problem(where="recipe", what="is required and has no value", fix=f"type recipe=NAME, one of {names}, or recipe=./file.yaml")
        )
    return recipe(node, sources, origins)


def recipe(node: Mapping[str, Json], sources: Sources, origins: dict[str, str]) -> spec.Recipe:
    """A checked recipe from its composed mapping (after `extends`, before the steps' defaults).

    Raises:
        ConfigError: every problem of its steps and limits.
    """
    problems = [
        Problem(
            where=sources.where(f"recipe.{key}"),
            what=f"unknown key {key!r} in recipe",
            fix=near(key, (*recipes.KEYS[:2], *recipes.KEYS[3:6])) or "a step's field is steps.<step>.<field>",
        )
        for key in node
        if key not in ("name", "description", "goal", "steps", "limits")
    ]
    goal = node.get("goal", "throughput")
    if goal not in GOALS:
        problems.append(
            Problem(
                where=sources.where("recipe.goal"),
                what=f"unknown goal {goal!r}",
                fix=near(str(goal), GOALS) or f"one of {', '.join(GOALS)}",
            )
        )
    limits = _limits(node.get("limits"), sources, problems)
    steps: list[spec.Step] = []
    written = node.get("steps") or {}
    for name, mapping in written.items():
        if mapping is None and sources.recipe is not None and name not in sources.recipe.steps:
            problems.append(no_such_step(name, sources.recipe.steps))
        elif mapping is not None:
            built = _collected(problems, step, name, mapping, sources, origins)
            steps += [built] if built is not None else []
    present = [name for name, mapping in written.items() if mapping is not None]
    problems += [
        Problem(
            where=sources.where(f"recipe.steps.{entry.name}"),
            what=f"is to run after or before {other!r}, which is no step of this recipe",
            fix=near(other, present),
        )
        for entry in steps
        for other in (*entry.after, *entry.before)
        if other not in present
    ]
    schema.raise_all(problems)
    source = sources.recipe.source if sources.recipe else sources.base
    return spec.Recipe(
        name=str(node.get("name", "recipe")),
        description=str(node.get("description") or ""),
        goal=goal,
        steps=tuple(steps),
        limits=limits,
        source=source,
    )


def no_such_step(name: str, steps: Mapping[str, Json]) -> Problem:
    """The problem of a step name that the recipe does not have."""
    return Problem(
        where=f"steps.{name}",
        what=f"there is no step {name!r}",
        fix=near(name, steps) or f"the recipe's steps: {', '.join(steps) or 'none'}",
    )


def _limits(node: Json, sources: Sources, problems: list[Problem]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for key, value in (node or {}).items() if isinstance(node, Mapping) or node is None else ():
        where = sources.where(f"recipe.limits.{key}")
        if key not in recipes.LIMITS:
            problems.append(
                Problem(where=where, what=f"unknown limit {key!r}", fix=near(key, recipes.LIMITS) or f"known: {', '.join(recipes.LIMITS)}")
            )
        elif value is not None:
            try:
                limits[key] = schema.convert(value, float, f"recipe.limits.{key}")
            except schema.Mismatch as wrong:
                problems.append(Problem(where=where, what=wrong.what, fix=wrong.fix))
    return limits


def step(name: str, mapping: Json, sources: Sources | None = None, origins: dict[str, str] | None = None) -> spec.Step:
    """A checked step: the option file's defaults under the keys of `mapping`, `ignore_extra` added to `ignore`.

    Raises:
        ConfigError: an unknown option (alone), or every wrong key and value.
    """
    sources, origins = sources or Sources(), origins if origins is not None else {}
    key = f"recipe.steps.{name}"
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            Problem(where=sources.where(key), what=f"must be a mapping, got {mapping!r}", fix=f"write steps.{name}={{use: {mapping}}}")
        )
    use = mapping.get("use")
    if not isinstance(use, str) or use == schema.MISSING:
        raise ConfigError(
            Problem(where=sources.where(f"{key}.use"), what="is required and has no value", fix=f"type steps.{name}.use=KIND/OPTION")
        )
    file, defaults = _step_defaults(use, name, sources)
    written = {entry: value for entry, value in mapping.items() if entry not in STEP_KEYS}
    kind = use.split("/", 1)[0]
    cls = registry.get("transforms", kind)
    options, sprung = _accumulated(defaults | written, mapping, name, sources)
    problems: list[Problem] = []
    transform = schema.build(cls, options, key, f"transform {kind}", problems, sources.where)
    order = {entry: _names(mapping.get(entry), f"{key}.{entry}", sources, problems) for entry in ("after", "before")}
    keep = mapping.get("keep") or "always"
    if keep not in ("always", "if_faster"):
        problems.append(Problem(where=sources.where(f"{key}.keep"), what=f"cannot be {keep!r}", fix="write always or if_faster"))
    schema.raise_all([Problem(where=p.where, what=p.what, fix=p.fix.replace("recipe.steps.", "steps.")) for p in problems])
    filled = schema.plain_fields(transform)
    for entry in (*filled, "use"):
        dotted = f"{key}.{entry}"
        given = entry in mapping or sources.origin(dotted) == COMMAND_LINE
        origins[dotted] = sources.origin(dotted) if given else file or f"default of {kind}"
    origins |= {f"{key}.keep": sources.origin(f"{key}.keep") if "keep" in mapping else "default"}
    origins |= {f"{key}.ignore.{index}": source or file for index, source in enumerate(sprung)}
    return spec.Step(name=name, use=use, options=filled, transform=transform, after=order["after"], before=order["before"], keep=keep)


def _step_defaults(use: str, name: str, sources: Sources) -> tuple[str, dict[str, Json]]:
    """The option file of `use` and its content; a registered kind without option files stands for itself."""
    files = paths.option_files("transform", sources.extra)
    kind = use.split("/", 1)[0]
    if use in files:
        return str(files[use]), dict(paths.defaults_of(files[use]))
    if use == kind and kind in registry.names("transforms") and not any(option.startswith(f"{kind}/") for option in files):
        return "", {}
    problem = paths.unknown_option("transform", use, files)
    raise ConfigError(Problem(where=sources.where(f"recipe.steps.{name}.use"), what=problem.what, fix=problem.fix))


def _accumulated(options: dict[str, Json], mapping: Mapping[str, Json], name: str, sources: Sources) -> tuple[dict[str, Json], list[str]]:
    """`ignore` with all of `ignore_extra` behind it, and where each item came from ("" for the option file)."""
    extra, ignore = options.get("ignore_extra"), options.get("ignore")
    key = f"recipe.steps.{name}"
    if not isinstance(ignore, list):
        return options, []
    sprung = [sources.origin(f"{key}.ignore") if "ignore" in mapping else "" for _ in ignore]
    in_file = (sources.recipe.steps.get(name) or {}).get("ignore_extra") if sources.recipe else None
    typed = f"{key}.ignore_extra" in sources.overridden
    if typed and isinstance(in_file, list) and isinstance(extra, list):
        extra = [*in_file, *extra]
    if not isinstance(extra, list):
        return options, sprung
    count = len(in_file) if isinstance(in_file, list) else 0
    for index, item in enumerate(extra):
        if item not in ignore:
            ignore = [*ignore, item]
            sprung.append(COMMAND_LINE if typed and index >= count else _file_origin(sources, f"steps.{name}.ignore_extra.{index}"))
    return options | {"ignore": ignore, "ignore_extra": []}, sprung


def _file_origin(sources: Sources, key: str) -> str:
    return sources.recipe.origins.get(key, sources.recipe.source) if sources.recipe else sources.base


def _names(value: Json, key: str, sources: Sources, problems: list[Problem]) -> tuple[str, ...]:
    """Step names of `after` or `before`: one, several, or none."""
    names = [] if value is None else [value] if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    problems.append(Problem(where=sources.where(key), what=f"must name steps, got {value!r}", fix=f"write {key}=[name]"))
    return ()


def _resolved(built: Mapping[str, Any], settings: Settings) -> dict[str, Json]:
    """The whole run as plain data, in the order in which a reader wants it."""
    recipe_ = built["recipe"]
    steps = {entry.name: _resolved_step(entry) for entry in recipe_.steps}
    tree: dict[str, Json] = {
        "recipe": {
            "name": recipe_.name,
            "description": recipe_.description,
            "goal": recipe_.goal,
            "steps": steps,
            "limits": dict(recipe_.limits),
        }
    }
    for group in ("model", "data", "workload"):
        tree[group] = {"name": built[group].name, "kind": built[group].kind, **built[group].options}
    for group in ("hardware", "quality", "measure"):
        tree[group] = schema.plain_fields(built[group])
    return tree | schema.plain_fields(settings)


def _resolved_step(entry: spec.Step) -> dict[str, Json]:
    order = {name: list(value) for name, value in (("after", entry.after), ("before", entry.before)) if value}
    return {"use": entry.use, **entry.options, **order, "keep": entry.keep}


def _leaves(node: Json, prefix: str = "") -> list[str]:
    if isinstance(node, Mapping) and node:
        return [leaf for key, child in node.items() for leaf in _leaves(child, f"{prefix}.{key}" if prefix else str(key))]
    return [prefix]


assert set(ATTRIBUTIONS) == {"prefix", "leave_one_out", "ends"}
