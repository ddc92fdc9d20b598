"""The most likely token, found on the device: the index of the largest logit of each row.

logits [..., V] in bf16, fp16 or fp32; int64 [...]. Of equal logits the first wins, and NaN is larger than any number, both as
`torch.argmax` on a CPU has it; the result is the same at every run. PyTorch's reduction takes one block for a row, which a vocabulary
keeps busy for tens of microseconds; here a row is split over many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optforge.kernels.dispatch import define_operator, nbytes, takes_kernel


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit, int64 [...]."""
    if takes_kernel(logits):
        found: Tensor = torch.ops.optforge.argmax(logits)
        return found
    return _reference(logits)


def _reference(logits: Tensor) -> Tensor:
    return torch.argmax(logits, dim=-1)


def _launch(logits: Tensor) -> Tensor:
    from optforge.kernels.argmax_kernel import launch  # Triton exists on Linux only

    return launch(logits)


def _fake(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


def _flops(*arguments: Any, **rest: Any) -> int:
    """No product."""
    return 0


def _moved(logits: Tensor) -> int:
    return nbytes(logits) + 8 * (logits.numel() // max(logits.shape[-1], 1))


define_operator("argmax", "(Tensor logits) -> Tensor", cuda=_launch, reference=_reference, fake=_fake, flops=_flops, moved=_moved)
