"""Llama shapes by name: for plans, kernels and speed at sizes that nobody needs to download.

Random weights have the right shapes and nothing else; no quality is claimed on them. A local checkpoint in the hub's layout
makes the same model a real one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from optforge import checkpoint
from optforge.errors import Problem
from optforge.models.base import Companions, Loaded, Tell
from optforge.pretrained import check_dtype, companions, filled, random_state, skeleton

if TYPE_CHECKING:
    from transformers import LlamaConfig

RANDOM = "random"


class Size(Enum):
    """Published shapes: Llama 3.2 1B, Llama 3 8B and 70B (their config.json on the hub)."""

    llama3_1b = "llama3_1b"
    llama3_8b = "llama3_8b"
    llama3_70b = "llama3_70b"


# layers, width, hidden, query heads, key/value heads, head size, tied head
_SHAPES = {
    Size.llama3_1b: (16, 2048, 8192, 32, 8, 64, True),
    Size.llama3_8b: (32, 4096, 14_336, 32, 8, 128, False),
    Size.llama3_70b: (80, 8192, 28_672, 64, 8, 128, False),
}
_LLAMA_3_2_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A Llama 3 decoder of a published shape, vocabulary 128,256."""

    size: Size = Size.llama3_1b
    """llama3_1b, llama3_8b or llama3_70b."""
    weights: str = RANDOM
    """random, or the path of a local checkpoint folder (model.safetensors or its shards, and the tokenizer)."""
    layers: int | None = None
    """Keeps only the first layers, for a quick look; null keeps all. Random weights only."""
    dtype: str = "bf16"
    """fp32, fp16 or bf16: the dtype of all weights."""
    trust: bool = False
    """true: a pickled checkpoint may run code while it is read."""
    allow_nonfinite: bool = False
    """true: NaN or Inf in the weights is noted instead of refused."""

    def check(self) -> Iterator[Problem]:
        yield from check_dtype(self.dtype)
        if self.weights != RANDOM and not Path(self.weights).expanduser().exists():
            yield Problem(
                where="model.weights", what=f"{self.weights} does not exist", fix="give a checkpoint folder, or model.weights=random"
            )
        if self.layers is not None and (self.layers < 1 or self.weights != RANDOM):
            yield Problem(where="model.layers", what=f"{self.layers} layers can only be at least 1, and of random weights")

    def skeleton(self) -> Loaded:
        from transformers import LlamaForCausalLM

        module = skeleton(LlamaForCausalLM, self._config(), self.dtype)
        return Loaded(module=module, family="causal_lm", name=self._name, vocab_size=module.config.vocab_size, weights=self._weights)

    def load(self, seed: int = 0, tell: Tell | None = None) -> Loaded:
        """Random weights of a seed in seconds, or the checkpoint's."""
        from transformers import LlamaForCausalLM

        loaded = self.skeleton()
        if self.weights == RANDOM:
            state = random_state(loaded.module, seed)
            loaded.module = filled(LlamaForCausalLM, self._config(), state, self.dtype, "random weights")
            loaded.digest = hashlib.sha256(f"{asdict(self)}|{seed}".encode()).hexdigest()
            loaded.notes.append(f"random weights of seed {seed}: shapes and speed only")
            return loaded
        folder = Path(self.weights).expanduser()
        state = checkpoint.read(folder, trust=self.trust)
        loaded.notes += checkpoint.require_finite(state.items(), str(folder), allow=self.allow_nonfinite)
        loaded.module = filled(LlamaForCausalLM, self._config(), state, self.dtype, str(folder))
        loaded.digest = checkpoint.module_digest(loaded.module)
        loaded.tokenizer = companions(folder).tokenizer
        return loaded

    def companions(self) -> Companions:
        """What lies beside the weights of a checkpoint; nothing beside random ones."""
        return Companions() if self.weights == RANDOM else companions(Path(self.weights).expanduser())

    @property
    def _name(self) -> str:
        return self.size.value if self.layers is None else f"{self.size.value}, {self.layers} layers"

    @property
    def _weights(self) -> str:
        return "random" if self.weights == RANDOM else "trained"

    def _config(self) -> LlamaConfig:
        from transformers import LlamaConfig

        layers, width, hidden, heads, kv_heads, head, tied = _SHAPES[self.size]
        return LlamaConfig(
            vocab_size=128_256,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=self.layers or layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head,
            max_position_embeddings=131_072 if self.size is Size.llama3_1b else 8192,
            rms_norm_eps=1e-5,
            rope_parameters=dict(_LLAMA_3_2_ROPE if self.size is Size.llama3_1b else _LLAMA_3_ROPE),
            tie_word_embeddings=tied,
            bos_token_id=128_000,
            eos_token_id=128_001,
        )
