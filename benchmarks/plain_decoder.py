"""A plain Llama decoder the way gpt-fast writes one: the peer that PyTorch alone allows.

Static shapes, one product for q, k and v and one for gate and up, a static cache, the step compiled as a whole and, on CUDA, captured
in a graph; no transformers in the loop. It reads the weights of a Llama of transformers (packing copies them). Nothing of OptForge's
kernels, transforms or loops is used here, since it stands for what a user can do without them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layer = dict[str, Any]


class PlainDecoder:
    """Greedy decoding of a fixed batch over a cache of a fixed length."""

    def __init__(self, model: nn.Module, ids: Tensor, new_tokens: int, context: int | None = None) -> None:
        """Reads the weights of `model` and runs the prompt `ids` [batch, tokens]; with `context` the cache is filled with noise up
        to there instead, and the prompt's tokens are of no account."""
        config: Any = model.config
        self.new_tokens, self.ids = new_tokens, ids
        self.context = context or ids.shape[1]
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.embedding, self.head = model.model.embed_tokens.weight, model.lm_head.weight  # type: ignore[union-attr]
        self.norm = model.model.norm.weight  # type: ignore[union-attr]
        self.layers = [_layer(layer) for layer in model.model.layers]  # type: ignore[union-attr]
        device, dtype, batch = ids.device, self.embedding.dtype, ids.shape[0]
        length = self.context + new_tokens
        shape = (batch, self.groups, length, self.width)
        for layer in self.layers:
            layer["keys"], layer["values"] = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.seen = torch.ones(length, length, dtype=torch.bool, device=device).tril() if length <= 4096 else None
        self.places = torch.arange(length, device=device)
        self.rotations = _rotations(model, length, device, dtype)
        self.token, self.place = ids[:, :1].clone(), torch.zeros(1, dtype=torch.int64, device=device)
        self.first = self._prompt(context is not None)
        self.compiled = torch.compile(self._step, options={"coordinate_descent_tuning": True} if ids.is_cuda else None)  # as gpt-fast
        self.graph: Any = None

    def run(self) -> Tensor:
        """The tokens after the first, int64 [batch, new_tokens]."""
        if self.ids.is_cuda and self.graph is None:
            self._capture()
        self._rewind()
        chosen = []
        for _ in range(self.new_tokens):
            self.graph.replay() if self.graph is not None else self.compiled()
            chosen.append(self.token.clone())
        return torch.cat(chosen, 1)

    def _rewind(self) -> None:
        self.token.copy_(self.first)
        self.place.fill_(self.context)

    def _prompt(self, noise: bool) -> Tensor:
        if noise:
            for layer in self.layers:
                layer["keys"].normal_()
                layer["values"].normal_()
            return self.token.clone()
        places = self.places[: self.context]
        return self._logits(self.ids, places)[:, -1:].argmax(-1)

    def _step(self) -> None:
        logits = self._logits(self.token, self.place)
        self.token.copy_(logits.argmax(-1))
        self.place.add_(1)

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._rewind()
                self.compiled()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.compiled()

    def _logits(self, ids: Tensor, places: Tensor) -> Tensor:
        """Logits of the last token, [batch, 1, vocabulary]."""
        x = F.embedding(ids, self.embedding)
        seen = self.seen[places] if self.seen is not None else self.places <= places[:, None]
        cos, sin = (table[places] for table in self.rotations)
        for layer in self.layers:
            x = x + F.linear(self._attention(layer, self._norm(x, layer["norm1"]), seen, (cos, sin), places), layer["o"])
            gate, up = F.linear(self._norm(x, layer["norm2"]), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(self._norm(x[:, -1:], self.norm), self.head)

    def _attention(self, layer: Layer, x: Tensor, seen: Tensor, rotation: tuple[Tensor, Tensor], places: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        cos, sin = rotation
        sizes = [self.heads * self.width, self.groups * self.width, self.groups * self.width]
        q, k, v = (part.view(batch, tokens, -1, self.width).transpose(1, 2) for part in F.linear(x, layer["qkv"]).split(sizes, -1))
        q, k = (part * cos + torch.cat((-part[..., self.width // 2 :], part[..., : self.width // 2]), -1) * sin for part in (q, k))
        layer["keys"].index_copy_(2, places, k)
        layer["values"].index_copy_(2, places, v)
        mixed = F.scaled_dot_product_attention(q, layer["keys"], layer["values"], attn_mask=seen, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(batch, tokens, -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        exact = x.float()
        return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "qkv": torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
        "o": attention.o_proj.weight,
        "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down": mlp.down_proj.weight,
        "norm1": layer.input_layernorm.weight,
        "norm2": layer.post_attention_layernorm.weight,
    }


def _rotations(model: nn.Module, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [length, width] of every position, from the model's own frequencies."""
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    angles = torch.outer(torch.arange(length, device=device).float(), rotary.inv_freq.float().to(device))
    angles = torch.cat((angles, angles), -1)
    scaling = rotary.attention_scaling
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
