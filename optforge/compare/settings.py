"""In which settings runs differ, and the short name that tells each run from the others.

A sweep varies two or three keys, but a recipe's choice drags dozens behind it (every option of every step). A name made
of all of them cannot be read, so it is made of the few that determine the rest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

from optforge.report import view
from optforge.spec import Json, Report

Settings = dict[str, str]
"""Dotted key -> value as text; a key that a run does not have is absent."""

FIRST = ("recipe.name", "hardware", "model.name", "workload.name")
"""Keys that a name is made of before any other; their values stand alone in it, since everybody knows what they are."""
GROUPS = ("recipe", "model", "data", "workload")
"""Chosen by name; the name is one of their settings."""
WITHOUT = (
    "output_dir",
    "command",
    "fail_on",
    "save",
    "export",
    "recipe.description",
    "recipe.source",
    "model.kind",
    "data.kind",
    "workload.kind",
)
"""Settings that change no figure, or only repeat another one."""
ABSENT = "-"
MAX_VALUE = 40
"""Characters of one value in a name."""


def settings(report: Report) -> Settings:
    """Every setting of one run. A report of an older OptForge has fewer."""
    tree: dict[str, Json] = dict(report.settings) if report.settings else _older(report)
    tree["hardware"] = report.target.get("name")
    steps = (tree.get("recipe") or {}).get("steps")
    if steps is not None:
        tree = {**tree, "recipe": {key: value for key, value in tree["recipe"].items() if key != "steps"}, "steps": steps}
    leaves = {key: value for key, value in view.flat(tree) if value is not None and not (key.endswith(".keep") and value == "always")}
    return {key: _text(value) for key, value in leaves.items() if key not in WITHOUT}


def overridden(overrides: Sequence[str]) -> Settings:
    """The settings that a job's overrides name, keyed as in `settings`; a chosen recipe or model as its name."""
    found = {}
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        key = key.removeprefix("recipe.") if key.startswith("recipe.steps.") else key
        found[f"{key}.name" if key in GROUPS else key] = value
    return found


def _older(report: Report) -> dict[str, Json]:
    """What a report says of its settings where it has no `settings` of its own."""
    order = {str(item.get("name")): {"use": item.get("requested") or item.get("use")} for item in report.plan.get("order") or []}
    steps = order or {step.name: {"use": step.use} for step in report.steps}
    keys = ("name", "kind", "dtype", "weights", "path")
    return {
        "recipe": {**{key: report.recipe.get(key) for key in ("name", "goal", "limits")}, "steps": steps},
        "model": {key: report.model.get(key) for key in keys},
        "data": dict(report.data),
        "workload": {key: value for key, value in report.workload.items() if key not in ("unit", "units")},
    }


def _text(value: Json) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing(runs: Sequence[Settings], varied: Sequence[str] = ()) -> list[str]:
    """Keys in which the runs are not all alike, those that were varied on purpose first."""
    keys = dict.fromkeys(key for run in runs for key in run)
    differ = {key for key in keys if len({run.get(key, ABSENT) for run in runs}) > 1}
    leading = [key for key in dict.fromkeys((FIRST[0], *varied, *FIRST)) if key in differ]
    return [*leading, *sorted(differ - set(leading))]


def deciding(runs: Sequence[Settings], keys: Sequence[str]) -> list[str]:
    """The keys, in their order, that are not decided by those before them: equal in all of these, equal in everything."""
    found: list[str] = []
    for key in keys:
        groups: dict[tuple[str, ...], set[str]] = {}
        for run in runs:
            groups.setdefault(tuple(run.get(one, ABSENT) for one in found), set()).add(run.get(key, ABSENT))
        if any(len(values) > 1 for values in groups.values()):
            found.append(key)
    return found


def names(runs: Sequence[Settings], keys: Sequence[str]) -> list[str]:
    """A name for each run: its recipe, then the deciding settings; repeated runs are numbered."""
    plain = [_name(run, keys) for run in runs]
    counts, seen = Counter(plain), Counter[str]()
    found = []
    for name in plain:
        seen[name] += 1
        found.append(f"{name} #{seen[name]}" if counts[name] > 1 else name)
    return found


def _name(run: Mapping[str, str], keys: Sequence[str]) -> str:
    parts = [run.get(FIRST[0], "run")]
    for key in keys:
        if key in FIRST[1:]:
            parts.append(run.get(key, ABSENT))
        elif key != FIRST[0] and key in run:
            parts.append(f"{_short(key, keys)}={_cut(run[key])}")
    return " ".join(parts)


def _cut(value: str) -> str:
    """A value short enough for a name; a long one ends in a hash, so that two of them stay two."""
    if len(value) <= MAX_VALUE:
        return value
    return f"{value[: MAX_VALUE - 10]}..{hashlib.sha256(value.encode()).hexdigest()[:8]}"


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a dotted key, with as many before it as tell it from the other keys."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        short = ".".join(parts[-count:])
        if not any(other != key and other.endswith(f".{short}") for other in keys):
            return short
    return key
