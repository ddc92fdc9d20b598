"""Zeroes single weights: by size alone, or block by block with what the samples give each layer.

Magnitude zeroes the smallest weights of each layer. Wanda (Sun and others 2023, "A Simple and Effective Pruning Approach for
Large Language Models", section 3) zeroes, in each row, those with the smallest |weight| times the norm of their input; in a
pattern, of each group of neighbours. For SparseGPT see sparsegpt.py. Blocks are pruned in order, so that each one sees the
inputs that the pruned ones before it give.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.calibrate.kept import Kept
from optforge.calibrate.statistics import Columns, Gram
from optforge.calibrate.walk import Block, walk
from optforge.errors import PlanError, Problem
from optforge.masks import fold_masks_, said
from optforge.measure.size import nbytes
from optforge.spec import Json
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.prune import masks, sparse, sparsegpt
from optforge.transforms.prune.survey import Survey, rows, survey, unrowed, weight_of

if TYPE_CHECKING:
    from optforge.transforms.prune import Prune

NOTES = "#notes"
"""Beside a block's weights in the cache: its notes as JSON."""
MAGNITUDE, WANDA, SPARSEGPT = "magnitude", "wanda", "sparsegpt"


def apply(model: nn.Module, options: Prune, ctx: Context) -> Receipt:
    """Prunes in place; see `Prune.apply`. On meta, and of the methods that need data while planning, only the receipt is made."""
    notes = said(fold_masks_(model))
    found = survey(model, options, ctx.step)
    _without_pruned(found, options)
    before = {name: nbytes(weight_of(module)) for name, module in found.layers.items()}
    pruned = _Pruning(options, found)
    if not ctx.planning and found.layers and options.method.name != MAGNITUDE:
        notes.append(_calibrated(model, pruned, ctx))
    else:
        for name, module in found.layers.items():
            pruned.without_data(name, module)
    for name in pruned.unseen:
        found.skipped[name] = "no sample reached it"
        del found.layers[name]
    receipt = _receipt(found, options, before, ctx)
    receipt.notes = [*notes, *pruned.notes]
    if options.pattern is not None:
        for module in found.layers.values():
            vars(module)[sparse.PATTERN] = options.pattern.name
    if options.pattern is not None and options.pattern.name == "2:4":
        sparse.convert(model, list(found.layers), options.kernel.name, ctx, receipt)
    return receipt


def replay(model: nn.Module, decisions: dict[str, Json]) -> None:
    """Folds masks as `apply` did, and stores for the sparse kernel what was stored for it."""
    fold_masks_(model)
    sparse.replay(model, decisions)


@dataclass(kw_only=True)
class Inputs:
    """What was remembered of a layer's inputs."""

    columns: Columns | None = None
    gram: Gram | None = None

    @property
    def count(self) -> int:
        return max(self.columns.rows if self.columns else 0, self.gram.rows if self.gram else 0)


