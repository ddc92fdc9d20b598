"""Copies of a module tree that copy no weights: an alias over the same tensors, and the bare structure on meta.

Transforms replace parameters and never write into their storage, therefore the candidate of a run can start as an alias
of the baseline: what a step leaves alone stays shared, and only what it changes takes new memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def alias(model: nn.Module) -> nn.Module:
    """A deep copy of the structure whose parameters and buffers are new objects over the same storage.

    New objects, because `module.to(...)` rebinds a parameter's data and would reach the original otherwise. Tied
    parameters stay tied in the copy.
    """
    return _copy(model, lambda tensor: tensor.detach())


def on_meta(model: nn.Module) -> nn.Module:
    """A deep copy of the structure on the meta device: shapes and dtypes without storage, ties kept."""
    return _copy(model, lambda tensor: torch.empty_like(tensor, device="meta", requires_grad=False))


def _copy(model: nn.Module, tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(tensor(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = tensor(buffer)
    for value in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(value, Tensor) and value.grad_fn is not None:  # a masked or normalized weight, which PyTorch refuses to copy
            memo[id(value)] = tensor(value)
    return copy.deepcopy(model, memo)
