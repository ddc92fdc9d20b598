"""Finds the linears of one module that read the very same input, inside repeated layers, and packs each such group.

The structure is found by running the model once on a small example (on meta while planning) and noting which tensor
object each linear was given, so it holds for any model family: q/k/v with or without bias, gate/up, and whatever a
user's own blocks hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optforge import single_row
from optforge.errors import PlanError, Problem
from optforge.kernels.kv_cache import attention_modules
from optforge.measure.size import weight_bytes
from optforge.select import original_name, repeated_blocks, select
from optforge.spec import Json
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.fuse import attention, packing, steps
from optforge.transforms.fuse.flow import example_of, hold_equal, outputs
from optforge.transforms.fuse.packing import PackedPart, joined_name, pack_


@dataclass(frozen=True)
class _Site:
    """A linear of a repeated layer, and where it hangs."""

    path: str
    linear: nn.Linear
    parent: nn.Module

    @property
    def local(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class _Call:
    """What a linear was given: the tensor object, its version (writes in place raise it), and whether the parent's
    forward was running."""

    x: Tensor
    version: int
    inside: bool


def apply(model: nn.Module, ignore: list[str], ctx: Context, *, regroup: bool, loops: bool) -> Receipt:
    """Packs every group in place; with `regroup` attention runs over grouped heads, with `loops` products of one row as loops of
    the compiled program; see `Fuse.apply`."""
    receipt = Receipt(total_bytes=weight_bytes(model), decisions={"packs": []})
    sites = _sites(model)
    if ignore:
        selection = select(model, ["Linear"], ignore, step=ctx.step, eligible=lambda _, module: isinstance(module, nn.Linear))
        receipt.ignored = [site.path for site in sites if site.path in selection.ignored]
        sites = [site for site in sites if site.path not in receipt.ignored]
    example = example_of(model, ctx)
    calls, before = _watch(model, sites, example, ctx)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    free = _without(sites, receipt.skipped, lambda site: _unfit(site.linear, uses))
    free = _without(free, receipt.skipped, lambda site: _unfit_calls(calls[site.path]))
    for group in _groups(free, calls):
        if len(group) == 1:
            receipt.skipped[group[0].path] = "no other linear of its module reads the same input"
        else:
            _pack(group, receipt)
    reason = _packed_before(model) or (attention.suits(model, ctx) if regroup else "attention is kept")
    if not receipt.touched and reason is not None:
        raise PlanError(_nothing(model, sites, receipt, ctx))
    if not model.training and not ctx.planning:  # dropout would differ from one pass to the next; the plan traces the result
        hold_equal(before, outputs(model, example, ctx), ctx)
    if regroup:
        _regroup(model, receipt, ctx, example)
    if loops:
        if steps_suit(model, ctx):
            steps.fuse_(model, receipt, ctx, example)
        receipt.notes.append("compiled, products of one row run as loops of the program itself")
        receipt.decisions["loops"] = True
        _mark(model)
    return receipt


def steps_suit(model: nn.Module, ctx: Context) -> bool:
    """Whether layers may get steps of their own: of a model of transformers that nothing shards afterwards."""
    return "shard" not in ctx.later and hasattr(getattr(model, "config", None), "get_text_config")


def replay(model: nn.Module, decisions: dict[str, Json]) -> None:
    """Packs, and chooses the attention, that a receipt's decisions name."""
    packing.replay(model, decisions)
    if decisions.get("attention") == attention.NAME:
        attention.use_(model)
    steps.replay(model, decisions.get("steps", []))
    if decisions.get("loops"):
        _mark(model)


def _mark(model: nn.Module) -> None:
    kernels = steps.taken(model)
    for module in (model, *repeated_blocks(model).values()):
        single_row.mark_(module, kernels=kernels)


def _packed_before(model: nn.Module) -> str | None:
    """Why a second step of this kind has nothing to do; None for the first."""
    return "the model is fused already" if single_row.marked(model) else None


def _regroup(model: nn.Module, receipt: Receipt, ctx: Context, example: Any) -> None:
    """Switches the attention where that helps, says which it is, and holds each layer's result against PyTorch's."""
    reason = attention.suits(model, ctx)
    if reason is not None:
        receipt.notes.append(reason)
        return
    attention.use_(model)
    if not ctx.planning and not model.training:
        attention.verify(lambda: outputs(model, example, ctx), ctx.step)
    receipt.decisions["attention"] = attention.NAME
    receipt.kernels["optforge::grouped_attention"] = len(repeated_blocks(model))
    receipt.touched += [Touched(name=name, what="attention over grouped heads") for name, _ in attention_modules(model)]
    receipt.notes.append("causal attention runs as grouped products, and of one query over a cache as loops of the compiled program")