@dataclass
class _Pruning:
    """The options at work, and what they came upon."""

    options: Prune
    found: Survey
    notes: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    @property
    def pattern(self) -> tuple[int, int] | None:
        return None if self.options.pattern is None else self.options.pattern.value

    def without_data(self, name: str, module: nn.Module) -> None:
        """By magnitude. While planning it stands in for the other methods, whose zeros are as many."""
        weight = rows(module, weight_of(module).detach())
        if weight.is_meta or self.options.method.name != MAGNITUDE:
            return
        score = weight.float().abs()
        self._say_nonfinite(name, weight)
        self._set(module, weight.masked_fill(self._mask(score, by_rows=False), 0))

    def with_data(self, name: str, module: nn.Module, inputs: Inputs) -> None:
        weight = rows(module, weight_of(module).detach())
        self._say_nonfinite(name, weight)
        if inputs.gram is not None and bool(weight.isfinite().all()):
            solved = sparsegpt.prune(
                weight,
                inputs.gram.matrix,
                sparsity=self.options.sparsity,
                pattern=self.pattern,
                damping=self.options.damping,
                block_columns=self.options.block_columns,
                rounds=self.options.refit,
            )
            if solved is not None:
                if solved.damping > self.options.damping:
                    self.notes.append(f"{name}: too little data for damping {self.options.damping:g}, {solved.damping:g} was used")
                return self._set(module, solved.weight.to(weight.dtype))
            self.notes.append(f"{name}: its second-order matrix is singular, so it was pruned by Wanda's measure")
        squares = inputs.columns.mean_square if inputs.columns is not None else inputs.gram.matrix.diagonal()  # type: ignore[union-attr]  # one is there
        score = weight.float().abs() * squares.sqrt()
        return self._set(module, weight.masked_fill(self._mask(score, by_rows=True), 0))

    def _mask(self, score: Tensor, *, by_rows: bool) -> Tensor:
        if self.pattern is not None:
            return masks.smallest_of_groups(score, *self.pattern)
        return (masks.smallest_of_rows if by_rows else masks.smallest)(score, self.options.sparsity)

    def _set(self, module: nn.Module, matrix: Tensor) -> None:
        old = weight_of(module)
        module.weight = nn.Parameter(unrowed(module, matrix, tuple(old.shape)), requires_grad=old.requires_grad)

    def _say_nonfinite(self, name: str, weight: Tensor) -> None:
        bad = int((~weight.isfinite()).sum())
        if bad:
            self.notes.append(f"{name} holds {bad} values that are not finite; NaN was pruned first")


def _without_pruned(found: Survey, options: Prune) -> None:
    """Leaves out layers that have their zeros already."""
    for name, module in list(found.layers.items()):
        weight = rows(module, weight_of(module).detach())
        if weight.is_meta:
            continue
        zero = weight == 0
        if options.pattern is not None:
            enough = bool(masks.satisfied(zero, *options.pattern.value).all())
        else:
            enough = int(zero.sum()) >= masks.count(zero.numel(), options.sparsity)
        if enough:
            found.skipped[name] = f"{float(zero.float().mean()):.1%} of its weights are zero already"
            del found.layers[name]


def _calibrated(model: nn.Module, pruning: _Pruning, ctx: Context) -> str:
    """Walks the model and prunes each block; the sentence about the samples."""
    options = pruning.options
    if ctx.samples is None:
        what = f"{options.method.name} needs samples to measure its layers' inputs on, and there are none"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix="give data, or use prune/magnitude, which needs none"))
    assert ctx.backend is not None
    taken = ctx.samples.take(options.samples, tokens=options.sample_tokens, step=ctx.step)
    layers = pruning.found.layers
    kept = Kept(_key(options))

    def visit(block: Block) -> None:
        inside = {name: layer for name, layer in block.inside(layers).items() if name not in done}
        if not inside:
            return
        done.update(inside)
        key = kept.key(f"{block.fingerprint()} {sorted(inside)}")
        stored = kept.get(key, block.device)
        if stored is None:
            kept.put(key, _pruned(pruning, block, inside))
        else:
            _restore(pruning, inside, stored)

    done: set[str] = set()
    outside = _outside(model, layers)
    title = f"prune by {options.method.name}"
    walk(model, taken.examples, visit, device=ctx.backend.torch_device(), outside=outside, tell=ctx.tell, title=title)
    return taken.note


