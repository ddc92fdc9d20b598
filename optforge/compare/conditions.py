"""What must be alike before two measured figures may stand in one ranking, and a plain refusal where it is not.

A figure says nothing without what it was measured under. Two runs on two devices, with two versions of PyTorch or with
two batch sizes are two experiments, however alike their tables look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optforge.errors import ConfigError, Problem
from optforge.report import figures
from optforge.spec import Json, Report

PACKAGES = ("optforge", "python", "torch", "triton", "transformers", "torchao")
"""Packages whose version can change a measured figure."""
DEVICE = ("device", "cpu", "torch_cpu_capability", "cores", "multiprocessors", "memory_bytes", "power_limit_w", "governor")
SOFTWARE = ("driver", "cuda", "hip", "cudnn", "compiler", "jax", "jaxlib", "libtpu")
MEASURE = ("warmup", "min_rounds", "max_s", "steady", "batch_ms", "budget_s")
QUALITY = ("enabled", "tokens", "window", "items", "metric")
CONTENDED = "contended"
UNKNOWN, NONE = "not recorded", "none"
EVALUATED, THREADS = "evaluated on", "threads"
"""Conditions that some runs do not have at all: one that measured no quality, one that did not run on a CPU."""
DIGEST = 12
"""Characters of a digest that are shown and compared."""
NAMED = 2
"""Runs named for each value of a condition; the rest are counted."""

Conditions = dict[str, str]
"""Condition -> its value as text; what a report does not say is UNKNOWN."""


def conditions(report: Report) -> Conditions:
    """Everything a measured figure of this report depends on, apart from the recipe and the target it is for."""
    environment, settings = report.environment, report.settings
    facts = _mapping(environment.get("device"))
    found = {
        "device": _joined({"name": report.device.get("name"), **_picked(facts, DEVICE), "cores": environment.get("cores")}),
        "versions": _joined({name: version or NONE for name, version in _picked(_mapping(environment.get("versions")), PACKAGES).items()}),
        "device software": _joined(_picked(facts, SOFTWARE)),
        THREADS: _joined(_picked(facts, ("threads",))),
        "model": _model(report),
        "data": _joined(report.data),
        "workload": _joined(report.workload),
        "measure": _joined(_picked(_mapping(settings.get("measure")), MEASURE)),
        "quality": _joined(_picked(_mapping(settings.get("quality")), QUALITY)),
        EVALUATED: _joined({"data": report.quality.data, "count": report.quality.count}) if report.quality else "",
        CONTENDED: _text(environment.get("contended", False)),
    }
    return {key: value or UNKNOWN for key, value in found.items()}


def _model(report: Report) -> str:
    """The weights by their digest; random ones by the seed they were made from."""
    model = report.model
    named = _picked(model, ("name", "family", "dtype", "weights"))
    if model.get("digest"):
        named["digest"] = str(model["digest"])[:DIGEST]
    else:
        named["seed"] = report.settings.get("seed")
    return _joined(named)


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def _picked(values: Mapping[str, Json], keys: Sequence[str]) -> dict[str, Json]:
    return {key: values[key] for key in keys if key in values}


def _joined(values: Mapping[str, Json]) -> str:
    return ", ".join(f"{key} {_text(value)}" for key, value in values.items() if value is not None)


def _text(value: Json) -> str:
    return figures.named("", value) if isinstance(value, bool | list) else str(value)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One condition that is not alike: each value, with the names of the runs that have it."""

    condition: str
    values: dict[str, list[str]]

    def __str__(self) -> str:
        return "; ".join(f"{_short(value, self.values)} ({some(names)})" for value, names in self.values.items())


def differences(named: Mapping[str, Conditions]) -> list[Difference]:
    """Conditions in which the runs differ; `named` maps a run's name to its conditions.

    A run that does not say (an older report) differs from nobody, since nothing is known to differ: see `unrecorded`.
    """
    found = []
    for condition in next(iter(named.values()), {}):
        values: dict[str, list[str]] = {}
        for name, own in named.items():
            values.setdefault(own[condition], []).append(name)
        values.pop(UNKNOWN, None)
        if len(values) > 1:
            found.append(Difference(condition=condition, values=values))
    return found


def unrecorded(named: Mapping[str, Conditions]) -> list[str]:
    """Conditions that some runs record and others do not, as sentences."""
    found = []
    for condition in next(iter(named.values()), {}):
        missing = [name for name, own in named.items() if own[condition] == UNKNOWN]
        if condition not in (EVALUATED, THREADS) and 0 < len(missing) < len(named):
            found.append(f"{condition} is not recorded in {some(missing)}; taken as the same as in the other runs")
    return found


def disturbed(named: Mapping[str, Conditions]) -> list[str]:
    """A sentence where something else used the device meanwhile, also where it did so in every run."""
    runs = [name for name, own in named.items() if own[CONTENDED] == "yes"]
    return [f"something else used the device while it was measured: {some(runs)}"] if runs else []


def refuse(found: Sequence[Difference]) -> None:
    """Ends the comparison where conditions differ.

    Raises:
        ConfigError: one problem for each condition that differs.
    """
    fix = "compare them apart, or add --anyway"
    if found:
        raise ConfigError(*(Problem(where=item.condition, what=f"differs between the runs: {item}", fix=fix) for item in found))


def groups(named: Mapping[str, Conditions], found: Sequence[Difference]) -> dict[str, str]:
    """Run -> letter of its group of equal conditions, `A` first; empty where all are alike."""
    if not found:
        return {}
    keys = [item.condition for item in found]
    letters: dict[tuple[str, ...], str] = {}
    return {name: letters.setdefault(tuple(own[key] for key in keys), _letter(len(letters))) for name, own in named.items()}


def _letter(index: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    return (_letter(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    if len(names) <= NAMED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def _short(value: str, values: Mapping[str, list[str]]) -> str:
    """Only the parts of a value that the other values do not share, for one readable line."""
    parts = value.split(", ")
    shared = set.intersection(*(set(other.split(", ")) for other in values))
    return ", ".join(part for part in parts if part not in shared) or "without it"
