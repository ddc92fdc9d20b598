"""Changes what one module does by mixing a class into its own, and keeps it what it was otherwise.

`module.__class__` becomes a subclass of the mixin and of the former class, under the former name: names, parameters,
hooks and `isinstance` stay, tracers see plain Python, and equal layers share one class and therefore one compilation.
A wrapper module would add a level to every name; a hook cannot see the dtype that came in nor guard against exceptions.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Mixed:
    """Root of every mixin. Copies and pickles are made from the importable classes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixins, base = _taken_apart(type(self))
        return _blank, (mixins, base), self.__getstate__()


_CLASSES: dict[tuple[type[Mixed], type], type] = {}
_ORIGIN: dict[type, tuple[type[Mixed], type]] = {}


def mix_(module: nn.Module, mixin: type[Mixed]) -> bool:
    """Mixes `mixin` into `module` in place; False when it was there before."""
    if isinstance(module, mixin):
        return False
    module.__class__ = _mixed_class(mixin, type(module))
    return True


def _mixed_class(mixin: type[Mixed], base: type) -> type:
    if (mixin, base) not in _CLASSES:
        made = type(base.__name__, (mixin, base), {"__doc__": base.__doc__, "__module__": base.__module__})
        _CLASSES[mixin, base] = made
        _ORIGIN[made] = (mixin, base)
    return _CLASSES[mixin, base]


def _taken_apart(cls: type) -> tuple[tuple[type[Mixed], ...], type]:
    """The mixins of a class, innermost first, and the class below them."""
    mixins: list[type[Mixed]] = []
    while cls in _ORIGIN:
        mixin, cls = _ORIGIN[cls]
        mixins.insert(0, mixin)
    return tuple(mixins), cls


def _blank(mixins: tuple[type[Mixed], ...], base: type) -> Any:
    """An instance without state, for `copy` and `pickle` to fill."""
    for mixin in mixins:
        base = _mixed_class(mixin, base)
    return object.__new__(base)
