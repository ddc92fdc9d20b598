"""Removes the layers that change their input least.

By block influence (see importance.py), measured once on the whole model: Men and others 2024, "ShortGPT: Layers in Large
Language Models are More Redundant Than You Expect". The layers that stay are numbered anew, as the model's own code, its KV
cache and every checkpoint format count them; receipts say which was which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from optforge.errors import PlanError, Problem
from optforge.masks import fold_masks_, said
from optforge.measure.size import weight_bytes
from optforge.select import original_name, repeated_blocks, select
from optforge.spec import Json
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.prune.importance import influences
from optforge.transforms.prune.shrink import follow, require_running

if TYPE_CHECKING:
    from optforge.transforms.prune import Prune

MARK = "optforge_layers_removed"
"""Attribute of a stack that layers were taken from: the step that did it."""
COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""What a config calls the number of layers."""


def apply(model: nn.Module, options: Prune, ctx: Context) -> Receipt:
    """Removes layers in place; see `Prune.apply`. While planning, as many from the middle."""
    notes = said(fold_masks_(model))
    blocks = {original_name(name): block for name, block in repeated_blocks(model).items()}
    path = _stack(model, blocks, ctx)
    ignore = [*options.ignore, *options.ignore_extra]
    ids = {id(block) for block in blocks.values()}
    chosen = select(model, ["re:.*"], ignore, step=ctx.step, eligible=lambda _, module: id(module) in ids)
    free = [name for name in blocks if name in chosen.chosen]
    count = round(len(blocks) * options.sparsity)
    _require_count(count, len(blocks), len(free), options, ctx)
    if ctx.planning:
        start = (len(free) - count) // 2
        removed = free[start : start + count]
    else:
        found, note = influences(model, blocks, options, ctx)
        removed = sorted(sorted(free, key=lambda name: found[name])[:count], key=list(blocks).index)
        told = ", ".join(f"{name} {found[name]:.3f}" for name in removed)
        notes += [note, f"block influence of those removed: {told}; of those kept at least {_least(found, free, removed)}"]
    indices = [list(blocks).index(name) for name in removed]
    total, before = weight_bytes(model), weight_bytes(model.get_submodule(path))
    decisions: dict[str, Json] = {"step": ctx.step, "stack": path, "layers": len(blocks), "removed": indices, "gone": removed}
    replay(model, decisions)
    after = weight_bytes(model.get_submodule(path))
    require_running(model, "layers", ctx)
    what = f"{count} of {len(blocks)} layers removed"
    receipt = Receipt(total_bytes=total, bytes_before=before, bytes_after=after, decisions=decisions, notes=notes, ignored=chosen.ignored)
    receipt.touched = [Touched(name=path, what=what, bytes_before=before, bytes_after=after)]
    kept = [name for name in blocks if name not in removed]
    receipt.renamed = {new: [old] for new, old in zip(list(blocks), kept, strict=False) if new != old}
    return receipt


def replay(model: nn.Module, decisions: dict[str, Json]) -> None:
    """Removes the layers of those indices and lets numbers and config follow."""
    fold_masks_(model)
    stack = model.get_submodule(decisions["stack"])
    removed = set(decisions["removed"])
    kept = [(index, block) for index, block in enumerate(stack.children()) if index not in removed]
    stack._modules.clear()
    for new, (old, block) in enumerate(kept):
        stack._modules[str(new)] = block
        for module in block.modules():
            if vars(module).get("layer_idx") == old:
                vars(module)["layer_idx"] = new
    vars(stack)[MARK] = decisions["step"]
    follow(model, _config(model, decisions["layers"], removed))


def _config(model: nn.Module, layers: int, removed: set[int]) -> dict[str, Any]:
    """The values of the config that count layers, or list something of each."""
    config = getattr(model, "config", None)
    values: dict[str, Any] = {key: layers - len(removed) for key in COUNTS if getattr(config, key, None) == layers}
    for key, value in vars(config).items() if config is not None else ():
        if isinstance(value, list) and len(value) == layers:
            values[key] = [one for index, one in enumerate(value) if index not in removed]
    # the lists first: a config may hold them against the count when that is set
    return dict(sorted(values.items(), key=lambda item: not isinstance(item[1], list)))


def _stack(model: nn.Module, blocks: dict[str, nn.Module], ctx: Context) -> str:
    """The path of the one stack of layers.

    Raises:
        PlanError: there is none, or several, or it was pruned before.
    """
    parents = sorted({name.rpartition(".")[0] for name in blocks})
    if len(parents) != 1:
        what = f"it has {len(parents)} stacks of repeated layers ({', '.join(parents)})" if parents else "it has no repeated layers"
        raise PlanError(Problem(where=f"step {ctx.step}", what=f"layers of this model cannot be removed: {what}", fix=_drop(ctx)))
    before = vars(model.get_submodule(parents[0])).get(MARK)
    if before is not None:
        what = f"layers of {parents[0]} were removed already (step {before}), and their influence was measured for that once"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=f"raise steps.{before}.sparsity, and drop this step"))
    return parents[0]


def _require_count(count: int, layers: int, free: int, options: Prune, ctx: Context) -> None:
    where = f"step {ctx.step}"
    if count < 1:
        fix = f"write steps.{ctx.step}.sparsity={1 / layers:.3f} for one layer"
        raise PlanError(Problem(where=where, what=f"sparsity {options.sparsity:g} of {layers} layers is none", fix=fix))
    if count > min(free, layers - 1):
        what = f"sparsity {options.sparsity:g} would remove {count} of {layers} layers, and {free} may go"
        raise PlanError(Problem(where=where, what=what, fix="lower sparsity, or shorten ignore"))


def _least(found: dict[str, float], free: list[str], removed: list[str]) -> str:
    rest = [found[name] for name in free if name not in removed]
    return f"{min(rest):.3f}" if rest else "none"


def _drop(ctx: Context) -> str:
    return f"drop it with '~steps.{ctx.step}', or prune heads, channels or single weights"