def _sites(model: nn.Module) -> list[_Site]:
    """Every linear beneath an element of an `nn.ModuleList`, once."""
    blocks = {id(block) for module in model.modules() if isinstance(module, nn.ModuleList) for block in module}
    found: dict[int, _Site] = {}

    def visit(path: str, module: nn.Module, inside: bool) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            here = inside or id(child) in blocks
            if here and isinstance(child, nn.Linear):
                found.setdefault(id(child), _Site(original_name(child_path), child, module))
            visit(child_path, child, here)

    visit("", model, False)
    return list(found.values())


def _watch(model: nn.Module, sites: list[_Site], example: Any, ctx: Context) -> tuple[dict[str, list[_Call]], list[Tensor]]:
    """The calls of each linear during one forward pass, and the pass's outputs."""
    calls: dict[str, list[_Call]] = {site.path: [] for site in sites}
    running: Counter[int] = Counter()
    handles = []

    def note(site: _Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                calls[site.path].append(_Call(args[0], args[0]._version, running[id(site.parent)] > 0))

        return hook

    def enter(module: nn.Module, args: Any) -> None:
        running[id(module)] += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running[id(module)] -= 1

    for parent in {id(site.parent): site.parent for site in sites}.values():
        handles += [parent.register_forward_pre_hook(enter), parent.register_forward_hook(leave)]
    handles += [site.linear.register_forward_pre_hook(note(site)) for site in sites]
    try:
        return calls, outputs(model, example, ctx)
    finally:
        for handle in handles:
            handle.remove()


def _without(sites: list[_Site], skipped: dict[str, str], reason: Callable[[_Site], str | None]) -> list[_Site]:
    """The sites that have no reason to be skipped; the others' reasons are noted."""
    reasons = {site.path: reason(site) for site in sites}
    skipped.update({path: text for path, text in reasons.items() if text is not None})
    return [site for site in sites if reasons[site.path] is None]


def _unfit(linear: nn.Linear, uses: Counter[int]) -> str | None:
    """Why a linear cannot be packed whatever it is given; `uses` counts the modules that hold each parameter."""
    if torch.nn.utils.parametrize.is_parametrized(linear):
        return "its weight is computed by a parametrization"
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} is not a plain nn.Linear"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return "it carries hooks, which would see another call"
    if any(uses[id(parameter)] > 1 for parameter in linear.parameters()):
        return "its weight is shared with another module"
    return None


def _unfit_calls(calls: list[_Call]) -> str | None:
    if len(calls) != 1:
        return f"called {len(calls)} times in one forward pass" if calls else "not called in the example's forward pass"
    return None if calls[0].inside else "called from outside its module's forward"


def _groups(sites: list[_Site], calls: dict[str, list[_Call]]) -> list[list[_Site]]:
    """Linears by parent, input and form, in the order in which the parent holds them."""
    groups: dict[tuple[Any, ...], list[_Site]] = {}
    for site in sites:
        call, weight = calls[site.path][0], site.linear.weight
        form = (site.linear.in_features, weight.dtype, weight.device, site.linear.bias is None, weight.requires_grad)
        groups.setdefault((id(site.parent), id(call.x), call.version, *form), []).append(site)
    return list(groups.values())


def _pack(group: list[_Site], receipt: Receipt) -> None:
    parent, parts = group[0].parent, [site.local for site in group]
    name = joined_name(parts, parent)
    parent_path = group[0].path.rpartition(".")[0]
    path = f"{parent_path}.{name}" if parent_path else name
    packed = pack_(parent, name, parts)
    size = weight_bytes(packed)
    dtypes = {key: str(parameter.dtype).removeprefix("torch.") for key, parameter in packed.named_parameters()}
    what = f"packed from {', '.join(parts)}"
    receipt.touched.append(Touched(name=path, what=what, bytes_before=size, bytes_after=size, dtypes=dtypes))
    receipt.renamed[path] = [site.path for site in group]
    receipt.decisions["packs"].append([parent_path, name, parts])
    receipt.bytes_before += size
    receipt.bytes_after += size


def _nothing(model: nn.Module, sites: list[_Site], receipt: Receipt, ctx: Context) -> Problem:
    """Why there is nothing to pack."""
    if any(isinstance(module, PackedPart) for module in model.modules()):
        why = "its linears are packed already"
    elif not sites:
        why = "its repeated layers hold no nn.Linear (their products are packed already, or written in another way)"
    else:
        reasons = Counter(receipt.skipped.values()).most_common(2)
        why = "; ".join(f"{count} of {len(sites)} linears: {reason}" for reason, count in reasons)
    return Problem(where=f"step {ctx.step}", what=f"nothing to pack in this model: {why}", fix=f"drop the step with '~steps.{ctx.step}'")
