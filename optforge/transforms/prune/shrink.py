"""Takes rows and columns out of linears, packed ones too, and lets what the model's code reads follow: attributes and its config.

What is kept is decided elsewhere; a receipt holds how many of each, since that is all a structure knows of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from optforge.errors import PlanError, Problem
from optforge.measure.size import nbytes
from optforge.measure.sparsity import is_conv1d
from optforge.spec import Json
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.fuse.flow import outputs
from optforge.transforms.fuse.packing import PackedPart

MARK = "optforge_cut"
"""Attribute of a linear that was cut: method -> the step that did it."""


@dataclass(kw_only=True)
class Cuts:
    """Linear (or part of a packed one) -> indices of the outputs or inputs that stay; and what follows from it."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Module -> attribute -> value."""
    config: dict[str, Any] = field(default_factory=dict)

    def decisions(self, method: str, step: str) -> dict[str, Json]:
        return {
            "step": step,
            "method": method,
            "outputs": {name: kept.numel() for name, kept in self.outputs.items()},
            "inputs": {name: kept.numel() for name, kept in self.inputs.items()},
            "attributes": self.attributes,
            "config": self.config,
        }


def replay(model: nn.Module, decisions: Mapping[str, Json]) -> None:
    """The shapes that the decisions tell."""
    cuts = Cuts(
        outputs={name: torch.arange(count) for name, count in decisions["outputs"].items()},
        inputs={name: torch.arange(count) for name, count in decisions["inputs"].items()},
        attributes=decisions["attributes"],
        config=decisions["config"],
    )
    cut(model, cuts, decisions["method"], decisions["step"])


def cut(model: nn.Module, cuts: Cuts, method: str, step: str) -> list[Touched]:
    """Makes the cuts in place; what became of each linear."""
    before: dict[str, int] = {}
    shapes: dict[str, str] = {}
    owners = {name: _owner(model, name) for name in (*cuts.outputs, *cuts.inputs)}
    for owner in owners.values():
        linear = model.get_submodule(owner)
        before[owner], shapes[owner] = _bytes(linear), _shape(linear)
    packs: dict[str, dict[str, Tensor]] = {}
    for name, kept in cuts.outputs.items():
        if owners[name] == name:
            _take_outputs(model.get_submodule(name), kept)
        else:
            packs.setdefault(owners[name], {})[name] = kept
    for owner, parts in packs.items():
        _take_parts(model, owner, parts)
    for name, kept in cuts.inputs.items():
        _take_inputs(model.get_submodule(owners[name]), kept)
    for name, values in cuts.attributes.items():
        for key, value in values.items():
            setattr(model.get_submodule(name), key, value)
    follow(model, cuts.config)
    touched = []
    for owner, size in before.items():
        linear = model.get_submodule(owner)
        vars(linear)[MARK] = {**vars(linear).get(MARK, {}), method: step}
        dtypes = {key: str(parameter.dtype).removeprefix("torch.") for key, parameter in linear.named_parameters(recurse=False)}
        what = f"{method}: {shapes[owner]} became {_shape(linear)}"
        touched.append(Touched(name=owner, what=what, bytes_before=size, bytes_after=_bytes(linear), dtypes=dtypes))
    return touched


def receipt_of(model: nn.Module, cuts: Cuts, method: str, ctx: Context, receipt: Receipt) -> Receipt:
    """Makes the cuts, tries the model, and fills the receipt.

    Raises:
        PlanError: the model does not run any more: its code counts on the shapes that it had.
    """
    receipt.decisions = cuts.decisions(method, ctx.step)
    receipt.touched = cut(model, cuts, method, ctx.step)
    receipt.bytes_before = sum(touched.bytes_before for touched in receipt.touched)
    receipt.bytes_after = sum(touched.bytes_after for touched in receipt.touched)
    require_running(model, method, ctx)
    return receipt


def require_running(model: nn.Module, method: str, ctx: Context) -> None:
    """
    Raises:
        PlanError: see `receipt_of`.
    """
    if ctx.example is None:
        return
    try:
        outputs(model, ctx.example, ctx)
    except PlanError as error:
        raise _broken(method, ctx, error.problems[0].what) from error
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise _broken(method, ctx, str(error).splitlines()[0]) from error


def _broken(method: str, ctx: Context, what: str) -> PlanError:
    told = f"without these {method} the model does not run, since its code counts on the shapes that it had ({what})"
    return PlanError(Problem(where=f"step {ctx.step}", what=told, fix=f"drop it with '~steps.{ctx.step}', or prune single weights"))


def follow(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Sets values of the model's config, in a copy of its own, since several models may be built from one."""
    config = getattr(model, "config", None)
    if not values or config is None:
        return
    memo: dict[int, Any] = {}
    copy.deepcopy(config, memo)
    for module in model.modules():
        held = vars(module).get("config")
        if held is not None and id(held) in memo:
            module.config = memo[id(held)]
    for key, value in values.items():
        setattr(model.config, key, value)


def _owner(model: nn.Module, name: str) -> str:
    """The path of the linear that holds the weights of `name`: its own, or that of the packed one beside it."""
    module = model.get_submodule(name)
    if not isinstance(module, PackedPart):
        return name
    parent = name.rpartition(".")[0]
    return f"{parent}.{module.pack.name}" if parent else module.pack.name


def _take_parts(model: nn.Module, owner: str, chosen: Mapping[str, Tensor]) -> None:
    """Rows of a packed linear, part by part; the parts then begin and end elsewhere."""
    prefix = owner.rpartition(".")[0]
    linear = model.get_submodule(owner)
    parent = model.get_submodule(prefix)
    parts = {f"{prefix}.{name}" if prefix else name: part for name, part in parent.named_children() if isinstance(part, PackedPart)}
    mine = sorted(((name, part) for name, part in parts.items() if part.pack.linear is linear), key=lambda item: item[1].start)
    kept, start = [], 0
    for name, part in mine:
        own = chosen.get(name, torch.arange(part.stop - part.start))
        kept.append(own.cpu() + part.start)
        part.start, part.stop = start, start + own.numel()
        start = part.stop
    _take_outputs(linear, torch.cat(kept))


def _take_outputs(module: nn.Module, kept: Tensor) -> None:
    by = 1 if is_conv1d(module) else 0
    module.weight = _taken(module.weight, kept, by)
    if isinstance(module.bias, Tensor):
        module.bias = _taken(module.bias, kept, 0)
    _resize(module)


def _take_inputs(module: nn.Module, kept: Tensor) -> None:
    module.weight = _taken(module.weight, kept, 0 if is_conv1d(module) else 1)
    _resize(module)


def _taken(tensor: Any, kept: Tensor, by: int) -> nn.Parameter:
    assert isinstance(tensor, nn.Parameter)
    new = tensor.detach().index_select(by, kept.to(tensor.device))
    return nn.Parameter(new, requires_grad=tensor.requires_grad)


def _resize(module: nn.Module) -> None:
    """The attributes of a linear, or of GPT-2's Conv1D, that tell its sizes."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if is_conv1d(module):
        vars(module).update(nx=weight.shape[0], nf=weight.shape[1])
    else:
        vars(module).update(out_features=weight.shape[0], in_features=weight.shape[1])


def _bytes(module: nn.Module) -> int:
    return sum(nbytes(parameter) for parameter in module.parameters(recurse=False))


def _shape(module: nn.Module) -> str:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return "x".join(map(str, weight.shape))
