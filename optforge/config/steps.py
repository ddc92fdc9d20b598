"""The recipe of a run: its steps with their options' defaults filled in, each checked against its transform's fields."""

from __future__ import annotations

from collections.abc import Mapping

from optforge import registry, spec
from optforge.config import paths, schema
from optforge.config.origins import COMMAND_LINE, Sources, as_typed
from optforge.errors import ConfigError, Problem, near
from optforge.measure import limits as limits_
from optforge.measure.limits import LIMITS
from optforge.recipe import NAME
from optforge.spec import GOALS, Json

RECIPE_KEYS = ("name", "description", "goal", "steps", "limits")
"""Keys of a composed recipe; `extends` and the versions are dealt with when its file is read."""
STEP_KEYS = ("use", "after", "before", "keep")


def recipe(node: Mapping[str, Json], sources: Sources, origins: dict[str, str]) -> spec.Recipe:
    """A checked recipe from its composed mapping (after `extends`, before the steps' defaults).

    Raises:
        ConfigError: every problem of its steps and limits.
    """
    problems = [_unknown_key(key, sources) for key in node if key not in RECIPE_KEYS]
    goal = node.get("goal", "throughput")
    if goal not in GOALS:
        fix = near(str(goal), GOALS) or f"write one of {', '.join(GOALS)}"
        problems.append(Problem(where=sources.where("recipe.goal"), what=f"unknown goal {goal!r}", fix=fix))
    name = str(node.get("name", "recipe"))
    if not NAME.fullmatch(name):
        problems.append(
            Problem(where=sources.where("recipe.name"), what=f"{name[:40]!r} names a folder later", fix="use letters, digits, _ . and -")
        )
    for key in ("steps", "limits"):
        if not isinstance(node.get(key) or {}, Mapping):
            problems.append(
                Problem(
                    where=sources.where(f"recipe.{key}"),
                    what=f"must be a mapping, got {node[key]!r}",
                    fix=f"write recipe.{key}={{name: ...}}",
                )
            )
    schema.raise_all(problems)
    limits = _limits(node.get("limits") or {}, sources, problems)
    steps: list[spec.Step] = []
    written = node.get("steps") or {}
    for entry, mapping in written.items():
        if mapping is None and sources.recipe is not None and entry not in sources.recipe.steps:
            problems.append(no_such_step(entry, sources.recipe.steps))
        elif mapping is not None:
            built = schema.collected(problems, step, entry, mapping, sources, origins)
            steps += [built] if built is not None else []
    present = [entry for entry, mapping in written.items() if mapping is not None]
    problems += [
        Problem(
            where=sources.where(f"recipe.steps.{one.name}.{side}"),
            what=f"is to run {side} {other!r}, which is " + ("itself" if other == one.name else "no step of this recipe"),
            fix=near(other, [name for name in present if name != one.name]) or f"steps: {', '.join(present)}",
        )
        for one in steps
        for side, others in (("after", one.after), ("before", one.before))
        for other in others
        if other not in present or other == one.name
    ]
    schema.raise_all(problems)
    source = sources.recipe.source if sources.recipe else sources.base
    return spec.Recipe(
        name=name,
        description=str(node.get("description") or ""),
        goal=goal,
        steps=tuple(steps),
        limits=limits,
        source=source,
    )


def _unknown_key(key: str, sources: Sources) -> Problem:
    fix = near(key, RECIPE_KEYS) or f"a recipe has {', '.join(RECIPE_KEYS)}; a field of a step is steps.<step>.{key}"
    return Problem(where=sources.where(f"recipe.{key}"), what=f"unknown key {key!r} in recipe", fix=fix)


def no_such_step(name: str, steps: Mapping[str, Json]) -> Problem:
    """The problem of a step name that the recipe does not have."""
    fix = near(name, steps) or f"the recipe's steps: {', '.join(steps) or 'none'}"
    return Problem(where=f"steps.{name}", what=f"there is no step {name!r}", fix=fix)


