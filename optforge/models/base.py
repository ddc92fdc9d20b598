"""What every model source keeps to: the structure without weights for the plan, the weights for the run.

`skeleton` touches no network and no weight file larger than a config; `load` brings the weights, checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from optforge.errors import Problem

if TYPE_CHECKING:
    from torch import nn

Tell = Callable[[str, float], None]
"""Is told the name of what takes long within a load, and the fraction of it that is done."""

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one forward pass."""

FAMILIES = ("causal_lm", "image_classifier", "module")


@dataclass(kw_only=True)
class Loaded:
    """A model and what is needed to feed and judge it."""

    module: nn.Module
    family: str
    """causal_lm (input_ids -> .logits), image_classifier (image batch -> logits), module (example only)."""
    name: str
    tokenizer: Any = None
    """A transformers tokenizer for language models, else None."""
    vocab_size: int | None = None
    image_shape: tuple[int, int, int] | None = None
    """Channels, height, width for image classifiers."""
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """Arguments of one forward pass for the family `module` (and for a user's own model)."""
    batches: Callable[[int], list[Example]] | None = None
    """Of a module that brings data of its own to be trained on: up to so many examples; None where the one example is all there is."""
    weights: str = "trained"
    """trained, or random: random weights serve shapes and speed only, and no quality is claimed on them."""
    digest: str | None = None
    """sha256 over the weights, for caches and the report."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the figures must know, such as that the source weights were 4-bit already."""


@dataclass(frozen=True, kw_only=True)
class Companions:
    """What lies beside a model's weights and goes with them into other engines; a source's method `companions` reads it without the
    weights. A source without that method has none."""

    tokenizer: Any = None
    generation_config: Any = None


@runtime_checkable
class ModelSource(Protocol):
    """A frozen dataclass of a model's YAML keys, with a field `dtype` (`fp32`, `fp16`, `bf16`)."""

    def check(self) -> Iterator[Problem]:
        """What is wrong before anything is loaded: a missing path, a missing package, a hub name without consent."""
        ...

    def skeleton(self) -> Loaded:
        """The module tree on the meta device, in the run's dtype. No weights, no network, no device."""
        ...

    def load(self, seed: int = 0, tell: Tell | None = None) -> Loaded:
        """The model on the CPU with its weights in the run's dtype, in eval mode, ties kept. Long work is told to `tell`.

        Raises:
            ModelError: the checkpoint is missing, truncated or damaged, or holds NaN or Inf.
            TrustError: reading it would run code.
        """
        ...


def as_example(value: Any) -> Example | None:
    """A tensor, a tuple or list of arguments, or a dict of keywords as (args, kwargs)."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    return (value,), {}
