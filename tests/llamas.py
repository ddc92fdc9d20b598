"""Tiny random Llamas of transformers that many tests share. They serve shapes and token-for-token equality, no quality."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optforge.models.base import Loaded

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY, POSITIONS = 32, 64, 2, 4, 2, 128, 64


def config(**sizes: Any) -> LlamaConfig:
    """The shape above, with `sizes` in place of its own."""
    own = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "architectures": ["LlamaForCausalLM"],
    }
    return LlamaConfig(**{**own, **sizes})


def module(device: str = "cpu", seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    with torch.device(device):
        return LlamaForCausalLM(config(**sizes)).to(dtype).eval()


def llama(device: str = "cpu", seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> Loaded:
    return loaded(module(device, seed, dtype, **sizes))


def loaded(model: LlamaForCausalLM) -> Loaded:
    """The model as a factory of the project would give it."""
    return Loaded(module=model, family="causal_lm", name="tiny", vocab_size=model.config.vocab_size, weights="random")


def layer_flops(tokens: int, keys: int) -> int:
    """Operations of one decoder layer for `tokens` queries over `keys` positions, from the shapes alone."""
    head = WIDTH // HEADS
    projections = 2 * WIDTH * (WIDTH + 2 * KV_HEADS * head + WIDTH)
    mlp = 3 * 2 * WIDTH * HIDDEN
    attention = 2 * 2 * HEADS * head * keys
    return tokens * (projections + mlp + attention)


def layer_weights() -> int:
    """Parameters of one decoder layer."""
    head = WIDTH // HEADS
    return WIDTH * (2 * WIDTH + 2 * KV_HEADS * head) + 3 * WIDTH * HIDDEN + 2 * WIDTH


def rotary_flops(tokens: int) -> int:
    """Operations of the product of frequencies and positions that makes the rotary tables, once for the whole batch."""
    return 2 * (WIDTH // HEADS // 2) * tokens