def _limits(node: Mapping[str, Json], sources: Sources, problems: list[Problem]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for key, value in limits_.flat(node).items():
        where = sources.where(f"recipe.limits.{key}")
        if key.partition(".")[0] not in LIMITS:
            problems.append(Problem(where=where, what=f"unknown limit {key!r}", fix=near(key, LIMITS) or f"known: {', '.join(LIMITS)}"))
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
    use = _use(name, mapping, sources)
    kind = use.split("/", 1)[0]
    file, options = _defaults(use, name, sources)
    options |= {entry: value for entry, value in mapping.items() if entry not in STEP_KEYS}
    cls = registry.transform(use)
    ignored_by = _accumulate(options, mapping, name, sources)
    problems: list[Problem] = []
    transform = schema.build(cls, options, key, kind=f"transform {kind}", problems=problems, where=sources.where)
    order = {entry: _names(mapping.get(entry), f"{key}.{entry}", sources, problems) for entry in ("after", "before")}
    keep = mapping.get("keep") or "always"
    if keep not in ("always", "if_faster"):
        problems.append(Problem(where=sources.where(f"{key}.keep"), what=f"cannot be {keep!r}", fix="write always or if_faster"))
    schema.raise_all(problems)
    filled = schema.plain_fields(transform)
    for entry in (*filled, "use", "keep", *(entry for entry, names in order.items() if names)):
        given = entry in mapping or sources.origin(f"{key}.{entry}") == COMMAND_LINE
        default = "default" if entry in STEP_KEYS else file or f"default of {kind}"
        origins[f"{key}.{entry}"] = sources.origin(f"{key}.{entry}") if given else default
    origins |= {f"{key}.ignore.{index}": origin or file for index, origin in enumerate(ignored_by)}
    return spec.Step(name=name, use=use, options=filled, transform=transform, after=order["after"], before=order["before"], keep=keep)


def _use(name: str, mapping: Json, sources: Sources) -> str:
    key = f"recipe.steps.{name}"
    if not isinstance(mapping, Mapping):
        fix = f"write steps.{name}={{use: {mapping}}}"
        raise ConfigError(Problem(where=sources.where(key), what=f"must be a mapping, got {mapping!r}", fix=fix))
    use = mapping.get("use")
    if not isinstance(use, str) or use == schema.MISSING:
        fix = f"type steps.{name}.use=KIND/OPTION; see optforge list transforms"
        raise ConfigError(Problem(where=sources.where(f"{key}.use"), what="is required and has no value", fix=fix))
    return use


def _defaults(use: str, name: str, sources: Sources) -> tuple[str, dict[str, Json]]:
    """The option file of `use` and its content; a registered kind without option files stands for itself."""
    files = paths.option_files("transform", sources.extra)
    kind = use.split("/", 1)[0]
    if use in files:
        return str(files[use]), dict(paths.defaults_of(files[use]))
    if use == kind and kind in registry.names("transforms") and not any(option.startswith(f"{kind}/") for option in files):
        return "", {}
    problem = paths.unknown_option("transform", use, files)
    raise ConfigError(Problem(where=sources.where(f"recipe.steps.{name}.use"), what=problem.what, fix=problem.fix))


def _accumulate(options: dict[str, Json], mapping: Mapping[str, Json], name: str, sources: Sources) -> list[str]:
    """Moves `ignore_extra` of `options` behind its `ignore`, and says where each item of `ignore` came from.

    A list on the command line replaces a file's `ignore`; `ignore_extra` there adds to the file's. "" is the option file.
    """
    key = f"steps.{name}"
    ignore, extra = options.get("ignore"), options.get("ignore_extra")
    if not isinstance(ignore, list):
        return []
    origins = [sources.origin(f"recipe.{key}.ignore") if "ignore" in mapping else ""] * len(ignore)
    if not isinstance(extra, list):
        return origins
    in_file = (sources.recipe.steps.get(name) or {}).get("ignore_extra") if sources.recipe else None
    in_file = in_file if isinstance(in_file, list) else []
    typed = sources.origin(f"recipe.{key}.ignore_extra") == COMMAND_LINE
    added = [(item, sources.in_recipe(f"{key}.ignore_extra.{index}")) for index, item in enumerate(in_file)]
    added += [(item, COMMAND_LINE) for item in extra] if typed else [(item, sources.base) for item in extra if item not in in_file]
    fresh = [(item, origin) for item, origin in added if item not in ignore]
    options["ignore"] = [*ignore, *(item for item, _ in fresh)]
    options.pop("ignore_extra")
    return [*origins, *(origin for _, origin in fresh)]


def _names(value: Json, key: str, sources: Sources, problems: list[Problem]) -> tuple[str, ...]:
    """Step names of `after` or `before`: one, several, or none."""
    names = [] if value is None else [value] if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    problems.append(Problem(where=sources.where(key), what=f"must name steps, got {value!r}", fix=f"write {as_typed(key)}=[name]"))
    return ()
