"""Runs a module in eval mode without gradients, and leaves it exactly as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; the training flag of every submodule is put back, also where they differed.

    In eval mode batch statistics are read and never updated, so that they stay bit for bit. The flag is written only where
    it changes, since writing it invalidates what a compiler knows of a module.
    """
    import torch

    changed = [each for each in module.modules() if each.training]
    for each in changed:
        each.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for each in changed:
            each.training = True
