"""The values that a stored weight can take, so that an algorithm can choose among them before anything is stored.

A grid is the scales (and zero points) of one weight under one scheme. Without `shrink` it is exactly the one that rounding to
nearest stores (`kernels.rounding`); algorithms shrink its ranges, choose other values on it than the nearest, and have the result
stored in the same format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from optforge.kernels import rounding
from optforge.kernels.formats import Fp8Format
from optforge.spec import Scheme
from optforge.transforms.quantize.algorithms import has_grid

_LARGEST = {"int8": 127.0, "int4": 7.0}
"""The largest integer of a symmetric weight."""

Stored = dict[str, Tensor | None]
"""The parameters of a quantized weight by name, as `kernels.linears.quantize_` registers them."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Scales of a weight [N, K]: `value = scale * (integer - zero)`, or scale times an fp8 number."""

    scheme: Scheme
    fmt: Fp8Format
    columns: int
    scale: Tensor
    """fp32 [N, groups]; [1, 1] where the whole weight has one."""
    zero: Tensor | None = None
    """Whole numbers as fp32 [N, groups]; None for a symmetric scheme."""

    @classmethod
    def of(cls, weight: Tensor, scheme: Scheme, fmt: Fp8Format, shrink: Tensor | float = 1.0) -> Grid:
        """The grid that spans the weight [N, K], each range times `shrink` (a number, or [N, groups] in 0..1)."""
        assert has_grid(scheme), scheme
        values = weight.float()
        if scheme.granularity == "tensor":
            low, high = values.amin().reshape(1, 1), values.amax().reshape(1, 1)
        else:
            grouped = in_groups(values, group_size(scheme, weight.shape[1]))
            low, high = grouped.amin(2), grouped.amax(2)
        low, high = low.clamp(max=0) * shrink, high.clamp(min=0) * shrink
        if not scheme.symmetric:
            scale = ((high - low) / 15).clamp_min(rounding.TINY)
            zero = torch.round(-low / scale).clamp(0, 15)
            return cls(scheme=scheme, fmt=fmt, columns=weight.shape[1], scale=scale, zero=zero)
        largest = _LARGEST.get(scheme.weight_dtype, fmt.maximum)
        scale = (torch.maximum(-low, high) / largest).clamp_min(rounding.TINY)
        return cls(scheme=scheme, fmt=fmt, columns=weight.shape[1], scale=scale)

    def spread(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of every weight, [N, K] each (or of every row, [N, 1] or [1, 1], where columns share them)."""
        if self.scale.shape[1] == 1:
            return self.scale, self.zero
        size = group_size(self.scheme, self.columns)
        scale, zero = (None if each is None else each.repeat_interleave(size, dim=1)[:, : self.columns] for each in (self.scale, self.zero))
        assert scale is not None
        return scale, zero

    def nearest(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The values on the grid next to `values`; scale and zero broadcast against them. Zero is always on the grid."""
        steps = values / scale
        if zero is not None:
            return (torch.clamp(torch.round(steps) + zero, 0, 15) - zero) * scale
        if self.scheme.weight_dtype == "fp8":
            return rounding.to_fp8(steps.float(), self.fmt).to(values.dtype) * scale
        largest = _LARGEST[self.scheme.weight_dtype]
        return torch.round(steps).clamp(-largest, largest) * scale

    def round(self, weight: Tensor) -> Tensor:
        """fp32 [N, K]: the nearest values on the grid."""
        return self.nearest(weight.float(), *self.spread())

    def rows(self, chosen: Tensor, other: Grid) -> Grid:
        """This grid in the rows that `chosen` (bool [N]) names, `other` elsewhere. With one scale for all, this grid."""
        if self.scale.shape[0] == 1 != chosen.numel():
            return self
        at = chosen[:, None]
        zero = None if self.zero is None or other.zero is None else torch.where(at, self.zero, other.zero)
        return replace(self, scale=torch.where(at, self.scale, other.scale), zero=zero)

    def part(self, start: int, stop: int) -> Grid:
        """The grid of some rows."""
        if self.scale.shape[0] == 1:
            return self
        return replace(self, scale=self.scale[start:stop], zero=None if self.zero is None else self.zero[start:stop])

    def store(self, weight: Tensor) -> Stored:
        """What is stored for a weight [N, K] whose values lie on this grid (others are rounded to it)."""
        scale, zero = self.spread()
        steps = weight.float() / scale
        if self.scheme.weight_dtype == "int4":
            offset = rounding.INT4_BIAS if zero is None else zero
            stored = (torch.round(steps).clamp(-7, 7) if zero is None else torch.round(steps)) + offset
            kept = None if self.zero is None else self.zero.to(torch.uint8)
            return {
                "weight": rounding.pack_int4(stored.clamp(0, 15).to(torch.uint8)),
                "weight_scale": self.scale,
                "weight_zero_point": kept,
            }
        if self.scheme.weight_dtype == "fp8":
            return {"weight": rounding.to_fp8(steps, self.fmt).view(torch.uint8), "weight_scale": self.scale}
        values = torch.round(steps).clamp(-127, 127).to(torch.int8)
        if self.scheme.activation_dtype is None:
            return {"weight": values, "weight_scale": self.scale}
        sums = values.sum(1, dtype=torch.int32).float() * self.scale.flatten()
        return {"weight": values, "weight_scale": self.scale, "weight_sum": sums}


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A decided weight: where it lies, and what had to be done to decide it."""

    grid: Grid
    weight: Tensor
    """fp32 [N, K], on the grid."""
    damping: float | None = None
    """gptq: what was really added to the diagonal, as a share of its mean."""
    failed: str | None = None
    """Why the weight is merely rounded to nearest."""

    @property
    def stored(self) -> Stored:
        return self.grid.store(self.weight)

    def split(self, sizes: Sequence[int]) -> list[Solved]:
        """The weights whose rows were decided together, of so many rows each."""
        stops = list(accumulate(sizes))
        spans = zip([0, *stops], stops, strict=False)
        return [replace(self, grid=self.grid.part(start, stop), weight=self.weight[start:stop]) for start, stop in spans]

    @classmethod
    def joined(cls, parts: Sequence[Solved]) -> Solved:
        """The rows of several weights of one scheme as those of one; the largest damping and the first failure are kept."""
        first = parts[0].grid
        zeros = [part.grid.zero for part in parts if part.grid.zero is not None]
        grid = replace(first, scale=torch.cat([part.grid.scale for part in parts]), zero=torch.cat(zeros) if zeros else None)
        used = [part.damping for part in parts if part.damping is not None]
        failed = next((part.failed for part in parts if part.failed is not None), None)
        return cls(grid=grid, weight=torch.cat([part.weight for part in parts]), damping=max(used, default=None), failed=failed)


def error(change: Tensor, gram: Tensor) -> Tensor:
    """Mean squared error [N] of each output of a layer whose weight is off by `change` [N, K]: the diagonal of D G Dt.

    Args:
        gram: [K, K], the mean of x xT over the layer's inputs.
    """
    change = change.to(gram.dtype)
    return ((change @ gram) * change).sum(1)


def group_size(scheme: Scheme, columns: int) -> int:
    """Columns that share a scale."""
    return scheme.group_size or columns


def in_groups(values: Tensor, size: int) -> Tensor:
    """[N, K] to [N, groups, size]; a short last group is filled with zeros, which widen no range."""
    short = -values.shape[1] % size
    return torch.nn.functional.pad(values, (0, short)).reshape(values.shape[0], -1, size)
