"""Embeddings whose table is quantized: rows are looked up as they are stored, and only those are dequantized.

Stored like a linear of the same table, so that an embedding and the head tied to it can be one set of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optforge.kernels.quantized import INPUT_SCALES, Quantized, dequantize

OF_ALL_ROWS = ("weight_global_scale",)
OF_PRODUCTS = ("weight_sum", *INPUT_SCALES)
"""What a head needs for its product and an embedding does not."""


class QuantizedEmbedding(Quantized, nn.Embedding):
    """Looks rows up in the stored table, then dequantizes them."""

    operator = "aten::index, rows dequantized"
    value_dtype: torch.dtype
    """The dtype of the rows it hands out: the model's own, which integer storage no longer tells."""

    def hold(self, stored: Any) -> None:
        super().hold(stored)
        del self._parameters["bias"]

    def forward(self, input: Tensor) -> Tensor:
        """Indices [...] to rows [..., K] in `value_dtype`."""
        at = input.flatten()
        found = {name: self._rows(name, parameter, at) for name, parameter in self.stored()}
        return dequantize(self, found).to(self.value_dtype).reshape(*input.shape, self.embedding_dim)

    def _rows(self, name: str, parameter: Tensor, at: Tensor) -> Tensor:
        one_for_all = name in OF_ALL_ROWS or (name == "weight_scale" and parameter.shape[0] == 1)
        return parameter if one_for_all else parameter[at]

    def trial(self, rows: int, draw: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        at = torch.randint(0, self.num_embeddings, (rows,), generator=draw).to(self.weight.device)
        return self(at).float(), self.dequantize()[at]

    @property
    def columns(self) -> int:
        return self.embedding_dim

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.value_dtype = fn(torch.empty(0, dtype=self.value_dtype, device=self.weight.device)).dtype
        return super()._apply(fn, recurse)


def share_(embedding: nn.Embedding, head: Quantized) -> None:
    """Makes `embedding` look its rows up in the quantized storage of `head`, as one set of parameters."""
    value_dtype = embedding.weight.dtype
    embedding.__class__ = QuantizedEmbedding
    assert isinstance(embedding, QuantizedEmbedding)
    embedding._parameters.clear()
    for name in Quantized.STORED:
        if name in head._parameters and name not in OF_PRODUCTS:
            embedding.register_parameter(name, head._parameters[name])
    embedding.scheme, embedding.fp8_format, embedding.quantized_by = head.scheme, head.fp8_format, head.quantized_by
    embedding.value_dtype = value_dtype
