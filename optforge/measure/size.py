"""Bytes of a model's weights, each shared tensor counted once; works on the meta device too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, a tied one once, under its first name."""
    seen: set[int] = set()
    for source in (model.named_parameters(), model.named_buffers()):
        for name, tensor in source:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this device holds of a tensor that several share (a DTensor); any other tensor itself."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def nbytes(tensor: Tensor) -> int:
    """Bytes of one tensor's elements; of a tensor that several devices share, those that this one holds."""
    own = own_part(tensor)
    return own.numel() * own.element_size()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, ties counted once."""
    return sum(nbytes(tensor) for _, tensor in tensors(model))
