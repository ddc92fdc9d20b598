"""Samples of a user's own function: what it does wrong is told by its name, before a step runs on what it gave."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from optforge import callables
from optforge.errors import ConfigError, DataError, Problem
from optforge.measure.work import refusal
from optforge.models.base import Example, Loaded

KEY = "calibration.factory"


def own_samples(name: str) -> Iterator[Any]:
    """What `factory(1)` yields.

    Raises:
        ConfigError: it cannot be imported, raises, or gives what one cannot iterate over.
    """
    function = callables.resolve(name, KEY)
    try:
        batches = iter(function(1))
    except TypeError as error:
        raise _wrong(name, error, _signature(function)) from error
    except Exception as error:
        raise _wrong(name, error, "correct it") from error
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            raise _wrong(name, error, "correct it") from error
        yield batch


def fits(examples: list[Example], loaded: Loaded, name: str) -> None:
    """Token ids lie in the vocabulary; other samples go through the model, of which one of each shape is tried on structure alone.

    Raises:
        DataError: a sample does not.
    """
    if loaded.family == "causal_lm":
        _in_vocabulary(examples, loaded, name)
        return
    if loaded.example is None or refusal(loaded.module, *loaded.example) is not None:
        return  # the model cannot be tried without running it
    tried = set()
    for index, example in enumerate(examples):
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(example) if isinstance(leaf, Tensor))
        if shapes in tried:
            continue
        tried.add(shapes)
        if (reason := refusal(loaded.module, *example)) is not None:
            what = f"the model does not take sample {index} of {name}: {reason}"
            raise DataError(Problem(where=KEY, what=what, fix="yield the arguments of one pass each, as the model's example has them"))


def _in_vocabulary(examples: list[Example], loaded: Loaded, name: str) -> None:
    for index, (_, kwargs) in enumerate(examples):
        ids = kwargs["input_ids"]
        if loaded.vocab_size is not None and not 0 <= int(ids.min()) <= int(ids.max()) < loaded.vocab_size:
            what = f"sample {index} of {name} has token ids from {int(ids.min())} to {int(ids.max())}; the model knows {loaded.vocab_size}"
            raise DataError(Problem(where=KEY, what=what, fix="yield ids of the model's own tokenizer"))


def _signature(function: Any) -> str:
    try:
        inspect.signature(function).bind(1)
    except (TypeError, ValueError):
        return "let it take one argument, the batch size"
    return "return or yield samples: a list, or a generator"


def _wrong(name: str, error: Exception, fix: str) -> ConfigError:
    said = (str(error).splitlines() or ["no message"])[0]
    return ConfigError(Problem(where=KEY, what=f"{name} raised {type(error).__name__}: {said}", fix=fix))
