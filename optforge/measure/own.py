"""A metric of the user's: a callable that judges a model in its own way and gives one figure or several.

    def score(model, loaded):            # or score(model)
        return {"f1": 0.91, "wer": (0.12, "lower")}

A bare number is one figure, higher is better. What the function does wrong is told with the key that named it and the line in
which it happened, since it runs in the middle of a long run and its author is not ours.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from optforge import callables
from optforge.errors import ConfigError, Problem
from optforge.measure.mode import evaluating
from optforge.spec import Json, QualityResult

if TYPE_CHECKING:
    from torch import nn

    from optforge.models.base import Loaded

KEY = "quality.metric"
HIGHER, LOWER = "higher", "lower"
FORM = 'return a number, or a mapping such as {"f1": 0.91, "wer": (0.12, "lower")}'
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
_FAILS = (MemoryError, KeyboardInterrupt)
"""What is no fault of the function."""

Figures = dict[str, tuple[float, str]]
"""Name -> value and the direction that is better. The name of a bare number is ''."""


class OwnMetric:
    """The callable behind an address `package.module:callable`."""

    def __init__(self, address: str) -> None:
        """
        Raises:
            ConfigError: it cannot be imported or called.
        """
        self.address = address
        self.function: Callable[..., Any] = callables.resolve(address, KEY)

    def __call__(self, model: nn.Module, loaded: Loaded) -> Figures:
        """The figures of `model`, in eval mode and without gradients.

        Raises:
            ConfigError: the function raises, or returns what is no figure; says the line.
        """
        import torch

        with evaluating(model):
            try:
                returned = self.function(model, loaded) if _takes_two(self.function) else self.function(model)
            except (*_FAILS, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise self._wrong(f"raised {type(error).__name__}: {_first_line(error)}{_line(error)}", "correct it") from error
        return self._figures(returned)

    def _figures(self, returned: Any) -> Figures:
        if not isinstance(returned, Mapping):
            return {"": (self._number(returned, ""), HIGHER)}
        if not returned:
            raise self._wrong("returned no figure: an empty mapping", FORM)
        found: Figures = {}
        for name, given in returned.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise self._wrong(f"named a figure {name!r}", "a name has letters, digits and _, a letter first")
            value, better = given if isinstance(given, tuple) and len(given) == 2 else (given, HIGHER)
            if better not in (HIGHER, LOWER):
                raise self._wrong(f"gave {name} the direction {better!r}", f'write "{HIGHER}" or "{LOWER}"')
            found[name] = (self._number(value, name), better)
        return found

    def _number(self, value: Any, name: str) -> float:
        """A finite float of a Python, NumPy or PyTorch number; not of a bool, a text or several values."""
        if hasattr(value, "item") and getattr(value, "size", None) is not None and not isinstance(value, numbers.Number):
            elements = value.numel() if callable(getattr(value, "numel", None)) else value.size
            value = value.item() if elements == 1 else value
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            said = f" for {name}" if name else ""
            raise self._wrong(f"returned {_shown(value)}{said}, which is no number{_defined(self.function)}", FORM)
        if not math.isfinite(float(value)):
            raise self._wrong(f"returned {float(value)}{f' for {name}' if name else ''}{_defined(self.function)}", "return a finite number")
        return float(value)

    def _wrong(self, what: str, fix: str) -> ConfigError:
        return ConfigError(Problem(where=KEY, what=f"{self.address} {what}", fix=fix))


def record(result: QualityResult, own: Figures, baseline: Figures) -> None:
    """Puts the figures of a model, and of the baseline where there are any, into a result."""
    for name, (value, better) in own.items():
        before = baseline.get(name, (None, better))[0]
        if name:
            result.metrics[name] = {"value": value, "baseline": before, "better": better}
        else:
            result.metric, result.baseline_metric = value, before


def figure(result: QualityResult, name: str) -> dict[str, Json] | None:
    """A named figure of a result, or under the name '' the bare one: `value`, `baseline`, `better`. None where there is none."""
    if name:
        return result.metrics.get(name)
    return None if result.metric is None else {"value": result.metric, "baseline": result.baseline_metric, "better": HIGHER}


def drop(own: Mapping[str, Json]) -> float | None:
    """How much worse a figure is than the baseline's, as a fraction of it; below zero where it is better."""
    value, before = own["value"], own["baseline"]
    if before is None or value is None or before == 0:
        return None
    return float((before - value if own["better"] == HIGHER else value - before) / abs(before))


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether it takes the loaded model too (tokenizer, classes, name) beside the module."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # no signature to be had: a builtin
        return True
    return True


def _line(error: BaseException) -> str:
    """`, at metric.py line 12`: the innermost line that is not of PyTorch or another installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames[1:] if "site-packages" not in frame.filename and "/optforge/" not in frame.filename]
    frame = (own or frames)[-1]
    return f", at {frame.filename} line {frame.lineno}"


def _defined(function: Callable[..., Any]) -> str:
    """` (metric.py line 3)`: where the function begins."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename} line {code.co_firstlineno})" if code is not None else ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0]


def _shown(value: Any) -> str:
    text = repr(value).splitlines()[0] if repr(value) else ""
    return f"{type(value).__name__} {text[:40]}" if value is not None else "None"
