"""Sample inputs of any size: what a program is traced with and what an artifact is compared on.

Sizes beside the example's, because a program that an exporter fixed to one size gives wrong results, or none, at others.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optforge.errors import ModelError, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from optforge.models.base import Loaded

BATCH, TOKENS = "batch", "tokens"
EXAMPLE = (2, 8)
"""Batch and tokens that programs are traced with: above 1, since tracers take a size of 1 for a constant."""
SIZES = (EXAMPLE, (1, 5), (3, 13), (5, 33))
"""Of the comparisons: the example's, one smaller and two larger; positions of the model permitting."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments of one forward pass by name. `axes` says which dimension of which tensor is the batch or the tokens."""

    tensors: Mapping[str, Tensor]
    constants: Mapping[str, Any]
    """Arguments that are no tensors; they are part of the program."""
    axes: Mapping[str, Mapping[int, str]]
    vocabulary: int | None = None
    positions: int | None = None
    """Tokens that the model was made for."""

    def of(self, batch: int, tokens: int) -> dict[str, Tensor]:
        """Tensors of another size with other content; the same for the same size."""
        import torch

        draw = torch.Generator().manual_seed(1000 * batch + tokens)
        wanted = {BATCH: batch, TOKENS: tokens}
        return {name: _sized(tensor, self.axes[name], wanted, self.vocabulary, draw) for name, tensor in self.tensors.items()}

    def named(self, size: tuple[int, int]) -> dict[str, int]:
        """A size by the axes that the inputs have."""
        present = {axis for axes in self.axes.values() for axis in axes.values()}
        return {axis: length for axis, length in zip((BATCH, TOKENS), size, strict=True) if axis in present}

    def sizes(self, dynamic: frozenset[str] = frozenset((BATCH, TOKENS))) -> tuple[tuple[int, int], ...]:
        """Sizes to compare at; an axis that is not dynamic keeps the example's."""
        present = {axis for axes in self.axes.values() for axis in axes.values()}
        batch, tokens = BATCH in dynamic & present, TOKENS in dynamic & present
        longest = self.positions or SIZES[-1][1]
        found = [(b if batch else EXAMPLE[0], min(t, longest) if tokens else EXAMPLE[1]) for b, t in SIZES]
        return tuple(dict.fromkeys(found))


def inputs_for(loaded: Loaded, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The inputs of a model: token ids, images, or the model's own example.

    Raises:
        ModelError: a module brings no example, or takes its arguments in a way that has no names.
    """
    import torch

    parameters = inspect.signature(loaded.module.forward).parameters
    if loaded.family == "causal_lm":
        vocabulary = loaded.vocab_size or 16
        ids = (vocabulary // 3 + torch.arange(EXAMPLE[0] * EXAMPLE[1], device=device)).remainder(vocabulary).reshape(EXAMPLE)
        constants = {"use_cache": False} if "use_cache" in parameters else {}
        positions = getattr(getattr(loaded.module, "config", None), "max_position_embeddings", None)
        axes = {"input_ids": {0: BATCH, 1: TOKENS}}
        return Inputs(tensors={"input_ids": ids}, constants=constants, axes=axes, vocabulary=vocabulary, positions=positions)
    if loaded.family == "image_classifier":
        assert loaded.image_shape is not None
        draw = torch.Generator().manual_seed(0)
        images = torch.rand((EXAMPLE[0], *loaded.image_shape), generator=draw).to(device, dtype)
        name = next(iter(parameters))
        return Inputs(tensors={name: images}, constants={}, axes={name: {0: BATCH}})
    return _of_example(loaded, device)


def _of_example(loaded: Loaded, device: torch.device) -> Inputs:
    import torch

    if loaded.example is None:
        raise ModelError(
            Problem(where=loaded.name, what="brings no example of its arguments", fix="let its factory return (module, example)")
        )
    args, kwargs = loaded.example
    named = _named(loaded.module, args, kwargs, loaded.name)
    tensors = {name: value.to(device) for name, value in named.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in named.items() if name not in tensors}
    rows = {tensor.shape[0] for tensor in tensors.values() if tensor.dim()}
    if len(rows) != 1:
        what = f"its example's tensors have different first sizes ({', '.join(map(str, sorted(rows))) or 'none'}), so no batch can be told"
        raise ModelError(Problem(where=loaded.name, what=what, fix="give an example whose tensors all begin with the batch"))
    texts = {t.shape for t in tensors.values() if t.dim() == 2 and not t.is_floating_point()}
    axes = {name: _axes(tensor, alike=len(texts) == 1) for name, tensor in tensors.items()}
    ids = [tensor for tensor in tensors.values() if not tensor.is_floating_point()]
    vocabulary = max((int(tensor.max()) + 1 for tensor in ids if tensor.numel()), default=None)
    widened = {name: _widened(tensor) for name, tensor in tensors.items()}
    return Inputs(tensors=widened, constants=constants, axes=axes, vocabulary=vocabulary)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every argument under the name that `forward` gives it."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            what = f"{type(module).__name__}.forward takes {name} without a name, and an exported program calls by names"
            raise ModelError(Problem(where=where, what=what, fix="give forward's arguments names"))
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def _axes(tensor: Tensor, *, alike: bool) -> dict[int, str]:
    """The batch first; token ids and their masks, where all have one shape, then the tokens."""
    text = tensor.dim() == 2 and not tensor.is_floating_point() and alike
    return {} if not tensor.dim() else {0: BATCH, 1: TOKENS} if text else {0: BATCH}


def _widened(tensor: Tensor) -> Tensor:
    """At least two rows."""
    return tensor if not tensor.dim() or tensor.shape[0] > 1 else tensor.expand(EXAMPLE[0], *tensor.shape[1:]).contiguous()


def _sized(tensor: Tensor, axes: Mapping[int, str], wanted: Mapping[str, int], vocabulary: int | None, draw: torch.Generator) -> Tensor:
    """Values like those of `tensor` in another size: its own, picked at random along each axis; token ids any of the vocabulary."""
    import torch

    if axes.get(1) == TOKENS and vocabulary and not tensor.is_floating_point() and int(tensor.max()) > 1:
        return torch.randint(0, vocabulary, (wanted[BATCH], wanted[TOKENS]), generator=draw).to(tensor.device, tensor.dtype)
    found = tensor
    for dim, axis in axes.items():
        picked = torch.randint(0, tensor.shape[dim], (wanted[axis],), generator=draw)
        found = found.index_select(dim, picked.to(tensor.device))
    if found.is_floating_point() and axes:
        noise = torch.randn(found.shape, generator=draw).to(found.device, found.dtype)
        found = found + 0.1 * found.std() * noise if found.numel() > 1 else found
    return found
