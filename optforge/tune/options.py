"""The keys of a search: `tune.*` says how it searches, `limits.*` what its result must hold.

They are no keys of a run: each candidate is an ordinary run, which can be repeated alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from optforge import config, safe_yaml
from optforge.config import schema
from optforge.errors import ConfigError, Problem, UserError, near
from optforge.measure.limits import LIMITS, METRICS
from optforge.spec import Json

TUNE, LIMIT = "tune.", "limits."
OBJECTIVES = ("latency", "memory", "size", "quality")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How a search is done."""

    budget_s: float = 900.0
    """Seconds for everything: plans, jobs and the final round."""
    objectives: tuple[Literal["latency", "memory", "size", "quality"], ...] = ("latency",)
    """What is to be small: time of a call, peak memory, weight bytes, difference from the baseline. The first names the winner;
    several end in a Pareto front."""
    sampler: Literal["tpe", "nsga2", "random", "none"] = "tpe"
    """Of Optuna's; none: only the recipes that were given or found, no search."""
    seed: int = 0
    """Of the sampler."""
    candidates: int | None = None
    """Recipes that are measured at most; null: as many as the time allows."""
    eta: int = 3
    """Successive halving: one in `eta` goes on to a measurement `eta` times as long."""
    finalists: int = 3
    """Recipes in the final round."""
    resume: str | None = None
    """Folder of an earlier search for the same model, workload and device, whose finished jobs are kept."""


@dataclass(frozen=True, kw_only=True)
class FigureLimit:
    """A bound on one figure of a row: a greatest or a least allowed value."""

    field: str
    words: str
    least: bool = False


FIGURE_LIMITS = {
    "max_latency_ms": FigureLimit(field="latency_ms", words="latency in ms"),
    "min_tokens_per_s": FigureLimit(field="tokens_per_s", words="tokens/s", least=True),
    "min_items_per_s": FigureLimit(field="items_per_s", words="items/s", least=True),
    "max_peak_memory_bytes": FigureLimit(field="peak_memory_bytes", words="peak memory in bytes"),
    "max_weight_bytes": FigureLimit(field="weight_bytes", words="weight bytes"),
}
"""Limits that a recipe cannot hold, since they depend on model and device; here they can be asked for."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user asked for; `quality` replaces the limits of every recipe where it is not empty."""

    quality: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, float]:
        return {**self.quality, **self.figures}


@dataclass(frozen=True, kw_only=True)
class Words:
    """A command line, sorted."""

    options: TuneOptions
    limits: Limits
    recipes: tuple[str, ...]
    """Names and paths; empty where none were given."""
    base: tuple[str, ...]
    """The overrides that every candidate's run has."""


def read(argv: Sequence[str], *, cwd: Path) -> Words:
    """Sorts and checks the words of `optforge tune`.

    Raises:
        ConfigError: with every problem of the keys that are tune's own.
    """
    problems: list[Problem] = []
    own: dict[str, Json] = {}
    limits: dict[str, float] = {}
    recipes: list[str] = []
    base: list[str] = []
    for word in argv:
        key, equals, text = word.lstrip("+").partition("=")
        if key.startswith(TUNE):
            if (value := _value(key, equals, text, problems)) is not None or text == "null":
                own[key.removeprefix(TUNE)] = value
        elif key.removeprefix("recipe.").startswith(LIMIT):
            _limit(key.removeprefix("recipe.").removeprefix(LIMIT), _value(key, equals, text, problems), limits, problems)
        elif key == "recipe" and equals:
            recipes += [one.partition("=")[2] for one in config.choices(f"recipe={text}", cwd=cwd)]
        elif (problem := _foreign(word, key)) is not None:
            problems.append(problem)
        else:
            base.append(word)
    options = _options(own, problems)
    schema.raise_all(problems)
    assert options is not None
    quality = {key: value for key, value in limits.items() if _of_quality(key)}
    figures = {key: value for key, value in limits.items() if key in FIGURE_LIMITS}
    return Words(options=options, limits=Limits(quality=quality, figures=figures), recipes=tuple(recipes), base=tuple(base))


def _value(key: str, equals: str, text: str, problems: list[Problem]) -> Json:
    if not equals:
        problems.append(Problem(where=key, what="is not of the form key=value", fix=f"type {key}=VALUE"))
        return None
    try:
        return safe_yaml.loads(text, key)
    except UserError as error:
        problems.extend(error.problems)
        return None


def _of_quality(name: str) -> bool:
    """Whether a recipe may hold it; `min_metric.f1` is about a figure that the user's own metric names."""
    key, _, figure = name.partition(".")
    return key in (METRICS if figure else LIMITS)


def _limit(name: str, value: Json, limits: dict[str, float], problems: list[Problem]) -> None:
    known = (*LIMITS, *FIGURE_LIMITS)
    where = f"limits.{name}"
    if name not in known and not _of_quality(name):
        problems.append(Problem(where=where, what=f"unknown limit {name!r}", fix=near(name, known) or f"known: {', '.join(known)}"))
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        problems.append(Problem(where=where, what=f"must be a number, got {value!r}", fix=f"type {where}=0.01"))
    else:
        limits[name] = float(value)


def _foreign(word: str, key: str) -> Problem | None:
    """What says something of a recipe's steps, or asks Hydra for something else than a run."""
    bare = key.lstrip("~")
    if word.startswith("-") and not word.startswith("--config-dir"):
        return Problem(where=word, what="does not go with tune", fix="leave it out; optforge tune --help lists its options")
    if bare.startswith(("steps.", "recipe.")):
        return Problem(
            where=word, what="changes a step, which is what tune searches", fix="write it into a file and give recipe=./FILE.yaml"
        )
    if bare.startswith(("sweep.", "hydra.", "hydra/")):
        return Problem(where=word, what="is a key of a sweep or of Hydra, and tune runs its jobs itself", fix="leave it out")
    return None


def _options(own: dict[str, Json], problems: list[Problem]) -> TuneOptions | None:
    before = len(problems)
    if isinstance(own.get("objectives"), str):
        own["objectives"] = [own["objectives"]]
    made: TuneOptions | None = schema.build(TuneOptions, own, "tune", kind="tune", problems=problems, where=lambda key: key)
    if made is None:
        return None
    if made.budget_s <= 0:
        problems.append(Problem(where="tune.budget_s", what=f"must be above 0, got {made.budget_s:g}", fix="type tune.budget_s=900"))
    for name, least in (("eta", 2), ("finalists", 1), ("candidates", 1)):
        value = getattr(made, name)
        if value is not None and value < least:
            problems.append(Problem(where=f"tune.{name}", what=f"must be {least} or more, got {value}", fix=f"type tune.{name}={least}"))
    if not made.objectives or len(set(made.objectives)) < len(made.objectives):
        fix = f"name some of {', '.join(OBJECTIVES)}, each once"
        problems.append(Problem(where="tune.objectives", what=f"cannot be [{','.join(made.objectives)}]", fix=fix))
    return made if len(problems) == before else None


def refuse_contradictions(words: Words, *, quality_enabled: bool) -> None:
    """
    Raises:
        ConfigError: a figure of quality is asked for, and quality is not measured.
    """
    asked = [f"limits.{key}" for key in words.limits.quality]
    asked += ["tune.objectives=quality"] if "quality" in words.options.objectives else []
    if asked and not quality_enabled:
        what = "needs quality to be measured, and quality.enabled is false"
        raise ConfigError(*(Problem(where=key, what=what, fix="leave quality.enabled out") for key in asked))
