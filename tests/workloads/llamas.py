"""A tiny random Llama of transformers, and token ids for it. Serves shapes and token-for-token equality, no quality."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from optforge.errors import Problem
from optforge.models.base import Loaded

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY, POSITIONS = 32, 64, 2, 4, 2, 128, 64


def config(tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def llama(tied: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32) -> Loaded:
    torch.manual_seed(seed)
    module = LlamaForCausalLM(config(tied)).eval().to(dtype)
    return Loaded(module=module, family="causal_lm", name="tiny", vocab_size=VOCABULARY, weights="random")


def meta_llama(tied: bool = False) -> Loaded:
    with torch.device("meta"):
        module = LlamaForCausalLM(config(tied)).eval()
    return Loaded(module=module, family="causal_lm", name="tiny", vocab_size=VOCABULARY, weights="random")


class Tokens:
    """Seeded random token ids."""

    real = False

    def check(self) -> Iterator[Problem]:
        return iter(())

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        return iter(())

    def prompts(self) -> list[str]:
        return []


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
