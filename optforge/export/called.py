"""The optimized model as one call: named tensors in, plain tensors out. What programs are traced of, and artifacts compared with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from optforge.export.inputs import Inputs


class Called(nn.Module):
    """Calls `module` with the tensors it is given and the constants of the example."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.module, self.constants = module, dict(inputs.constants)
        self.forward = self._named(tuple(inputs.tensors))

    def _named(self, names: tuple[str, ...]) -> Callable[..., tuple[Tensor, ...]]:
        """A forward whose parameters have the inputs' own names, since programs keep them as theirs."""

        def forward(**inputs: Tensor) -> tuple[Tensor, ...]:
            return outputs(self.module(**inputs, **self.constants))

        kind = inspect.Parameter.KEYWORD_ONLY
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        return forward


def outputs(found: Any) -> tuple[Tensor, ...]:
    """The tensors of what a model returns; of a transformers output, the logits alone."""
    logits = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", None)
    if isinstance(logits, Tensor):
        return (logits,)
    return tuple(leaf for leaf in _pytree.tree_leaves(found) if isinstance(leaf, Tensor))
