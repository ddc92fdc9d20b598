"""Keeps the KV cache of a decoder in 8 bits: half the bytes of bf16, a scale per token and head.

The step changes no weight: it marks the attention modules, and the caches that are then made for the model keep their keys and values
so (`optforge/kernels/kv_cache.py`). Quality is measured through such a cache. Values are written as they come, so there is nothing to
calibrate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from optforge.errors import PlanError, Problem
from optforge.spec import Hardware
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Touched

if TYPE_CHECKING:
    from torch import nn

    from optforge.kernels.kv_cache import Format


class Stored(Enum):
    int8 = "int8"
    fp8 = "fp8"


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """How keys and values are kept between tokens."""

    kind: ClassVar[str] = "kv_cache"
    phase: ClassVar[Phase] = Phase.MEMORY

    dtype: Stored
    """int8: 127 even steps to the largest value of a token and head; fp8 (e4m3): steps in proportion to each value."""
    ignore: list[str] = field(default_factory=list)
    """Selectors of attention modules (or layers) whose keys and values stay as they are."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """A workload that keeps no cache, which nothing of this would change."""
        if not ctx.uses_cache:
            what = f"workload {ctx.workload} keeps no KV cache, so there is nothing to store in {self.dtype.name}"
            yield Problem(where=f"step {ctx.step}", what=what, fix=f"workload=decode, or drop it with '~steps.{ctx.step}'")

    def lower(self, target: Hardware) -> Lowered | None:
        """Runs everywhere: values are brought back before they are multiplied."""
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Marks every attention module that `ignore` does not cover.

        Raises:
            SelectorError: an entry of `ignore` matches nothing.
            PlanError: the model has no attention that writes to a cache of transformers, or its cache is quantized already.
        """
        from optforge.kernels.formats import format_for
        from optforge.kernels.kv_cache import MARK, Format, attention_modules
        from optforge.measure.size import weight_bytes
        from optforge.select import select

        found = dict(attention_modules(model))
        where = f"step {ctx.step}"
        if not found:
            what = "the model has no attention that writes to a cache of transformers (a module with layer_idx and head_dim)"
            raise PlanError(Problem(where=where, what=what, fix=f"drop it with '~steps.{ctx.step}'"))
        if marked := [name for name, module in found.items() if hasattr(module, MARK)]:
            what = f"the cache of {marked[0]} and {len(marked) - 1} more is quantized already" if marked[1:] else f"that of {marked[0]} is"
            raise PlanError(Problem(where=where, what=what, fix="drop one of the kv_cache steps"))
        chosen = select(model, ["re:.*"], self.ignore, step=ctx.step, eligible=lambda name, module: name in found)
        form = Format(self.dtype.name, format_for(ctx.target).name)
        receipt = Receipt(total_bytes=weight_bytes(model), ignored=chosen.ignored)
        receipt.decisions = {"layers": list(chosen.chosen), "dtype": form.dtype, "fp8_format": form.fp8_format}
        receipt.touched = [Touched(name=name, what=f"keys and values in {form.dtype}") for name in chosen.chosen]
        before = _bytes(model)
        self._mark(model, receipt, form)
        if before is not None:
            after = _bytes(model)
            receipt.notes.append(f"one token takes {after:,} bytes of cache in place of {before:,}; it is brought back before each product")
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """The same marks; there are no values."""
        from optforge.kernels.kv_cache import Format

        self._mark(model, receipt, Format(receipt.decisions["dtype"], receipt.decisions["fp8_format"]))

    def _mark(self, model: nn.Module, receipt: Receipt, form: Format) -> None:
        from optforge.kernels.kv_cache import mark_

        for name in receipt.decisions["layers"]:
            mark_(model.get_submodule(name), form)


def _bytes(model: nn.Module) -> int | None:
    """Of one token of one sequence in all layers; None for a model whose config does not tell."""
    from optforge.kernels.kv_cache import position_bytes
    from optforge.measure.work import compute_dtype

    dtype = compute_dtype(model)
    known = hasattr(getattr(model, "config", None), "get_text_config")
    return position_bytes(model, dtype) if known and dtype is not None else None
