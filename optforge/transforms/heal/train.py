"""The training itself: which weights, which loss, how many updates, and what came of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optforge.calibrate.samples import to
from optforge.errors import PlanError, Problem, StepError
from optforge.kernels.linears import Quantized
from optforge.masks import fold_masks_, said
from optforge.measure.mode import evaluating
from optforge.measure.size import nbytes, weight_bytes
from optforge.models.base import Example
from optforge.select import original_name, select
from optforge.spec import Json
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.heal.weights import Trained, full, lora, put
from optforge.transforms.prune import sparse

if TYPE_CHECKING:
    from optforge.transforms.heal import Heal

HEALED = "optforge_healed"
"""Attribute of a healed model: the step that did it."""
WARMUP = 0.1
LARGEST_NORM = 1.0
"""Of the gradient of one update; longer ones are cut to it."""


def apply(model: nn.Module, options: Heal, ctx: Context) -> Receipt:
    """Trains in place; see `Heal.apply`. While planning only the receipt is made."""
    _refuse(model, ctx)
    notes = said(fold_masks_(model))
    total = weight_bytes(model)
    parameters, ignored = _parameters(model, options, ctx.step)
    if not parameters:
        lora = options.method.name == "lora"
        kinds = "no linear that is chosen has a floating-point weight of its own" if lora else "no weight that is chosen is floating-point"
        fix = f"drop it with '~steps.{ctx.step}'" + (f", or write steps.{ctx.step}.use=heal/full" if lora else "")
        raise PlanError(Problem(where=f"step {ctx.step}", what=f"nothing in this model can be trained: {kinds}", fix=fix))
    if not ctx.planning:
        notes += _heal(model, parameters, options, ctx)
    setattr(model, HEALED, ctx.step)
    receipt = _receipt(model, parameters, options, ctx)
    receipt.total_bytes, receipt.ignored, receipt.notes = total, ignored, notes
    trained = {touched.name for touched in receipt.touched}
    sparse.convert(model, [name for name in sparse.marked(model) if name in trained], options.kernel.name, ctx, receipt)
    return receipt


def replay(model: nn.Module, decisions: dict[str, Json]) -> None:
    fold_masks_(model)
    setattr(model, HEALED, decisions["step"])
    sparse.replay(model, decisions)


def _refuse(model: nn.Module, ctx: Context) -> None:
    if hasattr(model, HEALED):
        what = f"the model was healed already (step {getattr(model, HEALED)})"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix="give that step more steps, and drop this one"))
    quantized = [original_name(name) for name, module in model.named_modules() if isinstance(module, Quantized)]
    if quantized:
        what = f"{quantized[0]} and {len(quantized) - 1} more are quantized, and integers have no gradient"
        raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix="heal before the quantize step"))


def _parameters(model: nn.Module, options: Heal, step: str) -> tuple[dict[str, nn.Parameter], list[str]]:
    """The parameters that are trained, by the names that `functional_call` knows, and the modules that `ignore` covers."""
    ignore = [*options.ignore, *options.ignore_extra]
    if options.method.name == "lora":
        chosen = select(model, options.targets, ignore, step=step, eligible=lambda _, module: isinstance(module, nn.Linear))
        tied = _held_twice(model)
        ids = {id(module._parameters.get("weight")) for module in chosen.chosen.values()} - tied
    else:
        chosen = select(model, ["re:.*"], ignore, step=step, eligible=lambda _, module: any(True for _ in module.parameters(recurse=False)))
        ids = {id(parameter) for module in chosen.chosen.values() for parameter in module._parameters.values()}
    kept = {id(parameter) for name in chosen.ignored for parameter in model.get_submodule(name)._parameters.values()}
    found = {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in ids - kept and parameter.is_floating_point() and parameter.dtype.itemsize > 1 and parameter.numel()
    }
    return found, chosen.ignored


def _held_twice(model: nn.Module) -> set[int]:
    """ids of parameters that several modules hold. The change of a head that is tied to the embedding is none of low rank to both."""
    counts = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values() if parameter is not None)
    return {key for key, count in counts.items() if count > 1}


def _slots(model: nn.Module) -> dict[str, list[str]]:
    """Name of each parameter -> the names of all places that hold it. A module that stands in two places has one name only: PyTorch
    puts the model's own tensors back once for each name, and the second time a changed one."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(f"{path}.{key}" if path else key)
    return {names[0]: names for names in found.values()}


def _heal(model: nn.Module, parameters: dict[str, nn.Parameter], options: Heal, ctx: Context) -> list[str]:
    """Trains; the sentences about it."""
    if ctx.samples is None:
        raise PlanError(Problem(where=f"step {ctx.step}", what="needs samples to train on, and there are none", fix="give data"))
    taken = ctx.samples.take(options.samples + options.held_out, tokens=options.sample_tokens, step=ctx.step, held_out=options.held_out)
    device = next(iter(parameters.values())).device
    examples = [to(example, device) for example in taken.examples]
    loss = _Loss(model, options, ctx)
    trained = full(parameters) if options.method.name == "full" else lora(parameters, options.rank, ctx.seed)
    learn, held = examples[options.held_out :] or examples, examples[: options.held_out]
    with evaluating(model):
        before = _mean_loss(trained, held, loss)
        idle = before == 0.0 and loss.reference is not None  # a row that leaves out what was to be healed; AdamW would follow noise
        if not idle:
            with torch.enable_grad():
                _train(trained, learn, loss, options, ctx)
        after = _mean_loss(trained, held, loss)
    put(model, trained)
    way = "fell" if after < before else "rose" if after > before else "stayed,"
    nothing = "; there was nothing to heal, since the model gave what it gave as loaded" if idle else ""
    return [
        taken.note,
        f"{0 if idle else options.steps} updates of {options.batch_size} samples: the loss ({loss.name}) on {len(held)} held-out samples "
        f"{way} from {before:.4f} to {after:.4f}{nothing}",
    ]


