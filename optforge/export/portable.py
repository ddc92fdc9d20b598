"""Takes forms that only this package or one library multiplies out of a model, where they are no part of what it computes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from optforge.export.base import Subject
from optforge.share import alias
from optforge.transforms.prune.sparse import SparseLinear


def portable(subject: Subject) -> tuple[Subject, list[str]]:
    """The same model with weights that are compressed for the 2:4 kernel as plain ones, and what was done; itself where there are none."""
    names = [name for name, module in subject.module.named_modules() if isinstance(module, SparseLinear)]
    if not names:
        return subject, []
    module = alias(subject.module)
    for child in module.modules():
        if isinstance(child, SparseLinear):
            child.weight, child.__class__ = _dense(child), nn.Linear  # type: ignore[assignment]  # what it was made from
    said = f"{len(names)} layers were compressed 2:4 for a kernel of this device; here their weights are whole, with the zeros in them"
    return replace(subject, module=module), [said]


def _dense(linear: SparseLinear) -> nn.Parameter:
    if linear.weight.is_meta:
        weight = torch.empty(linear.out_features, linear.in_features, dtype=linear.weight.dtype, device="meta")
        return nn.Parameter(weight, requires_grad=False)
    return nn.Parameter(linear.dequantize(), requires_grad=False)
