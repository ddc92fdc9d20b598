"""Casts a model's floating-point weights to bf16, fp16 or fp32, keeping in fp32 what low precision would spoil.

Norm layers and rotary frequency tables stay in fp32 by default: a frequency table rounded to bf16 is off by more than a
radian at position 4096. A kept module computes in fp32 and hands its output back in the dtype that it was given, so
that the layer after it sees what it expects on every device (some devices refuse a norm whose weight and input differ
in dtype, others accept it). Integer storage, quantization scales and complex tables are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optforge.errors import PlanError, Problem, SelectorError
from optforge.measure.size import nbytes, weight_bytes
from optforge.select import original_name, select
from optforge.spec import Hardware, Scheme
from optforge.training.settings import keep_master_, settings_of, settle_
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Search, Touched
from optforge.transforms.mixed import Mixed, mix_


class Dtype(Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Training(Enum):
    plain = "plain"
    autocast = "autocast"
    masters = "masters"
    stochastic = "stochastic"


TORCH = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}
CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that hold values. The 8-bit floats hold quantized storage and are never cast."""
PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)
"""Layers whose products autocast runs in a lower precision."""
NORMS, ROTARY = "norms", "rotary"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype that weights are stored and multiplied in."""

    kind: ClassVar[str] = "precision"
    phase: ClassVar[Phase] = Phase.PRECISION
    search: ClassVar[Search] = {"bf16_*": None}

    dtype: Dtype = Dtype.bf16
    """bf16, fp16 or fp32."""
    keep_fp32: list[str] = field(default_factory=lambda: [NORMS, ROTARY])
    """What stays in fp32: `norms` (every normalization layer), `rotary` (buffers whose name ends in inv_freq), and
    selectors of modules, parameters or buffers."""
    training: Training = Training.plain
    """How weights of a lower precision are trained. plain: as they are, rounded to nearest after each update; masters: fp32 copies
    belong to the optimizer; stochastic: updates are rounded at random; autocast: weights stay in fp32 and products run in dtype."""

    def check(self, ctx: Context) -> Iterator[Problem]:
        """Any model can be cast; entries of `keep_fp32` are held against the model in `apply`. What concerns training alone needs a
        training, and fp16 is not trained: without scaled losses its gradients underflow."""
        where, trains = f"step {ctx.step}", ctx.workload == "train"
        if self.training is not Training.plain and not trains:
            what = f"training: {self.training.name} says how weights are trained, and the workload is {ctx.workload}"
            yield Problem(where=where, what=what, fix="type workload=train, or use precision/bf16")
        if self.dtype is Dtype.fp16 and (trains or self.training is not Training.plain):
            what = "fp16 cannot be trained here: its gradients underflow without a scaled loss"
            yield Problem(
                where=where, what=what, fix=f"type steps.{ctx.step}.use=precision/bf16_masters, or drop it with '~steps.{ctx.step}'"
            )

    def lower(self, target: Hardware) -> Lowered | None:
        """bf16 and fp16 stand in for each other, then fp32, where the target has units for one of them only; for training fp32."""
        peaks = target.peak_flops
        if not peaks or self.dtype.name in peaks or self.dtype is Dtype.fp32:
            return None
        if self.training is not Training.plain:
            reason = f"{target.name} has no {self.dtype.name} matrix units, and fp16 is not trained"
            fp32 = replace(self, dtype=Dtype.fp32, training=Training.plain)
            return Lowered(requested=f"{self.dtype.name}_{self.training.name}", runs_as="fp32", transform=fp32, reason=reason)
        runs_as = next((d for d in (Dtype.bf16, Dtype.fp16) if d.name in peaks), Dtype.fp32)
        reason = f"{target.name} has no {self.dtype.name} matrix units"
        return Lowered(requested=self.dtype.name, runs_as=runs_as.name, transform=replace(self, dtype=runs_as), reason=reason)

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        """Replaces parameters and buffers by cast ones, ties kept; tensors that another tree shares are not written to.

        Raises:
            SelectorError: an entry of `keep_fp32` matches nothing.
            PlanError: an entry keeps a parameter without its module, or one name of a tied weight without the other.
        """
        if self.training is Training.autocast:
            return self._autocast(model)
        tensors = set() if self.dtype is Dtype.fp32 else set(self._kept(model, ctx.step))
        modules = _roots(model, tensors)
        _refuse_halves(model, tensors, modules, ctx.step)
        receipt = Receipt(total_bytes=weight_bytes(model), skipped=dict(_untouchable(model)))
        receipt.notes.extend(_rounded_before(model, tensors))
        receipt.decisions = {
            "dtype": self.dtype.name,
            "tensors": sorted(tensors),
            "modules": modules,
            "cast_inputs": _takes_floats(ctx.example),
            "training": self.training.name,
        }
        receipt.touched = _convert(model, receipt.decisions)
        receipt.bytes_before = sum(t.bytes_before for t in receipt.touched)
        receipt.bytes_after = sum(t.bytes_after for t in receipt.touched)
        if not any(touched.what == self.dtype.name for touched in receipt.touched):
            rest = ": only what stays in fp32 changes" if receipt.touched else ""
            receipt.notes.append(f"the weights are {self.dtype.name} already{rest}")
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        """Casts the same tensors and wraps the same modules."""
        if receipt.decisions.get("training") == Training.autocast.name:
            settle_(model, autocast=receipt.decisions["dtype"])
        else:
            _convert(model, receipt.decisions)

    def _autocast(self, model: nn.Module) -> Receipt:
        """Leaves the weights, and has products run in `dtype` wherever the model is trained."""
        receipt = Receipt(total_bytes=weight_bytes(model))
        if settings_of(model).autocast == self.dtype.name:
            receipt.notes.append(f"products run in {self.dtype.name} already")
            return receipt
        settle_(model, autocast=self.dtype.name)
        receipt.decisions = {"training": self.training.name, "dtype": self.dtype.name}
        for path, module in model.named_modules():
            if isinstance(module, PRODUCTS):
                size = sum(nbytes(parameter) for parameter in module.parameters(recurse=False))
                what = f"{self.dtype.name} products"
                receipt.touched.append(Touched(name=original_name(path), what=what, bytes_before=size, bytes_after=size))
        receipt.bytes_before = receipt.bytes_after = sum(touched.bytes_before for touched in receipt.touched)
        return receipt

    def _kept(self, model: nn.Module, step: str) -> list[str]:
        """Names of the parameters and buffers that stay in fp32."""
        kept: list[str] = []
        for entry in self.keep_fp32:
            if entry == NORMS:
                kept.extend(name for name, module, _ in _owned(model) if _is_norm(module))
            elif entry == ROTARY:
                kept.extend(name for name, _, key in _owned(model) if key.endswith("inv_freq"))
            else:
                kept.extend(_named(model, entry, step))
        return kept


def _convert(model: nn.Module, decisions: dict[str, Any]) -> list[Touched]:
    """Casts every tensor but the kept ones, wraps the kept modules, and says what changed."""
    dtype, kept, wrapped = TORCH[Dtype[decisions["dtype"]]], set(decisions["tensors"]), set(decisions["modules"])
    training = decisions.get("training", Training.plain.name)
    if training in (Training.masters.name, Training.stochastic.name):
        settle_(model, masters=training == Training.masters.name, stochastic=training == Training.stochastic.name)
    buffers: dict[int, Tensor] = {}
    touched = []
    for path, module in model.named_modules():
        name = original_name(path)
        before = sum(nbytes(tensor) for _, tensor in _tensors(module))
        dtypes = {}
        for key, tensor in list(_tensors(module)):
            want = torch.float32 if _join(name, key) in kept else dtype
            if tensor.dtype == want:
                continue
            dtypes[key] = str(want).removeprefix("torch.")
            if key in module._parameters:
                if training == Training.masters.name and isinstance(tensor, nn.Parameter) and tensor.dtype == torch.float32:
                    keep_master_(tensor, tensor.data)
                tensor.data = tensor.data.to(want)  # the same object, so that ties and other references to it hold
            else:
                module._buffers[key] = buffers.setdefault(id(tensor), tensor.to(want))
        newly_wrapped = name in wrapped and dtype != torch.float32 and _run_in_fp32(module, dtype)
        if dtypes or newly_wrapped:
            after = sum(nbytes(tensor) for _, tensor in _tensors(module))
            what = "runs in fp32" if name in wrapped else decisions["dtype"]
            touched.append(Touched(name=name, what=what, bytes_before=before, bytes_after=after, dtypes=dtypes))
    if touched and decisions["cast_inputs"]:
        _cast_inputs_of(model, dtype)
    return touched


class _RunsInFp32(Mixed):
    """Mixed into the class of a kept module: floating inputs go up to fp32, outputs back to the dtype that came in."""

    _optforge_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = _first_float((args, kwargs))
        args, kwargs = _to((args, kwargs), torch.float32)
        output = super().forward(*args, **kwargs)  # type: ignore[misc] # the class it is mixed into has it
        return _to(output, self._optforge_dtype if given is None else given)


def _run_in_fp32(module: nn.Module, dtype: torch.dtype) -> bool:
    """Wraps a module in place; False when it was wrapped before."""
    module.__dict__["_optforge_dtype"] = dtype
    return mix_(module, _RunsInFp32)


def _cast_inputs_of(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes the model take floating inputs of any precision, as it did before the cast."""
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, partial) and hook.func is _cast_inputs]:
        del hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)
    model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _to((args, kwargs), dtype)


