"""Whole numbers that follow from sizes alone, computed for real beside a trace on meta tensors.

Models ask for them (`if (positions == expected).all()`), and a meta tensor has no answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

MOST_ELEMENTS = 2**22
"""Largest tensor of whole numbers that is computed for real."""


class Constants:
    """The contents of small integer and boolean tensors that follow from sizes alone."""

    def __init__(self) -> None:
        self._content = WeakTensorKeyDictionary()

    def computed(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[bool, Any]:
        """Whether the operator's result follows from what is known, and the result, on the CPU."""
        if any(tensor not in self._content for tensor in inputs):
            return False, None
        made = torch.device(kwargs.get("device") or "cpu")
        if not inputs and (func.namespace != "aten" or made.type != "meta" or not _whole(args, kwargs)):
            return False, None

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            return self._content[leaf] if isinstance(leaf, Tensor) else leaf

        return True, func(*tree_map(real, args), **tree_map(real, kwargs))

    def keep(self, outputs: list[Tensor], found: Any) -> None:
        """Remembers the result, where it is whole numbers and small; other tensors are known no more."""
        contents = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        for tensor, content in zip(outputs, contents, strict=True):
            if not content.is_floating_point() and content.numel() <= MOST_ELEMENTS:
                self._content[tensor] = content


def _whole(args: Any, kwargs: Any) -> bool:
    """Whether a tensor made from these arguments is small and of whole numbers: sizes and bounds are ints, the dtype is none of
    the floating ones. Without a dtype PyTorch decides by the arguments."""
    dtype = kwargs.get("dtype")
    numbers = [leaf for leaf in tree_leaves(args) if isinstance(leaf, (int, float))]
    if (dtype is not None and dtype.is_floating_point) or (dtype is None and any(isinstance(leaf, float) for leaf in numbers)):
        return False
    count = 1
    for number in numbers:
        count *= max(1, abs(int(number)))
    return count <= MOST_ELEMENTS
