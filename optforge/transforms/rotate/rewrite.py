"""Folds rotations into the weights of a model, checks that it computes what it did, and writes the receipt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optforge.calibrate.walk import Block, walk
from optforge.errors import PlanError, Problem, StepError
from optforge.measure.size import nbytes, weight_bytes
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.fuse.flow import example_of, outputs
from optforge.transforms.rotate import heads as within
from optforge.transforms.rotate.matrices import HADAMARD, rotation
from optforge.transforms.rotate.stream import ROTATED, Stream, rms_like, stream

LARGEST_CHANGE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.25}
"""Largest relative change of the example's output. All weights are rounded to their dtype anew, and a deep model in bf16 amplifies that
to some percent; a rotation that does not belong changes the output by more than its own size."""


def rewrite(model: nn.Module, ctx: Context, *, heads: bool) -> Receipt:
    """See `Rotate.apply`."""
    found = stream(model, ctx)
    receipt = Receipt(total_bytes=weight_bytes(model))
    matrix, kind = rotation(found.width, ctx.seed)
    real = not next(model.parameters()).is_meta
    stored_less = _stored_less(found, ctx) if real else {}
    tied = found.tied
    for name, partners in tied.items():
        _own_weight(found.readers[name])
        receipt.notes.append(f"{name} was tied to {', '.join(partners)} and no longer is: the norm before it is folded into it alone")
    if real:
        _fold(found, stored_less)
        _rotate(found, matrix)
    receipt.notes.append(_said(found.width, kind, ctx.seed))
    chosen = within.sites(model, found.writers) if heads else {}
    if heads:
        receipt.notes.append(within.told(chosen))
    if real and chosen:
        receipt.notes += _heads(model, chosen, ctx)
    for embedding in found.embeddings.values():
        setattr(embedding, ROTATED, ctx.step)
    _forget_tie(model, tied)
    receipt.decisions = {"step": ctx.step, "untied": tied, "embeddings": list(found.embeddings), "matrix": kind, "width": found.width}
    _told(receipt, found, tied)
    if not ctx.planning and real:
        _hold(found.outputs, outputs(model, example_of(model, ctx), ctx), ctx)
    return receipt


def rebuild(model: nn.Module, decisions: dict[str, Any]) -> None:
    """Gives heads weights of their own where a receipt says so, and marks the model as rotated."""
    for name in decisions["untied"]:
        reader = model.get_submodule(name)
        assert isinstance(reader, nn.Linear)
        _own_weight(reader)
    for name in decisions["embeddings"]:
        setattr(model.get_submodule(name), ROTATED, decisions["step"])
    _forget_tie(model, decisions["untied"])


def _stored_less(found: Stream, ctx: Context) -> dict[str, float]:
    """Norm -> what its stored weight is less than the factor.

    Raises:
        PlanError: a norm is no RMS norm; all are named.
    """
    less = {name: rms_like(norm, found.width, _weight(norm).device) for name, norm in found.norms.items()}
    wrong = [name for name, each in less.items() if each is None]
    if wrong:
        what = f"the residual stream cannot be rotated: {', '.join(wrong[:3])} does more than an RMS norm"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=f"drop the step with '~steps.{ctx.step}'"))
    return {name: each for name, each in less.items() if each is not None}


def _fold(found: Stream, stored_less: dict[str, float]) -> None:
    """Multiplies each norm's weight into the linears behind it, and leaves 1 in it."""
    for name, reader in found.readers.items():
        norm = found.norm_of[name]
        factor = _exact(_weight(found.norms[norm])) + stored_less[norm]
        _set(reader, "weight", _exact(reader.weight) * factor)
    for name, norm_module in found.norms.items():
        _set(norm_module, "weight", torch.full_like(_weight(norm_module), 1 - stored_less[name]))


