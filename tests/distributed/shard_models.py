"""Models that a run's command line names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from toys import TinyLM, tiny_lm


def ids() -> Tensor:
    """Tokens [2, 8]; made without a draw, which the skeleton on meta has none for."""
    return (torch.arange(16).reshape(2, 8) * 7) % 64


def tiny() -> tuple[nn.Module, Any]:
    """A decoder with tied weights, and tokens to run it on."""
    return tiny_lm(tied=True), ids()


class Learner(TinyLM):
    """Gives its loss, which is all that a training asks of a module."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        logits = super().forward(input_ids)
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())}


def learner() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Learner(), ids()


def hungry() -> tuple[nn.Module, Any]:
    """One that runs out of memory on rank 1, once it is sharded or not."""
    import os

    module = tiny_lm()

    def refuse(*_: Any) -> None:
        if os.environ.get("RANK") == "1":
            raise MemoryError("no room for 40 GB")

    module.register_forward_pre_hook(refuse)
    return module, ids()
