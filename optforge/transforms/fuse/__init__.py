"""Joins operations that belong together: sibling linears into one product, a batch norm into its convolution.

A wide product keeps the device busier than three narrow ones and reads the input once; a folded batch norm costs
nothing at all. Both are found by how data flows through the model, never by the class names of one model family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from optforge.errors import Problem
from optforge.spec import Hardware
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Search

if TYPE_CHECKING:
    from torch import nn


class Pattern(Enum):
    decoder = "decoder"
    conv_bn = "conv_bn"


class Attention(Enum):
    auto = "auto"
    keep = "keep"


class Products(Enum):
    auto = "auto"
    keep = "keep"


@dataclass(frozen=True, kw_only=True)
class Fuse:
    """What is joined, and what is left apart."""

    kind: ClassVar[str] = "fuse"
    phase: ClassVar[Phase] = Phase.FUSE
    search: ClassVar[Search] = {"decoder": {"attention": ("keep",)}}

    pattern: Pattern = Pattern.decoder
    """decoder: linears of one module that read the same input, inside repeated layers, become one product (q/k/v,
    gate/up); conv_bn: a batch norm that alone reads a convolution is folded into its weights."""
    attention: Attention = Attention.auto
    """decoder. auto: on a CPU, causal attention of a model of transformers runs over grouped heads, which PyTorch's own kernel is
    slower than there; keep: it stays as it is. Other devices keep theirs either way."""
    products: Products = Products.auto
    """decoder. auto: compiled, products of one row (decode at batch 1) become loops of the program itself, and a decode step one
    program, on a GPU one captured graph; keep: they call the library as they did."""
    ignore: list[str] = field(default_factory=list)
    """Selectors of modules that stay apart: linears for decoder, convolutions or batch norms for conv_bn."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """Whether there is something to join shows in `apply`, on the structure."""
        yield from ()

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs as written on every target."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Runs the model once on the context's example to see how data flows, then joins.

        Raises:
            PlanError: nothing can be joined, with the reason; or there is no example to run.
            StepError: the model's output on the example changed.
        """
        if self.pattern is Pattern.decoder:
            from optforge.transforms.fuse import decoder

            regroup, loops = self.attention is Attention.auto, self.products is Products.auto
            return decoder.apply(model, self.ignore, ctx, regroup=regroup, loops=loops)
        from optforge.transforms.fuse import conv_bn

        return conv_bn.apply(model, self.ignore, ctx)

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """Joins what the receipt names."""
        if self.pattern is Pattern.decoder:
            from optforge.transforms.fuse import decoder

            return decoder.replay(model, receipt.decisions)
        from optforge.transforms.fuse import conv_bn

        return conv_bn.replay(model, receipt.decisions)
