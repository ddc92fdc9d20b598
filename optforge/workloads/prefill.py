"""Prefill: a prompt through a language model, up to the logits that choose the next token.

Only the last position's logits are computed, as a server does. No KV cache is written: the keys and values are computed
all the same, and what is left out is keeping them, which for a cache that grows is holding on to tensors that exist
already (for SmolLM2 and 256 tokens 5.9 MB, against 270 MB of weights read).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from optforge.data.base import DataSource
from optforge.errors import Problem
from optforge.measure.work import count_flops, read_bytes
from optforge.models.base import Loaded
from optforge.workloads.base import begin_pass, example_ids, not_positive, token_ids, too_long

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LAST_ONLY = {"use_cache": False, "logits_to_keep": 1}


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """A batch of prompts, each run once from its first to its last token."""

    kind: ClassVar[str] = "prefill"
    families: ClassVar[tuple[str, ...]] = ("causal_lm",)
    uses_cache: ClassVar[bool] = False

    batch_size: int = 1
    """Prompts in a batch."""
    prompt_tokens: int = 256
    """Tokens of each prompt, real ones from the data set."""

    def check(self, loaded: Loaded) -> Iterator[Problem]:
        yield from not_positive("workload", batch_size=self.batch_size, prompt_tokens=self.prompt_tokens)
        if loaded.family not in self.families:
            yield Problem(where="workload", what=f"prefill runs language models, not {loaded.family}", fix="workload=forward")
        elif "logits_to_keep" not in inspect.signature(type(loaded.module).forward).parameters:
            what = f"{type(loaded.module).__name__}.forward takes no logits_to_keep, so prefill would compute every position's logits"
            yield Problem(where="workload", what=what, fix="workload=forward")
        yield from too_long(loaded, "prompt_tokens", self.prompt_tokens)

    def example(self, loaded: Loaded, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = example_ids(loaded, device)
        return (), {"input_ids": ids, **LAST_ONLY}

    def prepare(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int = 0) -> PrefillWork:
        """The prompts on `device`, int64, shape [batch_size, prompt_tokens]."""
        return PrefillWork(ids=token_ids(loaded, data, (self.batch_size, self.prompt_tokens), device, seed))


@dataclass(kw_only=True)
class PrefillWork:
    """Prompts on the device."""

    ids: Tensor
    calls: int = 1
    unit: str = "tokens"

    @property
    def units(self) -> int:
        return self.ids.numel()

    def ready(self, module: nn.Module) -> None:
        """Nothing to do: token ids have no dtype to follow and nothing is kept between calls."""

    def run(self, module: nn.Module) -> Tensor:
        """Logits of the last position, shape [batch, 1, vocabulary]."""
        import torch

        with torch.no_grad():
            begin_pass(self.ids.device)
            logits: Tensor = module(input_ids=self.ids, **LAST_ONLY).logits
        return logits

    def once(self, module: nn.Module) -> Tensor:
        return self.run(module)

    def kept(self, module: nn.Module) -> tuple[Tensor, ...]:
        return ()

    def flops(self, module: nn.Module) -> int | None:
        """Operations of the prompt's pass, attention in full; see `count_flops`."""
        import torch

        return count_flops(module, lambda forward: forward(input_ids=torch.zeros(self.ids.shape, dtype=torch.int64), **LAST_ONLY))

    def bytes(self, module: nn.Module) -> int | None:
        """Weights once, embedding rows as looked up."""
        return read_bytes(module, self.ids.numel())
