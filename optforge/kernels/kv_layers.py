"""A layer of transformers' static cache that keeps 8 bits. Apart from `kv_cache`, because importing transformers takes seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from optforge.kernels.kv_cache import Format


class QuantizedStaticLayer(StaticLayer):
    """Keys and values [batch, heads, length, width] in a byte each, scales [batch, heads, length, 1] in fp32, all at fixed addresses."""

    cumulative_length: Tensor  # type: ignore[assignment]  # transformers declares the int of its growing layers
    """Tokens written so far, int64 []; a tensor, so that compiled code reads it anew."""

    def __init__(self, length: int, form: Format) -> None:
        super().__init__(length)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.form = form
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        place = (self.batch_size, self.num_heads, self.max_cache_len)
        self.keys = torch.zeros((*place, self.k_head_dim), dtype=self.form.stored, device=self.device)
        self.values = torch.zeros((*place, self.v_head_dim), dtype=self.form.stored, device=self.device)
        self.key_scales, self.value_scales = (torch.zeros((*place, 1), dtype=torch.float32, device=self.device) for _ in range(2))
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (self.keys, self.values, self.key_scales, self.value_scales, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)  # CUDA graphs may then write to them
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rounds and writes the new tokens; hands out the whole layer's keys and values in the new ones' dtype."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None and self.key_scales is not None and self.value_scales is not None
        tokens = key_states.shape[-2]
        places = torch.arange(tokens, device=self.device) + self.cumulative_length
        self.cumulative_length.add_(tokens)
        for stored, scales, states in ((self.keys, self.key_scales, key_states), (self.values, self.value_scales, value_states)):
            rounded, scale = self.form.round(states)
            stored.index_copy_(2, places, rounded)
            scales.index_copy_(2, places, scale)
        return (
            self.form.back(self.keys, self.key_scales, key_states.dtype),
            self.form.back(self.values, self.value_scales, value_states.dtype),
        )

    def reset(self) -> None:
        super().reset()
        if self.key_scales is not None and self.value_scales is not None:
            self.key_scales.zero_()
            self.value_scales.zero_()