class _Loss:
    """The loss of one sample with other weights in the model's place."""

    def __init__(self, model: nn.Module, options: Heal, ctx: Context) -> None:
        self.reference = ctx.reference if options.loss.name == "distill" else None
        if options.loss.name == "distill" and self.reference is None:
            what = "the model as loaded is not at hand, so there is nothing to distil from"
            raise PlanError(Problem(where=f"step {ctx.step}", what=what, fix=f"write steps.{ctx.step}.loss=next_token"))
        self.model, self.step, self.slots = model, ctx.step, _slots(model)
        family = getattr(getattr(ctx.samples, "loaded", None), "family", None)
        self.logits = family != "module"  # what a module of no known task gives need not be logits
        measure = "KL" if self.logits else "mean squared error"
        self.name = f"{measure} to the model as loaded" if self.reference is not None else "next token"

    def __call__(self, values: dict[str, Tensor], example: Example) -> Tensor:
        args, kwargs = example
        everywhere = {slot: value for name, value in values.items() for slot in self.slots[name]}
        found = _tensor(torch.func.functional_call(self.model, everywhere, args, kwargs, tie_weights=False))
        if self.reference is None:
            ids = next((leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dtype == torch.long), None)
            if ids is None or found.dim() != 3:
                what = "the next token can be learned by language models only, and this model is none"
                raise PlanError(Problem(where=f"step {self.step}", what=what, fix=f"write steps.{self.step}.loss=distill"))
            return F.cross_entropy(found[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        with torch.no_grad(), evaluating(self.reference):
            args, kwargs = example
            wanted = _tensor(self.reference(*args, **kwargs)).float()
        if not self.logits or found.dim() < 2:
            return F.mse_loss(found.float(), wanted)
        ours, theirs = (each.float().log_softmax(-1).flatten(0, -2) for each in (found, wanted))
        return F.kl_div(ours, theirs, log_target=True, reduction="batchmean")


def _tensor(output: Any) -> Tensor:
    """The first floating tensor of an output: a language model's or a classifier's logits."""
    logits = getattr(output, "logits", None)
    leaves = [logits] if isinstance(logits, Tensor) else tree_leaves(output)
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _mean_loss(trained: list[Trained], examples: Sequence[Example], loss: _Loss) -> float:
    with torch.no_grad():
        values = {each.name: each.value() for each in trained}
        return math.fsum(float(loss(values, example)) for example in examples) / len(examples)


def _train(trained: list[Trained], examples: Sequence[Example], loss: _Loss, options: Heal, ctx: Context) -> None:
    """The updates.

    Raises:
        StepError: a loss is not finite.
    """
    tensors = [tensor for each in trained for tensor in each.tensors]
    optimizer = torch.optim.AdamW(tensors, lr=options.learning_rate, weight_decay=0.0)
    turns = _turns(len(examples), ctx.seed)
    for update in range(options.steps):
        if ctx.tell is not None:
            ctx.tell(f"heal ({options.method.name})", update / options.steps)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(update, options.steps)
        optimizer.zero_grad()
        for _ in range(options.batch_size):
            example = examples[next(turns)]
            values = {each.name: each.value() for each in trained}
            found = loss(values, example) / options.batch_size
            if not bool(found.isfinite()):
                raise StepError(f"step {ctx.step}: the loss of update {update + 1} is {float(found.detach())}: lower learning_rate")
            for tensor, gradient in zip(tensors, torch.autograd.grad(found, tensors, allow_unused=True), strict=True):
                if gradient is not None:
                    tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
        torch.nn.utils.clip_grad_norm_(tensors, LARGEST_NORM)
        optimizer.step()
    if ctx.tell is not None:
        ctx.tell(f"heal ({options.method.name})", 1.0)


def _turns(count: int, seed: int) -> Iterator[int]:
    """Indices of samples, each once a round, in an order that the seed decides."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=draw).tolist()


def _schedule(update: int, steps: int) -> float:
    """The share of the learning rate at an update."""
    warm = max(1, round(WARMUP * steps))
    if update < warm:
        return (update + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (update - warm) / max(1, steps - warm)))


def _receipt(model: nn.Module, parameters: dict[str, nn.Parameter], options: Heal, ctx: Context) -> Receipt:
    owners: dict[str, list[str]] = {}
    for name in parameters:
        path, _, key = name.rpartition(".")
        owners.setdefault(path, []).append(key)
    what = f"lora, rank {options.rank}, folded in" if options.method.name == "lora" else "every weight trained"
    receipt = Receipt(decisions={"step": ctx.step, "zeros": {}, "sparse": []})
    for path, keys in owners.items():
        own = model.get_submodule(path)
        size = sum(nbytes(own.get_parameter(key)) for key in keys)
        dtypes = {key: str(own.get_parameter(key).dtype).removeprefix("torch.") for key in keys}
        receipt.touched.append(Touched(name=original_name(path), what=what, bytes_before=size, bytes_after=size, dtypes=dtypes))
    receipt.bytes_before = receipt.bytes_after = sum(touched.bytes_before for touched in receipt.touched)
    return receipt
