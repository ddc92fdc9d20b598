"""Removes weights: single ones and 2 of 4 (magnitude, Wanda, SparseGPT), or whole attention heads, MLP channels and layers.

Single weights become zeros in tensors of the same shape, which cost as much as before until a sparse kernel multiplies them
(see sparse.py); heads, channels and layers shrink the tensors themselves. What was zeroed stays zero: every later step is
held against it (optforge/measure/sparsity.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from optforge.errors import Problem
from optforge.spec import Hardware
from optforge.transforms.base import Context, Lowered, Phase, Receipt

if TYPE_CHECKING:
    from torch import nn

DEFAULT_TARGETS = ("Linear", "Conv1D", "Conv2d")


class Method(Enum):
    magnitude = "magnitude"
    wanda = "wanda"
    sparsegpt = "sparsegpt"
    heads = "heads"
    channels = "channels"
    layers = "layers"


STRUCTURED = (Method.heads, Method.channels, Method.layers)
Pattern = Enum("Pattern", {"2:4": (2, 4), "4:8": (4, 8)})
"""Name -> how many of how many neighbouring inputs of an output become zero."""


class Kernel(Enum):
    auto = "auto"
    dense = "dense"
    sparse = "sparse"


@dataclass(frozen=True, kw_only=True)
class Prune:
    """What is removed, how much of it, and by which measure of importance."""

    kind: ClassVar[str] = "prune"
    phase: ClassVar[Phase] = Phase.PRUNE

    method: Method
    """Single weights by magnitude (no data), wanda (weight times input norm) or sparsegpt (second order, the other weights make
    up for it); or whole heads, channels (of MLPs) or layers, by what they do to the samples."""
    sparsity: float = 0.5
    """The share that is removed: of each layer's weights, of each layer's heads or channels, or of the layers."""
    pattern: Pattern | None = None
    """Single weights: 2:4 or 4:8 zeroes 2 of 4 or 4 of 8 neighbouring inputs (a sparsity of 0.5); null zeroes any."""
    targets: list[str] = field(default_factory=lambda: list(DEFAULT_TARGETS))
    """Single weights: selectors of what is pruned. Of the default entries, those that the model lacks are left out."""
    ignore: list[str] = field(default_factory=list)
    """Selectors of what is left as it is; for layers, of layers that must stay."""
    ignore_extra: list[str] = field(default_factory=list)
    """Added to `ignore`, where replacing its list would lose the recipe's entries."""
    kernel: Kernel = Kernel.auto
    """2:4: sparse multiplies by a sparse kernel, dense by a weight with zeros; auto is sparse where the device has a kernel
    that gains, and no later step rewrites the weights."""
    samples: int = 128
    """Calibration samples of all methods but magnitude."""
    sample_tokens: int = 512
    """Tokens of each, for language models."""
    damping: float = 0.01
    """sparsegpt: the share of the mean that is added to the diagonal of the second-order matrix."""
    block_columns: int = 128
    """sparsegpt: inputs among which one choice of weights is made."""
    refit: int = 32
    """sparsegpt: rounds that fit the weights that are left once all zeros are known; 0 leaves them as the method does."""
    round_to: int = 32
    """channels: what stays of each layer is rounded up to a multiple of it, since hardware multiplies in tiles."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """Fields that contradict the method, and steps around it that undo or forbid it."""
        where, structured = f"step {ctx.step}", self.method in STRUCTURED
        typed = f"steps.{ctx.step}"
        if not 0 < self.sparsity < 1:
            yield Problem(where=where, what=f"sparsity {self.sparsity:g} is no share between 0 and 1", fix=f"write {typed}.sparsity=0.3")
        if self.pattern is not None and structured:
            what = f"pattern {self.pattern.name} does not apply to {self.method.name}, which removes whole parts"
            yield Problem(where=where, what=what, fix=f"write {typed}.pattern=null")
        elif self.pattern is not None and self.sparsity != 0.5:
            what = f"pattern {self.pattern.name} zeroes half of the weights, and sparsity is {self.sparsity:g}"
            yield Problem(where=where, what=what, fix=f"write {typed}.sparsity=0.5, or {typed}.pattern=null")
        if self.kernel is Kernel.sparse and (self.pattern is None or self.pattern.name != "2:4"):
            yield Problem(where=where, what="kernel: sparse multiplies 2:4 weights only", fix=f"write {typed}.pattern=2:4")
        rewriting = [kind for kind in ctx.later if kind in ("quantize", "heal")]
        if self.kernel is Kernel.sparse and rewriting:
            what = f"kernel: sparse, and a later {rewriting[0]} step rewrites the same weights"
            yield Problem(where=where, what=what, fix=f"write {typed}.kernel=dense")
        if ctx.workload == "train" and not structured:
            what = "training would fill the zeros again"
            yield Problem(where=where, what=what, fix=f"drop it with '~steps.{ctx.step}', or heal after it and plan workload=prefill")
        for name in ("samples", "sample_tokens", "block_columns", "round_to"):
            if getattr(self, name) < 1:
                yield Problem(where=where, what=f"{name} must be at least 1", fix=f"write {typed}.{name}=32")
        if self.damping <= 0:
            yield Problem(where=where, what=f"damping {self.damping:g} is not positive", fix=f"write {typed}.damping=0.01")
        if self.method is not Method.magnitude:
            yield from ctx.without_data(None if structured else f"{typed}.use=prune/magnitude")

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs as written on every target: zeros need no units."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Prunes in place. Everything that refuses is found before the first weight changes.

        Raises:
            SelectorError: an entry of `targets` or `ignore` matches nothing.
            PlanError: a targeted layer is quantized or parametrised, or the model has nothing of the kind that is to go.
            DataError: there are fewer samples than asked for, or none.
            StepError: a model with parts removed does not run.
        """
        if self.method is Method.layers:
            from optforge.transforms.prune import layers

            return layers.apply(model, self, ctx)
        if self.method is Method.heads:
            from optforge.transforms.prune import heads

            return heads.apply(model, self, ctx)
        if self.method is Method.channels:
            from optforge.transforms.prune import channels

            return channels.apply(model, self, ctx)
        from optforge.transforms.prune import weights

        return weights.apply(model, self, ctx)

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """Removes what the receipt names; where single weights were zeroed, only a sparse kernel's storage differs."""
        if self.method is Method.layers:
            from optforge.transforms.prune import layers

            layers.replay(model, receipt.decisions)
        elif self.method in (Method.heads, Method.channels):
            from optforge.transforms.prune import shrink

            shrink.replay(model, receipt.decisions)
        else:
            from optforge.transforms.prune import weights

            weights.replay(model, receipt.decisions)
