"""From a composed, plain mapping to a `Run`: every section checked against its dataclass, every problem told at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optforge import recipe as recipes
from optforge import registry, spec
from optforge.config import paths, schema, steps
from optforge.config.origins import COMMAND_LINE, Sources
from optforge.errors import ConfigError, Problem, near
from optforge.measure import limits
from optforge.spec import Json

SECTIONS = ("recipe", "model", "data", "workload", "hardware")
"""The config groups, which are also the first keys of a run."""
PART_KEYS = ("name", "kind")
PATH_KEYS = ("path", "folder", "checkpoint", "weights", "tokenizer")
"""Options of models and data that may be paths."""
ABOVE_ZERO = ("tokens", "window", "items", "min_rounds", "max_s", "budget_s", "steady", "timeout_s")


PEAKS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4", "int4")
"""Product dtypes that a hardware profile may give a peak for."""
FP8_FORMATS = ("e4m3fn", "e4m3fnuz")
"""Names of `kernels.formats.FORMATS`, which a test holds equal: that module imports torch."""
LEAST_RATE = 1e6
"""Peaks and bandwidths below are mistakes of unit (4.8 for 4.8 TB/s)."""
BACKENDS_TO_COME = ("amd", "xla")
"""Backends that shipped profiles name, and that plan and predict without an adapter."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a run that stand alone, beside its sections."""

    save: bool = False
    export: tuple[Literal["compressed_tensors", "huggingface", "torch_export", "aot_inductor", "onnx"], ...] = ()
    downgrade: Literal["allow", "forbid"] = "allow"
    reorder: Literal["allow", "forbid"] = "allow"
    require_target: bool = False
    fail_on: tuple[Literal["regression", "no_gain", "downgrade", "stand_in"], ...] = ()
    seed: int = 0
    trust: bool = False
    output_dir: str = "outputs"


@dataclass(frozen=True, kw_only=True)
class Measure(spec.Measure):
    """`spec.Measure` with its choices."""

    attribution: Literal["prefix", "leave_one_out", "ends"] = "prefix"


@dataclass(frozen=True, kw_only=True)
class SweepOptions(spec.SweepOptions):
    """`spec.SweepOptions` with its choices."""

    devices: Literal["all"] | tuple[str, ...] | None = None
    on_error: Literal["continue", "stop"] = "continue"


SETTINGS = tuple(Settings.__dataclass_fields__)
TOP = (*SECTIONS, "quality", "calibration", "measure", "launch", "sweep", *SETTINGS)
"""Every key that a run may have."""


def run(tree: Mapping[str, Json], sources: Sources, *, cwd: Path, command: str = "") -> spec.Run:
    """The checked run that a composed mapping describes.

    Raises:
        ConfigError: with every problem at once.
    """
    problems: list[Problem] = [unknown_top(key, sources.where(key)) for key in tree if key not in TOP]
    origins: dict[str, str] = {}
    built: dict[str, Any] = {}
    for group in ("model", "data", "workload"):
        built[group] = schema.collected(problems, part, group, tree.get(group), sources, cwd, origins)
    built["hardware"] = schema.collected(problems, _hardware, tree.get("hardware"), sources)
    built["recipe"] = schema.collected(problems, _recipe, tree.get("recipe"), sources, cwd, origins)
    built["quality"] = _section(spec.Quality, "quality", tree, sources, problems)
    built["calibration"] = _section(spec.CalibrationData, "calibration", tree, sources, problems)
    built["measure"] = _section(Measure, "measure", tree, sources, problems)
    built["launch"] = _section(spec.Launch, "launch", tree, sources, problems)
    sweep = _section(SweepOptions, "sweep", tree, sources, problems)
    settings = schema.build(
        Settings, {key: tree[key] for key in SETTINGS if key in tree}, "", kind="a run", problems=problems, where=sources.where
    )
    schema.raise_all(problems)
    resolved = _resolved(built, settings)
    origins |= {key: origins.get(key) or sources.origin(key) for key in _leaves(resolved)}
    values = schema.plain_fields(settings) | {"fail_on": tuple(settings.fail_on), "export": tuple(dict.fromkeys(settings.export))}
    values["output_dir"] = str(cwd / Path(settings.output_dir).expanduser())
    measure = spec.Measure(**schema.plain_fields(built.pop("measure")))
    shared = spec.SweepOptions(**{name: getattr(sweep, name) for name in SweepOptions.__dataclass_fields__})
    return spec.Run(
        **built, measure=measure, sweep=shared, **values, command=command, resolved=resolved, origins=dict(sorted(origins.items()))
    )


def unknown_top(key: str, where: str) -> Problem:
    """The problem of a key that no run has, with the likeliest thing that was meant."""
    fix = near(key, TOP, cutoff=0.65)  # `experiment`, which other projects have, is nearer than a half to `export`
    if key in ("steps", "limits", "goal"):
        fix = f"write recipe.{key}" if key != "steps" else "write them below recipe"
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
    source = schema.build(cls, options, group, kind=f"{group} {kind}", problems=problems, where=sources.where)
    schema.raise_all(problems)
    filled = schema.plain_fields(source)
    origins |= {
        f"{group}.{key}": f"default of {kind}" for key in filled if key not in node and sources.origin(f"{group}.{key}") != COMMAND_LINE
    }
    name = node.get("name") or sources.choices.get(group, kind)
    return spec.Part(name=str(name), kind=kind, options=filled, source=source)


