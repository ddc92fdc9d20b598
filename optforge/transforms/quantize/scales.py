"""What the inputs of linear layers are divided by, and their weights multiplied by, before the weights are rounded.

`searched`: AWQ (Lin and others, "AWQ: Activation-aware weight quantization for on-device LLM compression and acceleration", 2023,
section 3.2). A weight whose inputs are large matters more; multiplied by a scale it is rounded in finer steps. The scales are a
power of the mean input, the power is searched.

`smoothing`: SmoothQuant (Xiao and others, "SmoothQuant: Accurate and efficient post-training quantization for large language models",
2023, equation 4). Inputs that are rounded while the model runs lose their range where a few columns are far larger than the others;
a share of that range is moved into the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from optforge.kernels.formats import Fp8Format
from optforge.spec import Scheme
from optforge.transforms.quantize.grids import Grid, error
from optforge.transforms.quantize.solve import Known

POWERS = 20
"""Powers that are tried, in equal steps from 0 up to below 1."""
ROWS_TRIED = 512
"""Outputs of each layer, spread evenly, whose error the search looks at: fewer of a large layer take less time and hardly find others."""
LEAST_SIZE = 1e-4
"""Inputs smaller than this share of their mean are treated as if they had this size, lest a scale becomes 0."""


def searched(weights: Sequence[Tensor], known: Known, scheme: Scheme, fmt: Fp8Format, channels: Tensor | None = None) -> Tensor:
    """The scales [C] with the least squared error of all the layers' outputs, rounded to nearest; ones if none is better.

    Args:
        weights: [N, K] of each layer that reads these inputs and is rounded.
        channels: int64 [K], the channel that each input is made of; None where C is K and each is its own.
    """
    best, least = torch.ones(1, device=known.gram.device), torch.inf
    tried = [weight[:: -(-len(weight) // ROWS_TRIED)].float() for weight in weights]
    shares = [len(weight) / len(rows) for weight, rows in zip(weights, tried, strict=True)]
    for scales in _candidates(weights, known, channels):
        spread = scales if channels is None else scales[channels]
        total = 0.0
        for values, share in zip(tried, shares, strict=True):
            multiplied = values * spread
            change = Grid.of(multiplied, scheme, fmt).round(multiplied) / spread - values
            total += share * float(error(change, known.gram).sum())
        if total < least:
            best, least = scales, total
    return best


def _candidates(weights: Sequence[Tensor], known: Known, channels: Tensor | None) -> Iterator[Tensor]:
    """Powers of the mean inputs, alone and over the complementary power of the mean weights."""
    sizes = _floored(_per_channel(known.absolute, channels, "mean"))
    held = _floored(_per_channel(torch.cat([weight.float().abs() for weight in weights]).mean(0), channels, "mean"))
    for step in range(POWERS):
        power = step / POWERS
        yield _centred(sizes**power)
        yield _centred(sizes**power / held ** (1 - power))


def smoothing(weights: Sequence[Tensor], known: Known, alpha: float, channels: Tensor | None = None) -> Tensor:
    """Scales [C]: largest input to the power `alpha` over the largest weight to the power `1 - alpha`; 1 where either is 0.

    Args:
        weights: [N, K] of every layer that reads these inputs.
        channels: see `searched`.
    """
    inputs = _per_channel(known.largest, channels, "amax")
    held = _per_channel(torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0), channels, "amax")
    scales = inputs**alpha / held ** (1 - alpha)
    return torch.where((inputs > 0) & (held > 0), scales, torch.ones_like(scales))


def _per_channel(values: Tensor, channels: Tensor | None, reduce: str) -> Tensor:
    """[K] to [C]: the mean or the largest of the inputs that are made of one channel."""
    if channels is None:
        return values
    empty = torch.zeros(int(channels.max()) + 1, dtype=values.dtype, device=values.device)
    return empty.scatter_reduce(0, channels, values, reduce, include_self=False)


def _floored(values: Tensor) -> Tensor:
    return values.clamp_min(LEAST_SIZE * float(values.mean())).clamp_min(torch.finfo(torch.float32).tiny)


def _centred(scales: Tensor) -> Tensor:
    """With the geometric mean of the largest and the smallest at 1, as the paper's code has it."""
    return scales / (scales.amax() * scales.amin()).sqrt()