def _pruned(pruning: _Pruning, block: Block, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Prunes the layers of one block; their weights, and what there was to say, for the cache."""
    said_before = len(pruning.notes)
    inputs = observe(block, layers, second_order=pruning.options.method.name == SPARSEGPT)
    for name, module in layers.items():
        if inputs[name].count:
            pruning.with_data(name, module, inputs[name])
        else:
            pruning.unseen.append(name)
    notes = json.dumps(pruning.notes[said_before:]).encode()
    weights: dict[str, Tensor] = {name: weight_of(module) for name, module in layers.items() if name not in pruning.unseen}
    return {**weights, NOTES: torch.frombuffer(bytearray(notes), dtype=torch.uint8)}


def _restore(pruning: _Pruning, layers: Mapping[str, nn.Module], stored: Mapping[str, Tensor]) -> None:
    """The block as an earlier run left it."""
    pruning.notes += json.loads(bytes(stored[NOTES].tolist()))
    for name, module in layers.items():
        if name in stored:
            module.weight = nn.Parameter(stored[name], requires_grad=weight_of(module).requires_grad)
        else:
            pruning.unseen.append(name)


def _outside(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    from optforge.select import repeated_blocks

    within = {id(module) for block in repeated_blocks(model).values() for module in block.modules()}
    return {name: layer for name, layer in layers.items() if id(layer) not in within}


def observe(block: Block, layers: Mapping[str, nn.Module], *, second_order: bool) -> dict[str, Inputs]:
    """What the samples give each layer. Layers that read the very same tensors (q, k and v) share one matrix."""
    found: dict[str, Inputs] = {name: Inputs() for name in layers}
    last: list[tuple[Tensor, Inputs]] = []

    def see(name: str, x: Tensor) -> None:
        inputs, module = found[name], layers[name]
        if not isinstance(module, nn.Conv2d):
            if last and _same(last[0][0], x) and (inputs is last[0][1] or not inputs.count):
                found[name] = last[0][1]
                return
            last[:] = [(x, inputs)]
        x = _columns(module, x)
        if second_order:
            inputs.gram = inputs.gram or Gram(x.shape[-1], x.device)
            inputs.gram.add(x)
        else:
            inputs.columns = inputs.columns or Columns(x.shape[-1], x.device)
            inputs.columns.add(x)

    block.observe(layers, see)
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a._version == b._version


def _columns(module: nn.Module, x: Tensor) -> Tensor:
    """A layer's input as rows [..., K] in the order of `survey.rows`: of a convolution, the patches that its kernel is laid over."""
    if not isinstance(module, nn.Conv2d):
        return x
    padding = module.padding
    if isinstance(padding, str):
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)] if padding == "same" else [0, 0]
        x = F.pad(x, [total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2])
        padding = (0, 0)
    patches = F.unfold(x.float(), module.kernel_size, module.dilation, padding, module.stride).transpose(1, 2)
    batch, places, _ = patches.shape
    return patches.reshape(batch, places, x.shape[1], -1).transpose(2, 3).flatten(2)


def _key(options: Prune) -> Json:
    """All of the options that decides a block's result beside its inputs."""
    pattern = None if options.pattern is None else options.pattern.name
    return ["prune", options.method.name, options.sparsity, pattern, options.damping, options.block_columns, options.refit]


def _receipt(found: Survey, options: Prune, before: dict[str, int], ctx: Context) -> Receipt:
    receipt = Receipt(total_bytes=found.total_bytes, skipped=found.skipped, ignored=found.ignored, unmatched=found.unmatched)
    shares = {name: _share(module, options) for name, module in found.layers.items()}
    for name, module in found.layers.items():
        what = f"{options.method.name}, {shares[name]:.1%} zero" + (f" ({options.pattern.name})" if options.pattern else "")
        dtype = str(weight_of(module).dtype).removeprefix("torch.")
        size = before[name]
        receipt.touched.append(Touched(name=name, what=what, bytes_before=size, bytes_after=size, dtypes={"weight": dtype}))
    receipt.bytes_before = receipt.bytes_after = sum(touched.bytes_before for touched in receipt.touched)
    receipt.decisions = {"step": ctx.step, "method": options.method.name, "zeros": shares, "sparse": []}
    return receipt


def _share(module: nn.Module, options: Prune) -> float:
    """Zeros of a layer: counted where it has values, else what the options ask for."""
    weight = weight_of(module)
    if not weight.is_meta and bool((weight == 0).any()):
        return int((weight == 0).sum()) / weight.numel()
    if options.pattern is not None:
        return options.pattern.value[0] / options.pattern.value[1]
    per_row = options.method.name == WANDA
    elements = rows(module, weight).shape[1] if per_row else math.prod(weight.shape)
    return masks.count(elements, options.sparsity) / elements
