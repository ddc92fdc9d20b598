"""Turns the report's dataclasses into plain JSON values and back, losing nothing and inventing nothing.

Python's own `json` writes bare NaN and Infinity, which other readers reject. Here a figure that is not finite becomes
null and its path is listed, scalars of numpy and torch become numbers, and strings are never looked into.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from optforge.spec import Json


def plain(value: Any, nonfinite: list[str], path: str = "") -> Json:  # noqa: PLR0911  one line per kind of value
    """`value` as JSON values; the dotted path of each NaN or infinity, written as null, is appended to `nonfinite`.

    Raises:
        TypeError: something under `path` is no figure, text, list, mapping or dataclass (a bug of ours).
    """
    if value is None or isinstance(value, str | bool):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite(float(value), nonfinite, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), nonfinite, join(path, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item, nonfinite, join(path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, nonfinite, join(path, str(index))) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return _scalar(value, nonfinite, path)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _finite(value: float, nonfinite: list[str], path: str) -> float | None:
    if math.isfinite(value):
        return value
    nonfinite.append(path)
    return None


def _scalar(value: Any, nonfinite: list[str], path: str) -> Json:
    """A zero-dimensional numpy or torch value, known by its shape and `.item()`, without importing either."""
    if getattr(value, "shape", None) is not None and tuple(value.shape) == () and hasattr(value, "item"):
        return plain(value.item(), nonfinite, path)
    raise TypeError(f"report: {path or 'value'} is a {type(value).__name__}, which JSON cannot hold")


def build(kind: Any, value: Json, path: str = "") -> Any:  # noqa: PLR0911  one line per kind of type
    """The object of type `kind` (a dataclass, or a type its fields use) that `plain` made `value` from.

    Raises:
        ValueError: a key is unknown or a value has another type; names its dotted path.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _build_one_of([option for option in inner if option is not type(None)], value, path)
    if origin is list:
        return [build(inner[0], item, join(path, str(index))) for index, item in enumerate(_expect(list, value, path))]
    if origin is dict:
        return {key: build(inner[1], item, join(path, key)) for key, item in _expect(dict, value, path).items()}
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), _expect(dict, value, path), path)
    if kind is float and value is None:
        return math.nan  # a figure that was not finite; `nonfinite` lists its path
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _expect(kind, value, path)


def _build_one_of(options: list[Any], value: Json, path: str) -> Any:
    """Members of the report's unions are told apart by trying them in order, exact scalars first."""
    if len(options) == 1:
        return build(options[0], value, path)
    if type(value) in options:
        return value
    raise ValueError(f"{path}: {value!r} is none of {', '.join(option.__name__ for option in options)}")


def _build_dataclass(kind: type, value: dict[str, Json], path: str) -> Any:
    fields = field_types(kind)
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise ValueError(f"{join(path, unknown[0])}: unknown key")
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in value]
    if missing:
        raise ValueError(f"{join(path, missing[0])}: is missing")
    return kind(**{name: build(fields[name], item, join(path, name)) for name, item in value.items()})


def _expect(kind: type, value: Json, path: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{path or 'report'}: expected {kind.__name__}, found {type(value).__name__}")
    return value


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Field name -> resolved type of a dataclass, in order."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}
