"""Hydra composes, `build` checks: a single run, every job of a sweep before it starts, or the run of a job inside Hydra."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optforge import spec
from optforge.config import argv, build, paths, saved, schema, steps, store
from optforge.config.flags import Arguments
from optforge.config.origins import Sources, as_typed
from optforge.errors import ConfigError, Problem, UserError
from optforge.spec import Json

CONFIG_NAME = "config"
CONFIG_PATH = str(paths.conf_dir())
"""What `hydra.main` is given; an absolute folder, so that a user's --config-dir stays free."""
MAX_JOBS = 2000
_NOT_THERE = re.compile(r"Could not delete from config\. '(?P<key>.+)' does not exist\.")


def compose(arguments: Arguments, *, cwd: Path, command: str = "") -> spec.Run:
    """The checked run of a command line.

    Raises:
        ConfigError: with every problem at once.
    """
    with _hydra():
        return _compose(arguments.overrides, cwd, command)


def compose_all(arguments: Arguments, cwd: Path, command: str = "") -> list[spec.Run]:
    """Every run of a sweep in the sweeper's order, all checked; of one that searches, the first of each choice.

    Raises:
        ConfigError: with every problem of every job, each told once, with the job's own overrides where it is not in all.
    """
    jobs = list(itertools.islice(jobs_of(arguments), MAX_JOBS + 1))
    if len(jobs) > MAX_JOBS:
        raise ConfigError(
            Problem(where="-m", what=f"the sweep has more than {MAX_JOBS} jobs", fix="give fewer values, or a sweeper that searches")
        )
    runs: list[spec.Run] = []
    found: dict[Problem, list[str]] = {}
    with _hydra():
        for overrides, varied in jobs:
            try:
                runs.append(_compose(overrides, cwd, command))
            except UserError as error:
                for problem in error.problems:
                    found.setdefault(problem, []).append(" ".join(varied))
    if found:
        raise ConfigError(*(_of_jobs(problem, places, len(jobs)) for problem, places in found.items()))
    return runs


def _of_jobs(problem: Problem, places: list[str], count: int) -> Problem:
    if len(places) == count:
        return problem
    return Problem(where=f"{problem.where} [{places[0]}]", what=problem.what, fix=problem.fix)


def searches(arguments: Arguments) -> bool:
    """Whether the sweeper decides about later jobs when it has seen how earlier ones ended."""
    return any(text.startswith("hydra/sweeper=") and not text.endswith("=basic") for text in arguments.overrides)


