"""Folds the masks of `torch.nn.utils.prune`: each masked weight becomes one plain parameter again, with its zeros in it.

A mask that is left in place makes the weight a computed attribute: checkpoints then carry `weight_orig` and `weight_mask`,
and no transform can replace it. Folding changes no output by a bit.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune

from optforge.select import original_name


def fold_masks_(model: nn.Module) -> list[str]:
    """Folds every mask in place, on meta too; the names of the tensors that were masked."""
    folded = []
    for path, module in model.named_modules():
        for name in [key.removesuffix("_orig") for key in module._parameters if key.endswith("_orig")]:
            if f"{name}_mask" not in module._buffers:
                continue  # spectral norm keeps a `_orig` too
            _fold(module, name)
            folded.append(f"{original_name(path)}.{name}" if path else name)
    return folded


def said(folded: list[str]) -> list[str]:
    """The sentence of a receipt or a model's notes; none where nothing was folded."""
    shown = ", ".join(folded[:3]) + (" ..." if len(folded) > 3 else "")
    return [f"folded {len(folded)} pruning mask{'s' * (len(folded) > 1)} of torch.nn.utils.prune ({shown})"] if folded else []


def _fold(module: nn.Module, name: str) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, prune.BasePruningMethod) and hook._tensor_name == name:
            del module._forward_pre_hooks[key]
    original, mask = module._parameters.pop(f"{name}_orig"), module._buffers.pop(f"{name}_mask")
    assert original is not None and mask is not None
    with torch.no_grad():
        weight = original.detach() * mask.to(original.dtype)
    vars(module).pop(name, None)
    module.register_parameter(name, nn.Parameter(weight, requires_grad=original.requires_grad))
