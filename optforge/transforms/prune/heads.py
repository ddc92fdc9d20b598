"""Removes attention heads: of grouped-query attention whole groups, a key and value head with all the queries that read it.

Every layer loses as many, so that the config's counts stay true of all of them, and each layer loses those that add least to
its output: the mean square of a head's output times the squared norm of the weights that read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from optforge.errors import PlanError, Problem
from optforge.masks import fold_masks_, said
from optforge.measure.size import weight_bytes
from optforge.select import original_name, select
from optforge.transforms.base import Context, Receipt
from optforge.transforms.fuse.packing import PackedPart
from optforge.transforms.prune.importance import contributions
from optforge.transforms.prune.shrink import MARK, Cuts, receipt_of
from optforge.transforms.prune.survey import refusals

if TYPE_CHECKING:
    from optforge.transforms.prune import Prune

READERS = ("o_proj", "out_proj", "dense")
"""What the linear behind the heads is called."""
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """An attention module whose heads can be told apart."""

    name: str
    module: nn.Module
    reader: str
    """Local name of the linear that reads the heads."""
    head_dim: int
    groups: int
    """Key and value heads."""
    queries: int
    """Query heads of each group."""

    def path(self, local: str) -> str:
        return f"{self.name}.{local}" if self.name else local


def apply(model: nn.Module, options: Prune, ctx: Context) -> Receipt:
    """Removes heads in place; see `Prune.apply`. While planning, the last of each layer."""
    notes = said(fold_masks_(model))
    receipt = Receipt(total_bytes=weight_bytes(model), notes=notes)
    found = _chosen(model, options, ctx, receipt)
    readers = {each.path(each.reader): model.get_submodule(each.path(each.reader)) for each in found}
    problems = list(refusals({name: module for name, module in readers.items() if not vars(module).get(MARK)}, ctx.step))
    if problems:
        raise PlanError(*problems)
    scores: dict[str, Tensor] = {}
    if not ctx.planning:
        scores, note = contributions(model, readers, options, ctx)
        notes.append(note)
    cuts = Cuts()
    for each in found:
        count = each.groups - _removed(each, options, ctx)
        kept = _kept(each, count, scores.get(each.path(each.reader)))
        _cut(cuts, each, kept)
    alike = not receipt.ignored and not receipt.skipped
    if alike and len({(each.groups, each.queries, each.head_dim) for each in found}) == 1:
        cuts.config = _config(model, found[0], next(iter(cuts.outputs.values())).numel() // found[0].head_dim)
    return receipt_of(model, cuts, "heads", ctx, receipt)


def _chosen(model: nn.Module, options: Prune, ctx: Context, receipt: Receipt) -> list[Attention]:
    """The attention modules whose heads go.

    Raises:
        PlanError: there is none.
    """
    all_found, reasons = [], {}
    for path, module in model.named_modules():
        if hasattr(module, "q_proj") or isinstance(module, nn.MultiheadAttention):
            name = original_name(path)
            packed = "nn.MultiheadAttention counts on as many heads as its width holds"
            each = packed if isinstance(module, nn.MultiheadAttention) else _read(name, module)
            if isinstance(each, str):
                reasons[name] = each
            else:
                all_found.append(each)
    receipt.skipped = reasons
    ids = {id(each.module) for each in all_found}
    ignore = [*options.ignore, *options.ignore_extra]
    if all_found:
        chosen = select(model, ["re:.*"], ignore, step=ctx.step, eligible=lambda _, module: id(module) in ids)
        receipt.ignored = chosen.ignored
        all_found = [each for each in all_found if each.name in chosen.chosen]
    if not all_found:
        why = "; ".join(dict.fromkeys(reasons.values())) or "no module has q_proj, k_proj and v_proj"
        fix = f"drop it with '~steps.{ctx.step}', or prune layers, channels or single weights"
        raise PlanError(Problem(where=f"step {ctx.step}", what=f"this model has no attention whose heads can be removed: {why}", fix=fix))
    return all_found


def _read(name: str, module: nn.Module) -> Attention | str:
    """The attention, or why its heads stay."""
    parts = [getattr(module, part, None) for part in ("q_proj", "k_proj", "v_proj")]
    reader = next((local for local in READERS if isinstance(getattr(module, local, None), nn.Linear)), None)
    if any(not isinstance(part, nn.Linear | PackedPart) for part in parts) or reader is None:
        return "its q_proj, k_proj, v_proj and o_proj are not all linears"
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        return f"{type(module).__name__} has no head_dim"
    if module._parameters:
        return f"{type(module).__name__} holds parameters of its own ({', '.join(module._parameters)})"
    q, k, v = (int(part.out_features) for part in parts)  # type: ignore[union-attr]  # linears, by the test above
    if k != v or q % head_dim or k % head_dim or q % k or getattr(module, reader).in_features != q:
        return f"its projections give {q}, {k} and {v} values, which are no heads of {head_dim}"
    wide = [child for child, norm in module.named_children() if "norm" in child and _width(norm) in (q, k) and _width(norm) != head_dim]
    if wide:
        return f"{wide[0]} normalizes over all heads at once"
    return Attention(name=name, module=module, reader=reader, head_dim=head_dim, groups=k // head_dim, queries=q // k)


def _width(norm: nn.Module) -> int | None:
    weight = getattr(norm, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) else None


def _removed(each: Attention, options: Prune, ctx: Context) -> int:
    count = round(each.groups * options.sparsity)
    linear = getattr(each.module, each.reader)
    if "heads" in vars(linear).get(MARK, {}):
        step = vars(linear)[MARK]["heads"]
        what = f"heads of {each.name} were removed already (step {step})"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=f"raise steps.{step}.sparsity, and drop this step"))
    if not 0 < count < each.groups:
        unit = "groups of heads" if each.queries > 1 else "heads"
        what = f"sparsity {options.sparsity:g} of {each.groups} {unit} is {count}"
        raise PlanError(
            Problem(where=f"step {ctx.step}, {each.name}", what=what, fix=f"steps.{ctx.step}.sparsity={1 / each.groups:.3f} is one")
        )
    return count


def _kept(each: Attention, count: int, scores: Tensor | None) -> Tensor:
    """Indices of the groups that stay, in their order."""
    if scores is None:
        return torch.arange(count)
    of_groups = scores.reshape(each.groups, -1).sum(1)
    return of_groups.argsort(descending=True, stable=True)[:count].sort().values.cpu()


def _cut(cuts: Cuts, each: Attention, kept: Tensor) -> None:
    keys = _spread(kept, each.head_dim)
    queries = _spread(kept, each.queries * each.head_dim)
    cuts.outputs[each.path("q_proj")] = queries
    cuts.outputs[each.path("k_proj")] = cuts.outputs[each.path("v_proj")] = keys
    cuts.inputs[each.path(each.reader)] = queries
    values = dict(_counts(vars(each.module), each, kept.numel()))
    if values:
        cuts.attributes[each.name] = values


def _counts(values: dict[str, object], each: Attention, groups: int) -> Iterator[tuple[str, int]]:
    """Which of these count heads, and what they are to be."""
    for names, before, after in (
        (QUERY_COUNTS, each.groups * each.queries, groups * each.queries),
        (KEY_COUNTS, each.groups, groups),
    ):
        yield from ((name, after) for name in names if values.get(name) == before)


def _config(model: nn.Module, each: Attention, queries: int) -> dict[str, int]:
    """The config's counts, and the width of a head, which some configs work out from them."""
    config = getattr(model, "config", None)
    names = {name: getattr(config, name, None) for name in (*QUERY_COUNTS, *KEY_COUNTS)}
    found = dict(_counts({name: value for name, value in names.items() if value is not None}, each, queries // each.queries))
    return {**found, "head_dim": each.head_dim} if found else {}


def _spread(kept: Tensor, width: int) -> Tensor:
    """Indices of the rows of heads that are `width` wide."""
    return (kept[:, None] * width + torch.arange(width)).flatten()
