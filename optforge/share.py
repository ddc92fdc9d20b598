"""A second module tree over the same tensors, so that baseline and candidate cost one copy of the weights.

Transforms replace parameters and never write into their storage, therefore the candidate of a run can start as an alias
of the baseline: what a step leaves alone stays shared, and only what it changes takes new memory.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def alias(model: nn.Module) -> nn.Module:
    """A deep copy of the structure whose parameters and buffers are new objects over the same storage.

    New objects, because `module.to(...)` rebinds a parameter's data and would reach the original otherwise. Tied
    parameters stay tied in the copy.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach()
    return copy.deepcopy(model, memo)
