"""Folds a batch norm into the convolution that it alone reads.

With running statistics (mean m, variance v) a batch norm is a fixed scale and shift per channel, s = weight / sqrt(v + eps)
and bias - m * s, so it can be multiplied into the convolution's weight and bias (Jacob et al. 2018, "Quantization and
Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2). That is right only where
nothing else reads the convolution's output or weight, which is decided on the exported graph of the model.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from optforge.errors import PlanError, Problem
from optforge.measure.size import weight_bytes
from optforge.select import original_name, select
from optforge.spec import Json
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.fuse.flow import example_of, hold_equal, outputs

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTION_OPS = ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")
_BATCH_NORM_OP = "aten.batch_norm"
_CASTS = ("aten.to", "aten._to_copy")
_CHECKS = ("aten._assert_tensor_metadata",)
"""What export puts beside a cast: it reads no values."""


def apply(model: nn.Module, ignore: list[str], ctx: Context) -> Receipt:
    """Folds every batch norm that can be folded, in place; see `Fuse.apply`. A training is refused: its norms change with each batch."""
    if ctx.workload == "train":
        what = "a training uses each batch's own statistics, which cannot be folded into a weight"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=f"drop it with '~steps.{ctx.step}', or type workload=forward"))
    receipt = Receipt(total_bytes=weight_bytes(model), decisions={"folds": []})
    modules = {original_name(path): module for path, module in model.named_modules()}
    norms = [path for path, module in modules.items() if isinstance(module, BATCH_NORMS)]
    ignored = _ignored(model, ignore, ctx)
    example = example_of(model, ctx)
    before = outputs(model, example, ctx)
    readers = _readers(_export(model, example, ctx)) if norms else {}
    uses = Counter(id(p) for module in modules.values() for p in module._parameters.values() if p is not None)
    for norm in norms:
        source = readers.get(norm, "the example's forward pass does not reach it")
        if isinstance(source, str):
            receipt.skipped[norm] = source
        elif norm in ignored or source[0] in ignored:
            receipt.ignored.append(norm)
        elif (why := _unfit(modules[source[0]], modules[norm], uses)) is not None:
            receipt.skipped[norm] = why
        else:
            _fold(model, source[0], norm, receipt)
    if not receipt.touched:
        raise PlanError(_nothing(norms, receipt, ctx))
    hold_equal(before, outputs(model, example, ctx), ctx)
    return receipt


def replay(model: nn.Module, decisions: dict[str, Json]) -> None:
    """Folds what a receipt's decisions name; on meta only the structure follows."""
    for convolution, norm in decisions["folds"]:
        fold_(model, convolution, norm)


def fold_(model: nn.Module, convolution: str, norm: str) -> None:
    """Multiplies a batch norm into a convolution in float64 and puts an `nn.Identity` in its place."""
    conv, bn = model.get_submodule(convolution), model.get_submodule(norm)
    assert isinstance(conv, CONVOLUTIONS) and isinstance(bn, BATCH_NORMS)
    mean, variance = bn.get_buffer("running_mean").double(), bn.get_buffer("running_var").double()
    scale = (variance + bn.eps).rsqrt()
    if bn.weight is not None:
        scale = scale * bn.weight.detach().double()
    shift = -mean * scale if bn.bias is None else bn.bias.detach().double() - mean * scale
    weight, bias = conv.weight.detach().double(), 0.0 if conv.bias is None else conv.bias.detach().double()
    dtype, trains = conv.weight.dtype, conv.weight.requires_grad
    conv.weight = nn.Parameter((weight * scale.view(-1, *[1] * (weight.dim() - 1))).to(dtype), requires_grad=trains)
    conv.bias = nn.Parameter((bias * scale + shift).to(dtype), requires_grad=trains)
    model.set_submodule(norm, nn.Identity().train(bn.training))


def _ignored(model: nn.Module, ignore: list[str], ctx: Context) -> set[str]:
    if not ignore:
        return set()
    wanted = (*CONVOLUTIONS, *BATCH_NORMS)
    names = [cls.__name__ for cls in wanted if any(isinstance(module, cls) for module in model.modules())]
    return set(select(model, names, ignore, step=ctx.step, eligible=lambda _, module: isinstance(module, wanted)).ignored)


