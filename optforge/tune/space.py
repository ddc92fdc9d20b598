"""What a search chooses from: for each kind of step none or one of its options, and values of its fields.

A transform declares the fields that are worth trying as a class variable beside them:

    search: ClassVar[Search] = {"int4_weight": {"group_size": (32, 128)}, "*": {...}, "mx*": None}

A key is a pattern over the kind's option names; a value is tried beside what the option file says, None leaves the options out. A kind
without `search` takes no part. Whatever the given recipes say beyond that is added, so that each of them is a point of the space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from optforge import config, registry
from optforge.config.steps import STEP_KEYS
from optforge.spec import Json
from optforge.transforms.base import Search

Steps = Mapping[str, Mapping[str, Json]]
Declared = dict[str, dict[str, dict[str, list[Json]]]]
"""Kind -> option -> field -> values to try, kinds in the order of their phases."""
Params = dict[str, str]
"""`quantize` -> option or `none`; `quantize.tied` -> a value as JSON, or `default`."""
NONE, DEFAULT = "none", "default"


def declared() -> Declared:
    """The search spaces of every registered transform that declares one. Imports the transforms, so it may load torch."""
    options = [option.name for option in config.options("transform")]
    kinds = {name: registry.get("transforms", name) for name in registry.kinds()}
    kinds = {name: kind for name, kind in kinds.items() if hasattr(kind, "search")}
    found: Declared = {}
    for name, kind in sorted(kinds.items(), key=lambda item: (int(item[1].phase), item[0])):
        own = [option.partition("/")[2] for option in options if option.startswith(f"{name}/") and registry.transform(option) is kind]
        fields = {option: _fields(kind.search, option) for option in own}
        found[name] = {option: choices for option, choices in fields.items() if choices is not None}
    return found


def _fields(search: Search, option: str) -> dict[str, list[Json]] | None:
    """The fields to try of one option; None where it is not tried."""
    fields: dict[str, list[Json]] = {}
    for pattern, choices in search.items():
        if fnmatchcase(option, pattern):
            if choices is None:
                return None
            fields |= {name: list(values) for name, values in choices.items()}
    return fields


@dataclass(frozen=True, kw_only=True)
class Space:
    """The choices of a search."""

    kinds: dict[str, list[str]] = field(default_factory=dict)
    """Kind -> `none` and its options."""
    fields: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """`kind/option` -> field -> `default` and values as JSON."""

    def points(self) -> int:
        """How many recipes it holds."""
        count = 1
        for kind, options in self.kinds.items():
            count *= sum(self._points(f"{kind}/{option}") for option in options)
        return count

    def _points(self, use: str) -> int:
        count = 1
        for values in self.fields.get(use, {}).values():
            count *= len(values)
        return count

    def choose(self, pick: Callable[[str, list[str]], str]) -> Params:
        """One point: `pick(name, choices)` decides each choice in turn. A field has one name for all options that have it."""
        params: Params = {}
        for kind, options in self.kinds.items():
            params[kind] = pick(kind, options)
            for name in self.fields.get(f"{kind}/{params[kind]}", {}):
                params[f"{kind}.{name}"] = pick(f"{kind}.{name}", self.choices(kind, name))
        return params

    def choices(self, kind: str, name: str) -> list[str]:
        """The values of a field over all options of its kind, since a sampler wants one list per name."""
        found = [value for use, fields in self.fields.items() if use.startswith(f"{kind}/") for value in fields.get(name, ())]
        return list(dict.fromkeys([DEFAULT, *found]))

    def holds(self, params: Params) -> bool:
        """Whether every value is one of its own option's; another option's value of the same field is not."""
        for key, value in params.items():
            kind, _, name = key.partition(".")
            allowed = self.fields.get(f"{kind}/{params.get(kind)}", {}).get(name, []) if name else self.kinds.get(kind, [])
            if value not in allowed:
                return False
        return True


def build(declared: Declared, recipes: Sequence[Steps]) -> Space:
    """The declared space, widened so that each recipe with at most one step of a kind is a point of it."""
    kinds = {kind: [NONE, *options] for kind, options in declared.items()}
    fields = {
        f"{kind}/{option}": {name: [DEFAULT, *map(_text, values)] for name, values in choices.items()}
        for kind, options in declared.items()
        for option, choices in options.items()
    }
    for steps in recipes:
        for step in steps.values():
            use = str(step["use"])
            if use.partition("/")[0] not in kinds or use.partition("/")[2] not in kinds[use.partition("/")[0]]:
                continue
            for name, value in step.items():
                if name not in STEP_KEYS:
                    values = fields[use].setdefault(name, [DEFAULT])
                    values += [text for text in [_text(value)] if text not in values]
    return Space(kinds=kinds, fields=fields)


def params_of(steps: Steps, space: Space) -> Params | None:
    """A recipe as a point of the space; None where it has two steps of a kind, or an order or kind that the space lacks."""
    params: Params = dict.fromkeys(space.kinds, NONE)
    for step in steps.values():
        kind, _, option = str(step["use"]).partition("/")
        if params.get(kind) != NONE or any(key in step for key in STEP_KEYS if key != "use"):
            return None
        params[kind] = option
        for name in space.fields.get(f"{kind}/{option}", {}):
            params[f"{kind}.{name}"] = _text(step[name]) if name in step else DEFAULT
    return params if space.holds(params) else None


def steps_of(params: Params) -> dict[str, dict[str, Json]]:
    """The steps of a point, each named after its kind."""
    steps: dict[str, dict[str, Json]] = {}
    for key, value in params.items():
        kind, _, name = key.partition(".")
        if not name and value != NONE:
            steps[kind] = {"use": f"{kind}/{value}"}
        elif name and value != DEFAULT:
            steps[kind][name] = json.loads(value)
    return steps


def name_of(params: Params) -> str:
    """What a point is called: `decoder-int8_dynamic-tied.untie-inductor`."""
    words = []
    for key, value in params.items():
        field_name = key.partition(".")[2]
        if not field_name and value != NONE:
            words.append(value)
        elif field_name and value != DEFAULT:
            words.append(f"{field_name}.{re.sub(r'[^A-Za-z0-9_]+', '.', value).strip('.') or 'none'}")
    return "-".join(words) or "as_loaded"


def _text(value: Json) -> str:
    return json.dumps(value)
