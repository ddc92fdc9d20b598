"""The arithmetic of quality: running totals over outputs that are never all in memory at once.

Values are compared in fp32 and summed in float64. Rows are taken a few at a time, because a window of logits over a large
vocabulary is a hundred megabytes and more in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import log_softmax

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

IDENTICAL_DB = 300.0
"""Stands for outputs that are the same bit for bit, whose ratio is infinite and cannot be written to JSON."""
_CHUNK_BYTES = 2**25


@dataclass(kw_only=True)
class Signal:
    """Energy of the baseline's outputs and of the difference, for SQNR and relative error."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, reference: Tensor, found: Tensor) -> None:
        """Two tensors of one shape, any floating dtype; sums over rows in fp32, over the rest in float64."""
        wide_reference, wide_found = reference.float(), found.float()
        self.signal += _energy(wide_reference)
        self.noise += _energy(wide_found - wide_reference)

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise); None where the outputs are not finite or all zero."""
        if not math.isfinite(self.noise) or not math.isfinite(self.signal):
            return None
        if self.noise == 0.0:
            return IDENTICAL_DB
        return 10.0 * math.log10(self.signal / self.noise) if self.signal > 0.0 else None

    @property
    def relative_error(self) -> float | None:
        if not math.isfinite(self.noise) or not math.isfinite(self.signal):
            return None
        if self.noise == 0.0:
            return 0.0
        return math.sqrt(self.noise / self.signal) if self.signal > 0.0 else None


def _energy(values: Tensor) -> float:
    rows = values.reshape(-1, values.shape[-1]) if values.dim() > 0 else values.reshape(1, 1)
    return float(rows.square().sum(-1).double().sum())


@dataclass(kw_only=True)
class Likelihood:
    """Negative log-likelihood of the true classes, in nats."""

    total: float = 0.0
    count: int = 0

    def add(self, log_probabilities: Tensor, classes: Tensor) -> None:
        """Log-probabilities [N, classes] in fp32 and true classes [N]."""
        if classes.numel():
            self.total -= float(log_probabilities.gather(-1, classes[:, None]).double().sum())
            self.count += classes.numel()

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count and math.isfinite(self.total) else None


@dataclass(kw_only=True)
class Divergence:
    """KL(baseline || candidate) and top-1 agreement over rows of logits."""

    kl_total: float = 0.0
    agreeing: int = 0
    count: int = 0
    broken: int = 0
    """Rows whose outputs hold NaN or Inf."""

    def add(self, kl: Tensor, agreeing: Tensor) -> None:
        """KL [N] in nats and agreement [N], bool. Any NaN or Inf among a row's logits reaches its KL."""
        self.kl_total += float(kl.double().sum())
        self.agreeing += int(agreeing.sum())
        self.broken += int((~torch.isfinite(kl)).sum())
        self.count += kl.numel()

    @property
    def kl(self) -> float | None:
        """Mean KL in nats; rounding can leave a hair below zero, which is zero."""
        return max(0.0, self.kl_total / self.count) if self.count and math.isfinite(self.kl_total) else None

    @property
    def agreement(self) -> float | None:
        return self.agreeing / self.count if self.count and not self.broken else None


def full_kl(reference: Tensor, found: Tensor) -> Tensor:
    """KL per row [N] of two tensors of log-probabilities [N, classes] in fp32.

    Classes that the baseline excludes (a logit of -Inf) add nothing; a class that only the candidate excludes makes the row
    infinite, as it must.
    """
    kl = (reference.exp() * (reference - found)).sum(-1)
    if bool(torch.isfinite(kl).all()):
        return kl
    terms = torch.where(reference == -math.inf, 0.0, reference.exp() * (reference - found))
    return terms.sum(-1)


def top_kl(reference: Tensor, indices: Tensor, found: Tensor) -> Tensor:
    """A lower bound of KL per row, from the baseline's largest log-probabilities alone.

    `reference` and `indices` are [N, k], `found` is [N, classes]. All other classes form one bin; merging classes can only
    lower a divergence (data processing inequality; Cover and Thomas, Elements of Information Theory, section 2.8).
    """
    own = found.gather(-1, indices)
    mass = reference.exp()
    rest, own_rest = (1.0 - mass.double().sum(-1)).clamp_min(0.0), (1.0 - own.exp().double().sum(-1)).clamp_min(1e-12)
    tail = torch.where(rest > 0, rest * (rest.clamp_min(1e-12).log() - own_rest.log()), 0.0)
    return (mass * (reference - own)).sum(-1) + tail.float()


def same_top(reference: Tensor, chosen: Tensor) -> Tensor:
    """Whether each chosen class [N] is one of the baseline's largest logits [N, classes]; in bf16 several often tie."""
    return reference.gather(-1, chosen[:, None])[:, 0] == reference.amax(-1)


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows whose fp32 values stay within a fixed memory."""
    step = max(1, _CHUNK_BYTES // (4 * columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities over the last dimension, in fp32."""
    return log_softmax(logits.float(), dim=-1)