def _export(model: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]], ctx: Context) -> ExportedProgram:
    """The model's graph.

    Raises:
        PlanError: the model cannot be exported, so what reads what cannot be known.
    """
    args, kwargs = example
    try:
        with torch.no_grad():
            return torch.export.export(model, tuple(args), dict(kwargs), strict=False)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        what = f"the model cannot be exported, so it is not known what reads a convolution: {str(error).splitlines()[0]}"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=f"drop the step with '~steps.{ctx.step}'")) from error


def _readers(program: ExportedProgram) -> dict[str, tuple[str] | str]:
    """Batch norm -> (its convolution,) where it alone reads one that runs once, else the reason why not."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    found: dict[str, tuple[str] | str] = {}
    for node in program.graph.nodes:
        if not _is(node, (_BATCH_NORM_OP,)):
            continue
        statistics = node.args[3]
        if not isinstance(statistics, Node):
            continue
        norm = names[statistics.name].rpartition(".")[0]
        found[norm] = "it runs more than once" if norm in found or len(statistics.users) > 1 else _source(node, names)
    return {original_name(norm): source for norm, source in found.items()}


def _source(norm: Node, names: dict[str, str]) -> tuple[str] | str:
    """The path of the convolution that `norm` alone reads, or why there is none."""
    if norm.args[5]:
        return "it is in training mode and uses the batch's own statistics: call model.eval() first"
    output, others = _through_casts(norm.args[0], norm)
    if output is None or not _is(output, _CONVOLUTION_OPS):
        return "it does not follow a convolution"
    if others:
        return f"{', '.join(others)} reads the convolution's output too"
    weight, others = _through_casts(output.args[1], output)
    if weight is None or weight.name not in names:
        return "the convolution's weight is computed"
    if others:
        return f"the convolution runs {len(others) + 1} times, and only one of its outputs is normalized"
    return (original_name(names[weight.name].rpartition(".")[0]),)


def _through_casts(value: Any, reader: Node) -> tuple[Node | None, list[str]]:
    """What `reader` reads behind changes of dtype, and who else reads it on the way."""
    others: list[str] = []
    while isinstance(value, Node):
        others += [user.name for user in value.users if user is not reader and not _is(user, _CHECKS)]
        if not _is(value, _CASTS):
            return value, others
        reader, value = value, value.args[0]
    return None, others


def _is(node: Node, operators: tuple[str, ...]) -> bool:
    return node.op == "call_function" and str(node.target).rpartition(".")[0] in operators


def _unfit(conv: nn.Module, norm: nn.Module, uses: Counter[int]) -> str | None:
    """Why these two cannot be folded although they follow each other."""
    if not isinstance(conv, CONVOLUTIONS):
        return f"{type(conv).__name__} is no nn.Conv layer"
    for what, module in (("convolution", conv), ("batch norm", norm)):
        if nn.utils.parametrize.is_parametrized(module):
            return f"the {what}'s weight is computed by a parametrization"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"the {what} carries hooks, which would see other values"
        if any(uses[id(parameter)] > 1 for parameter in module.parameters()):
            return f"a weight of the {what} is shared with another module"
    return None


def _fold(model: nn.Module, convolution: str, norm: str, receipt: Receipt) -> None:
    conv, bn = model.get_submodule(convolution), model.get_submodule(norm)
    before = weight_bytes(conv) + weight_bytes(bn)
    fold_(model, convolution, norm)
    after = weight_bytes(conv)
    dtypes = {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in conv.named_parameters(recurse=False)}
    receipt.touched.append(Touched(name=convolution, what=f"{norm} folded in", bytes_before=before, bytes_after=after, dtypes=dtypes))
    receipt.renamed[convolution] = [convolution, norm]
    receipt.decisions["folds"].append([convolution, norm])
    receipt.bytes_before += before
    receipt.bytes_after += after


def _nothing(norms: list[str], receipt: Receipt, ctx: Context) -> Problem:
    """Why there is nothing to fold."""
    reasons = Counter(receipt.skipped.values()).most_common(2)
    why = "; ".join(f"{count} of {len(norms)} batch norms: {reason}" for reason, count in reasons) or "every batch norm is ignored"
    what = f"nothing to fold in this model: {why if norms else 'it has no batch norm (left)'}"
    return Problem(where=f"step {ctx.step}", what=what, fix=f"drop the step with '~steps.{ctx.step}'")