def _rotate(found: Stream, matrix: Tensor) -> None:
    """x becomes x R: the embedding and readers are multiplied by R, what writers give by R too."""
    for module in (*found.embeddings.values(), *found.readers.values()):
        weight = _exact(_weight(module))
        _set(module, "weight", weight @ matrix.to(weight))
    for writer in found.writers.values():
        weight = _exact(writer.weight)
        _set(writer, "weight", matrix.to(weight).t() @ weight)
        if writer.bias is not None:
            _set(writer, "bias", matrix.to(weight).t() @ writer.bias.to(weight))


def _heads(model: nn.Module, chosen: dict[str, int], ctx: Context) -> list[str]:
    """Rotates values within their heads, block by block; a line for each block where that cannot be."""
    notes: list[str] = []

    def visit(block: Block) -> None:
        prefix = f"{block.name}." if block.name else ""
        inside = {name.removeprefix(prefix): size for name, size in chosen.items() if name.startswith(prefix)}
        notes.extend(f"{prefix}{name}: {why}" for name, why in within.rotate_(block, inside, ctx.seed).items())

    device = next(model.parameters()).device
    args, kwargs = example_of(model, ctx)
    if hasattr(getattr(model, "config", None), "use_cache"):
        kwargs = {**kwargs, "use_cache": False}  # a block runs many times, and a cache would grow with each
    if not walk(model, [(args, kwargs)], visit, device=device):
        notes.append("the model's layers are no chain, and all of it was tried at once")
    return notes


def _exact(tensor: Tensor) -> Tensor:
    """In a dtype whose rounding does not add to that of the tensor's own."""
    return tensor.detach().to(torch.float64 if tensor.dtype in (torch.float32, torch.float64) else torch.float32)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    """A new parameter of the old dtype; the old one's storage may be the baseline's."""
    old = module._parameters[name]
    assert old is not None
    module._parameters[name] = nn.Parameter(value.to(old.dtype).contiguous(), requires_grad=old.requires_grad)


def _own_weight(reader: nn.Linear) -> None:
    reader.weight = nn.Parameter(reader.weight.detach().clone(), requires_grad=reader.weight.requires_grad)


def _weight(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _forget_tie(model: nn.Module, tied: dict[str, list[str]]) -> None:
    """Tells a transformers model that its weights are not tied, lest `tie_weights` puts the embedding back in the head."""
    config = getattr(model, "config", None)
    if tied and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False  # type: ignore[union-attr]  # it has the attribute, as the line above saw


def _said(width: int, kind: str, seed: int) -> str:
    if kind == HADAMARD:
        return f"width {width}: a Hadamard matrix with random signs (seed {seed})"
    return f"width {width}: no Hadamard matrix is known here, a random orthogonal one is used (seed {seed})"


def _told(receipt: Receipt, found: Stream, tied: dict[str, list[str]]) -> None:
    """The touched modules and their bytes: a head that was tied is new."""
    kinds = (
        ("rotated", found.embeddings),
        ("folded into what reads it", found.norms),
        ("its norm folded in, rotated", found.readers),
        ("rotated", found.writers),
    )
    for what, modules in kinds:
        for name, module in modules.items():
            own = {key: each for key, each in module._parameters.items() if each is not None}
            size = sum(nbytes(each) for each in own.values())
            dtypes = {key: str(each.dtype).removeprefix("torch.") for key, each in own.items()}
            before = size - nbytes(own["weight"]) if name in tied else size
            receipt.touched.append(Touched(name=name, what=what, bytes_before=before, bytes_after=size, dtypes=dtypes))
    receipt.bytes_before = sum(touched.bytes_before for touched in receipt.touched)
    receipt.bytes_after = sum(touched.bytes_after for touched in receipt.touched)


def _hold(before: list[Tensor], after: list[Tensor], ctx: Context) -> None:
    """
    Raises:
        StepError: an output is not what it was.
    """
    for old, new in zip(before, after, strict=True):
        change = float((new.double() - old.double()).norm() / old.double().norm().clamp_min(1e-30))
        if not change <= LARGEST_CHANGE.get(old.dtype, 0.25):
            raise StepError(
                f"step {ctx.step}: the example's output changed by {change:.1e} of its norm; the rotation is wrong for this model"
            )