def _to(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor in its tuples, lists and dicts cast."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in CASTABLE else value
    if type(value) in (tuple, list):
        return type(value)([_to(item, dtype) for item in value])
    if type(value) is dict:
        return {key: _to(item, dtype) for key, item in value.items()}
    return value


def _first_float(value: Any) -> torch.dtype | None:
    """The dtype of the first floating tensor inside `value`."""
    if isinstance(value, Tensor):
        return value.dtype if value.dtype in CASTABLE else None
    items: Iterable[Any] = value.values() if type(value) is dict else value if type(value) in (tuple, list) else ()
    for item in items:
        found = _first_float(item)
        if found is not None:
            return found
    return None


def _takes_floats(example: tuple[tuple[Any, ...], dict[str, Any]] | None) -> bool:
    """Whether the model is fed floating tensors; without an example it may be."""
    return example is None or _first_float((tuple(example[0]), dict(example[1]))) is not None


def _roots(model: nn.Module, kept: set[str]) -> list[str]:
    """The outermost modules all of whose values are kept: the ones that run in fp32 as a whole."""
    roots: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        beneath = [_join(original_name(_join(path, name)), key) for name, child in module.named_modules() for key, _ in _tensors(child)]
        computes = _is_norm(module) or next(module.parameters(), None) is not None
        callable_ = type(module).forward is not nn.Module.forward
        if beneath and computes and callable_ and kept.issuperset(beneath):
            roots.append(original_name(path))
            return
        for name, child in module.named_children():
            visit(_join(path, name), child)

    visit("", model)
    return roots


def _refuse_halves(model: nn.Module, kept: set[str], roots: list[str], step: str) -> None:
    """Refuses to keep a parameter without its module, and one name of a tied weight without the other."""
    problems = []
    names: dict[int, list[str]] = {}
    for name, module, key in _owned(model):
        owner = name[: -len(key) - 1]
        if key in module._parameters:
            names.setdefault(id(module._parameters[key]), []).append(name)
            if name in kept and not any(owner == root or not root or owner.startswith(root + ".") for root in roots):
                what = f"keep_fp32 keeps {name} and not all that lies beneath {owner}, so it cannot run in fp32 as a whole"
                problems.append(Problem(where=f"step {step}", what=what, fix=f"name {owner} itself"))
    for tied in names.values():
        inside = [name for name in tied if name in kept]
        if inside and len(inside) < len(tied):
            outside = ", ".join(name for name in tied if name not in kept)
            what = f"keep_fp32 keeps {inside[0]}, which is one tensor with {outside}"
            problems.append(Problem(where=f"step {step}", what=what, fix="keep all of them or none"))
    if problems:
        raise PlanError(*problems)


def _named(model: nn.Module, entry: str, step: str) -> list[str]:
    """The tensors that an entry of `keep_fp32` names: buffers by their own name, or all that a selected module owns."""
    pattern = _buffer_pattern(entry)
    buffers = [name for name, module, key in _owned(model) if key in module._buffers and pattern is not None and pattern.fullmatch(name)]
    try:
        chosen = select(model, [entry], [], step=step, eligible=lambda _, module: any(True for _ in _tensors(module))).chosen
    except SelectorError:
        if not buffers:
            raise
        return buffers
    return buffers + [_join(name, key) for name, module in chosen.items() for key, _ in _tensors(module)]


def _buffer_pattern(entry: str) -> re.Pattern[str] | None:
    """What a buffer's name must match; None for a malformed expression, which `select` reports."""
    if not entry.startswith("re:"):
        return re.compile(rf"(?:.*\.)?{re.escape(entry)}")
    try:
        return re.compile(entry.removeprefix("re:"))
    except re.error:
        return None


def _rounded_before(model: nn.Module, kept: set[str]) -> Iterator[str]:
    """Says which kept tables had lost their precision before this step."""
    lost = [name for name, module, key in _owned(model) if name in kept and key in module._buffers and _low(module._buffers[key])]
    if lost:
        yield f"{', '.join(lost[:3])} came in low precision: keeping it in fp32 from here on does not bring back what was rounded"


def _low(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16)


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, owner, local name) of each tensor that can be cast."""
    for path, module in model.named_modules():
        for key, _ in _tensors(module):
            yield _join(original_name(path), key), module, key


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own tensors that hold plain floating values: not those of a quantized module or of a tensor subclass."""
    if _is_quantized(module):
        return
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and tensor.dtype in CASTABLE and type(tensor.data) is Tensor:
            yield key, tensor


def _untouchable(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        if _is_quantized(module):
            yield original_name(path), "quantized already: its integers and scales keep their dtypes"
        elif any(t is not None and type(t.data) is not Tensor for t in module._parameters.values()):
            yield original_name(path), "its weight is a tensor subclass with a representation of its own"


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(getattr(module, "scheme", None), Scheme)


def _is_norm(module: nn.Module) -> bool:
    """A normalization layer, by its class name: one that owns weights or statistics and has no modules inside."""
    named = any("Norm" in cls.__name__ for cls in type(module).__mro__)
    return named and not module._modules and (bool(module._parameters) or "running_mean" in module._buffers)


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent and name else parent or name