def jobs_of(arguments: Arguments) -> Iterator[tuple[list[str], list[str]]]:
    """Each job's overrides in the sweeper's order, and those among them that differ between jobs."""
    parser = OverridesParser.create()
    overrides, searching = arguments.overrides, searches(arguments)
    choices: list[list[str]] = []
    for text in overrides:
        parsed = parser.parse_override(text)
        key = parsed.get_key_element()
        if parsed.is_discrete_sweep():
            values = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
            choices.append(values[:1] if searching else values)
        elif parsed.is_sweep_override():
            choices.append([f"{key}={getattr(parsed.value(), 'start', None)}"])
        else:
            choices.append([text])
    for job in itertools.product(*choices):
        yield list(job), [text for text in job if text not in overrides]


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra initialized on the shipped options, for code that may itself run inside a Hydra application."""
    instance = GlobalHydra.instance()
    outer, instance.hydra = instance.hydra, None
    try:
        with hydra.initialize_config_dir(config_dir=CONFIG_PATH, version_base="1.3", job_name="optforge"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def _compose(overrides: Sequence[str], cwd: Path, command: str) -> spec.Run:
    try:
        cfg = hydra.compose(CONFIG_NAME, overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_told(error)) from error
    return _build(cfg, cfg["hydra"], cwd, command)


def _told(error: Exception) -> Problem:
    """What Hydra, OmegaConf or YAML says, in one line."""
    cause = error.__cause__ if error.__cause__ is not None and str(error.__cause__).strip() else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        what = lines[0]
        if what == "Cannot merge DictConfig with ListConfig":  # said of both, whichever was there
            what = "must be a list, got a mapping" if cause.object_type is list else "must be a mapping, got a list"
        return Problem(where=as_typed(cause.full_key), what=what)
    if missing := _NOT_THERE.fullmatch(lines[0]):
        key = as_typed(missing["key"])
        return Problem(
            where=f"~{key}", what="there is no such value to drop", fix=f"see optforge show; type {key}=VALUE to change a default"
        )
    return Problem(where="config", what=" ".join(lines)[:400])


def run_from_cfg(cfg: DictConfig, *, cwd: Path, command: str = "") -> spec.Run:
    """The checked run of a job that Hydra has composed; called inside the job.

    Raises:
        ConfigError: with every problem at once.
    """
    return _build(cfg, HydraConfig.get() if HydraConfig.initialized() else None, cwd, command)


def _build(cfg: DictConfig, node: Any, cwd: Path, command: str) -> spec.Run:
    problems: list[Problem] = []
    tree = {str(key): _value(cfg, key, str(key), problems) for key in cfg if key != "hydra"}
    try:
        run = build.run(tree, _sources(node, cwd), cwd=cwd, command=command)
    except ConfigError as error:  # an unresolved key stands as missing in the tree: tell it once
        told = {problem.where for problem in problems}
        raise ConfigError(*problems, *(problem for problem in error.problems if problem.where.split(" ")[0] not in told)) from error
    schema.raise_all(problems)
    return run


def _plain(node: DictConfig | ListConfig, prefix: str, problems: list[Problem]) -> Any:
    """The composed configuration as plain data, interpolations resolved; every one that cannot be is a problem."""
    if isinstance(node, ListConfig):
        return [_value(node, index, f"{prefix}{index}", problems) for index in range(len(node))]
    return {str(key): _value(node, key, f"{prefix}{key!s}", problems) for key in node}


def _value(node: Any, key: Any, dotted: str, problems: list[Problem]) -> Json:
    if OmegaConf.is_missing(node, key):
        return schema.MISSING
    try:
        child = node[key]
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        problems.append(Problem(where=dotted, what=f"cannot be resolved ({reason})", fix=f"type {dotted}=VALUE"))
        return schema.MISSING
    return _plain(child, f"{dotted}.", problems) if isinstance(child, DictConfig | ListConfig) else child


def _sources(node: Any, cwd: Path) -> Sources:
    """Where the values came from, as Hydra's own record of the run tells it."""
    base = str(paths.conf_dir() / f"{CONFIG_NAME}.yaml")
    if node is None:
        return Sources(base=base)
    choices = {str(group): str(option) for group, option in node.runtime.choices.items() if option is not None}
    extra = tuple(_folders(node))
    texts = OmegaConf.to_container(node.overrides.task, resolve=False)
    overrides = [str(text) for text in texts] if isinstance(texts, list) else []
    from_file = next((path for group in build.SECTIONS if (path := store.run_file_of(choices.get(group, ""))) is not None), None)
    if from_file is not None:
        base = str(from_file)
        own = set(saved.as_overrides(from_file, frozenset(), trusted=True))
        overrides = [text for text in overrides if text not in own]
    files: dict[str, str] = {}
    for group in ("model", "data", "workload", "hardware"):
        option = choices.get(group, "")
        found = store.file_of(option) or paths.option_files(group, extra).get(option)
        files |= {group: str(found)} if found else {}
    keys = frozenset(text.lstrip("+~").partition("=")[0] for text in overrides) - set(build.SECTIONS)
    return Sources(base=base, choices=choices, files=files, recipe=_recipe_file(choices.get("recipe"), cwd), overridden=keys, extra=extra)


def _recipe_file(option: str | None, cwd: Path) -> Any:
    if not option or option == "null":
        return None
    saved_run = store.run_file_of(option)
    return saved.recipe_of(saved_run) if saved_run else store.load_recipe(option, cwd=cwd)


def _folders(node: Any) -> Iterator[Path]:
    """The user's own option folders on Hydra's search path."""
    for source in node.runtime.config_sources:
        if source.schema == "file" and source.provider not in ("main", "hydra", "schema"):
            yield Path(source.path)


def recipe(name_or_path: str | Path, overrides: Sequence[str] = (), *, cwd: Path | None = None) -> spec.Recipe:
    """A checked recipe by name or path, with overrides such as `steps.weights.group_size=64`.

    Raises:
        ConfigError: with every problem at once.
    """
    folder = cwd or Path.cwd()
    if overrides:
        return compose(argv.parse([f"recipe={name_or_path}", *overrides], cwd=folder), cwd=folder).recipe
    loaded = store.load_recipe(str(name_or_path), cwd=folder)
    return steps.recipe(loaded.mapping(), Sources(recipe=loaded), {})
