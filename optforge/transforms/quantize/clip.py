"""How far the range of each group is shrunk: a few large weights may be cut off if all the others then lie on a finer grid.

The search of Lin and others, "AWQ: Activation-aware weight quantization", 2023, section 3.2 and its published code: each group alone,
by the error that it makes of its own inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optforge.kernels.formats import Fp8Format
from optforge.spec import Scheme
from optforge.transforms.quantize.grids import Grid, group_size, in_groups

STEPS, LEAST = 20, 0.5
"""Ranges are tried from the whole down to `LEAST` of it, in equal steps."""


def shrunk(weight: Tensor, gram: Tensor, scheme: Scheme, fmt: Fp8Format) -> Tensor | float:
    """The best share of each range, fp32 [N, groups]; 1 where a whole weight has one scale, which is left as it is.

    Args:
        weight: [N, K].
        gram: [K, K], the mean of x xT over the layer's inputs.
    """
    if scheme.granularity == "tensor":
        return 1.0
    values, size = weight.float(), group_size(scheme, weight.shape[1])
    blocks = _diagonal_blocks(gram.float(), size)
    best = torch.ones_like(Grid.of(weight, scheme, fmt).scale)
    least = torch.full_like(best, torch.inf)
    for step in range(STEPS):
        share = 1 - step * (1 - LEAST) / STEPS
        change = in_groups(Grid.of(weight, scheme, fmt, share).round(weight) - values, size)
        found = (torch.einsum("ngi,gij->ngj", change, blocks) * change).sum(2)
        better = found < least
        least, best = torch.where(better, found, least), torch.where(better, share, best)
    return best


def _diagonal_blocks(gram: Tensor, size: int) -> Tensor:
    """[groups, size, size]: how the inputs of each group depend; what a short last group lacks is zero."""
    groups = -(-len(gram) // size)
    short = groups * size - len(gram)
    padded = torch.nn.functional.pad(gram, (0, short, 0, short)).reshape(groups, size, groups, size)
    return torch.diagonal(padded, dim1=0, dim2=2).permute(2, 0, 1)