def _absolute(key: str, value: Json, cwd: Path) -> Json:
    """A path option made absolute: a relative path means the folder that the command was started in.

    A bare name may be a name on a hub or a word (`weights: random`), and stays as it is unless it is a `path` that exists.
    """
    if not isinstance(value, str) or key not in PATH_KEYS:
        return value
    explicit = value.startswith(("./", "../", "~")) or value in (".", "..")
    named = "/" in value or key == "path"
    if explicit or (named and value not in ("", schema.MISSING) and (cwd / value).exists()):
        return os.path.normpath(cwd / Path(value).expanduser())
    return value


def _hardware(node: Json, sources: Sources) -> spec.Hardware:
    if not isinstance(node, Mapping) or not node:
        raise ConfigError(
            Problem(where="hardware", what="is required and has no value", fix="type hardware=auto, or the name of a profile")
        )
    problems: list[Problem] = []
    built: spec.Hardware | None = schema.build(
        spec.Hardware, node, "hardware", kind="a hardware profile", problems=problems, where=sources.where
    )
    if built is not None and not recipes.NAME.fullmatch(built.name):
        what = f"{built.name[:40]!r} names a folder later"
        problems.append(Problem(where=sources.where("hardware.name"), what=what, fix="use letters, digits, _ . and -"))
    problems += _wrong_figures(built, sources) if built is not None else []
    schema.raise_all(problems)
    assert built is not None  # build returns None only with a problem
    return built


def _wrong_figures(profile: spec.Hardware, sources: Sources) -> list[Problem]:
    """A backend that no profile and no plug-in has, a dtype that has no peak, an unknown fp8 format, and figures not above zero."""
    problems = []
    backends = sorted({*registry.names("backends"), *BACKENDS_TO_COME})
    if profile.backend not in (*backends, "auto"):
        what, fix = f"unknown backend {profile.backend!r}", near(profile.backend, backends) or f"known: {', '.join(backends)}"
        problems.append(Problem(where=sources.where("hardware.backend"), what=what, fix=fix))
    for dtype in profile.peak_flops:
        if dtype not in PEAKS:
            what, fix = f"unknown dtype {dtype!r}", near(dtype, PEAKS) or f"known: {', '.join(PEAKS)}"
            problems.append(Problem(where=sources.where(f"hardware.peak_flops.{dtype}"), what=what, fix=fix))
    if profile.fp8_format not in (None, *FP8_FORMATS):
        known = near(profile.fp8_format, FP8_FORMATS) or f"known: {', '.join(FP8_FORMATS)}, or null without fp8 units"
        problems.append(Problem(where=sources.where("hardware.fp8_format"), what=f"unknown format {profile.fp8_format!r}", fix=known))
    figures = {f"peak_flops.{dtype}": peak for dtype, peak in profile.peak_flops.items()}
    figures |= {
        key: getattr(profile, key)
        for key in ("memory_bytes", "bandwidth_bytes_per_s", "link_bytes_per_s", "devices", "shared_memory_bytes", "price_per_hour")
    }
    problems += [
        Problem(where=sources.where(f"hardware.{key}"), what=f"{figure:g} a second is no device's", fix=f"write {key}=4.8e+12 for 4.8 T/s")
        for key, figure in figures.items()
        if figure is not None and 0 < figure < LEAST_RATE and key.startswith(("peak_flops", "bandwidth"))
    ]
    return problems + [
        Problem(where=sources.where(f"hardware.{key}"), what=f"must be above 0, got {figure}", fix="leave out what is unknown or absent")
        for key, figure in figures.items()
        if figure is not None and figure <= 0
    ]


def hardware(name: str) -> spec.Hardware:
    """The profile of that name.

    Raises:
        ConfigError: there is none; near names are given.
    """
    path = paths.option_file("hardware", name)
    return profile(paths.defaults_of(path), str(path))


def profile(node: Json, where: str) -> spec.Hardware:
    """The profile that a file holds, checked as strictly as one on the command line.

    Raises:
        ConfigError: an unknown key, or a value that no device has; `where` names the file.
    """
    return _hardware(node, Sources(files={"hardware": where}))


def _section(cls: type, name: str, tree: Mapping[str, Json], sources: Sources, problems: list[Problem]) -> Any:
    node = tree.get(name)
    if node is not None and not isinstance(node, Mapping):
        problems.append(Problem(where=sources.where(name), what=f"must be a mapping, got {node!r}", fix=f"write {name}.<key>=VALUE"))
        return None
    built = schema.build(cls, node or {}, name, kind=name, problems=problems, where=sources.where)
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
    return steps.recipe(node, sources, origins)


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
            "limits": limits.nested(recipe_.limits),
        }
    }
    for group in ("model", "data", "workload"):
        tree[group] = {"name": built[group].name, "kind": built[group].kind, **built[group].options}
    for group in ("hardware", "quality", "calibration", "measure", "launch"):
        tree[group] = schema.plain_fields(built[group])
    return tree | schema.plain_fields(settings)


def _resolved_step(entry: spec.Step) -> dict[str, Json]:
    order = {name: list(value) for name, value in (("after", entry.after), ("before", entry.before)) if value}
    return {"use": entry.use, **entry.options, **order, "keep": entry.keep}


def _leaves(node: Json, prefix: str = "") -> list[str]:
    if isinstance(node, Mapping) and node:
        return [leaf for key, child in node.items() for leaf in _leaves(child, f"{prefix}.{key}" if prefix else str(key))]
    return [prefix]
