"""Plain data against the types of a dataclass: every wrong key and value is found, and none is read in two ways.

OmegaConf's own conversion is not used here: it stops at the first problem, takes `010`, `1_000` and `yes` for what they
may not mean, turns any number into text, and accepts neither `Literal` nor `Mapping`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

from optforge.config.origins import as_typed
from optforge.errors import ConfigError, Problem, UserError, near
from optforge.spec import Json

MISSING = "???"
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
Where = Callable[[str], str]
"""Dotted key -> how a problem names it, with the file it came from."""


class Mismatch(Exception):
    """A value that its field cannot take: what is wrong, and what to write."""

    def __init__(self, what: str, fix: str = "") -> None:
        self.what, self.fix = what, fix
        super().__init__(what)


def build(cls: type, data: Mapping[str, Json], key: str, *, kind: str, problems: list[Problem], where: Where) -> Any:
    """An instance of the dataclass `cls` from `data`, or None after adding every problem to `problems`.

    Args:
        key: dotted key of the section, for messages (`steps.weights`).
        kind: what the section is, for messages (`transform quantize`).
    """
    before = len(problems)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    values: dict[str, Any] = {}
    for name, value in data.items():
        dotted = f"{key}.{name}" if key else name
        if name not in fields:
            fix = near(name, fields) or f"known: {', '.join(fields) or 'none'}"
            problems.append(Problem(where=where(dotted), what=f"unknown key {name!r} in {kind}", fix=fix))
            continue
        try:
            values[name] = convert(value, hints[name], as_typed(dotted))
        except Mismatch as wrong:
            problems.append(Problem(where=where(dotted), what=wrong.what, fix=wrong.fix))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            dotted = f"{key}.{name}" if key else name
            problems.append(Problem(where=where(dotted), what="is required and has no value", fix=f"type {as_typed(dotted)}=VALUE"))
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except UserError as error:
        problems.extend(error.problems)
    except ValueError as error:
        problems.append(Problem(where=where(key), what=str(error)))
    return None


def convert(value: Json, annotation: Any, key: str) -> Any:
    """`value` as the type of its field.

    Raises:
        Mismatch: it does not fit; says what to write.
    """
    if value == MISSING:
        raise Mismatch("is required and has no value", f"type {key}=VALUE")
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _optional(value, arguments, key)
    if value is None and annotation not in (Any, type(None)):
        raise Mismatch("cannot be null", f"write {_example(annotation, key)}")
    if value == "None":
        raise Mismatch("is the text 'None'", f"write {_example(annotation, key)}")
    if origin is Literal:
        return _one_of(value, [str(choice) for choice in arguments], key)
    if origin in (list, tuple) or annotation in (list, tuple):
        return _sequence(value, origin or annotation, arguments, key)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(value, arguments, key)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _member(value, annotation, key)
    reader = _SCALARS.get(annotation)
    return reader(value, key) if reader else value


def _optional(value: Json, arguments: tuple[Any, ...], key: str) -> Any:
    kinds = [argument for argument in arguments if argument is not type(None)]
    if len(kinds) < len(arguments):
        if value is None:
            return None
        if value in ("", "None"):
            raise Mismatch(f"is the text {value!r}", f"write {key}=null")
    last: Mismatch | None = None
    for kind in kinds:
        try:
            return convert(value, kind, key)
        except Mismatch as wrong:
            last = wrong
    raise last or Mismatch("has no possible value")


def _one_of(value: Json, choices: list[str], key: str) -> str:
    if isinstance(value, str) and value in choices:
        return value
    fix = near(str(value), choices) or f"write {key}={'|'.join(choices)}"
    raise Mismatch(f"cannot be {value!r}, one of {', '.join(choices)}", fix)


def _member(value: Json, kind: type[Enum], key: str) -> Enum:
    """The member of that name; the member's own value is taken too (`max-autotune` for `max_autotune`)."""
    for member in kind:
        if value == member.value:
            return member
    return kind[_one_of(value, list(kind.__members__), key)]


def _sequence(value: Json, kind: Any, arguments: tuple[Any, ...], key: str) -> Any:
    if not isinstance(value, list | tuple):
        raise Mismatch(f"must be a list, got {_named(value)}", f"write {key}=[{'' if value is None else value}]")
    item = arguments[0] if arguments else Any
    return kind(_item(entry, item, key) for entry in value)


def _item(value: Json, annotation: Any, key: str) -> Any:
    """One item of a list; what to write is the list, since Hydra cannot set an item alone."""
    try:
        return convert(value, annotation, key)
    except Mismatch as wrong:
        fix = wrong.fix if wrong.fix.startswith("did you mean") else f"write the whole list: {key}=[a,b]"
        raise Mismatch(f"an item {wrong.what}", fix) from wrong


def _mapping(value: Json, arguments: tuple[Any, ...], key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Mismatch(f"must be a mapping, got {_named(value)}", f"write {key}={{name: value}}")
    item = arguments[1] if len(arguments) > 1 else Any
    return {str(name): convert(entry, item, f"{key}.{name}") for name, entry in value.items()}


def _bool(value: Json, key: str) -> bool:
    if isinstance(value, bool):
        return value
    raise Mismatch(f"must be true or false, got {_named(value)}", f"write {key}=true or {key}=false")


def _int(value: Json, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _FLOAT.fullmatch(value) and float(value).is_integer():
        return int(float(value))
    raise Mismatch(f"must be a whole number, got {_named(value)}", _plain_digits(value, key))


def _float(value: Json, key: str) -> float:
    number = math.nan
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and _FLOAT.fullmatch(value)):
        number = float(value)
    if not math.isfinite(number):
        raise Mismatch(f"must be a finite number, got {_named(value)}", _plain_digits(value, key))
    return number


def _plain_digits(value: Json, key: str) -> str:
    """The number that a text was perhaps meant as: without underscores and leading zeros."""
    bare = str(value).replace("_", "")
    digits = bare.lstrip("0") or "0"
    return f"write {key}={digits}" if re.fullmatch(r"[0-9]+", bare) else "write it in decimal digits"


def _str(value: Json, key: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise Mismatch(f"must be text, got {_named(value)}", f"""write '{key}="..."', and in a file put it in quotes""")


def _path(value: Json, key: str) -> Path:
    return Path(_str(value, key))


_SCALARS: dict[Any, Callable[[Json, str], Any]] = {bool: _bool, int: _int, float: _float, str: _str, Path: _path}


def _named(value: Json) -> str:
    words = {str: "the text ", bool: "", int: "the number ", float: "the number "}
    return f"{words.get(type(value), f'a {type(value).__name__} ')}{value!r}"


def _example(annotation: Any, key: str) -> str:
    if typing.get_origin(annotation) in (list, tuple):
        return f"{key}=[]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"{key}={'|'.join(annotation.__members__)}"
    return f"{key}=VALUE"


def plain(value: Any) -> Json:
    """A field's value as JSON holds it: enum members by name, tuples as lists, paths as text."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return value


def plain_fields(instance: Any) -> dict[str, Json]:
    """The fields of a dataclass instance, in order, as JSON holds them."""
    return {field.name: plain(getattr(instance, field.name)) for field in dataclasses.fields(instance) if field.init}


def raise_all(problems: list[Problem]) -> None:
    """Raises every distinct problem together, if there is one.

    Raises:
        ConfigError
    """
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def collected(problems: list[Problem], function: Any, *arguments: Any) -> Any:
    """The function's result, or None after taking over the problems that it raises."""
    try:
        return function(*arguments)
    except UserError as error:
        problems.extend(error.problems)
    return None
