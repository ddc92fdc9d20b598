"""Finds a user's own callable by its name, `package.module:callable`; the only way in which a run reaches foreign code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from optforge.errors import ConfigError, Problem


def resolve(name: str, where: str) -> Callable[..., Any]:
    """The object behind `name`; importing its module runs that module's code.

    Args:
        where: the key that names it, for the error.

    Raises:
        ConfigError: the module or the attribute cannot be imported, or is not callable.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            Problem(where=where, what=f"cannot import {name!r} ({error})", fix=f"write {where}=package.module:callable")
        ) from error
    if not callable(found):
        raise ConfigError(Problem(where=where, what=f"{name!r} is not callable", fix=f"write {where}=package.module:callable"))
    wanted: Callable[..., Any] = found
    return wanted
