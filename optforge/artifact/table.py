"""Lists every tensor that a module holds, ties told apart from copies, and puts a list back into a fresh module.

`state_dict` is not enough for an artifact: it leaves out non-persistent buffers (rotary tables) and tensors that are
plain attributes, and after `load_state_dict(assign=True)` tied weights are no longer one object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from optforge.errors import ModelError, Problem

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"
SHOWN_PROBLEMS = 3
WRAPPER = "_orig_mod"
"""The path component that `torch.compile(module)` puts before every name."""
STORABLE = frozenset(
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    ]
)
"""The dtypes that safetensors can hold."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One stored tensor. `stride` is None for a contiguous one (a dense layout such as channels-last is kept)."""

    kind: str
    dtype: str
    shape: list[int]
    stride: list[int] | None = None
    requires_grad: bool = False
    persistent: bool = True


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Another name of a stored tensor: the same `object` (a tied weight), or another object over the same `storage`."""

    of: str
    same: str
    kind: str


@dataclass(kw_only=True)
class Table:
    """Every tensor of a module by its uncompiled name, each stored once."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    aliases: dict[str, Alias] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def clean(name: str) -> str:
    """A name without what `torch.compile(module)` put into it."""
    return ".".join(part for part in name.split(".") if part != WRAPPER)


def walk(model: nn.Module) -> Iterator[tuple[str, str, Tensor, bool]]:
    """Every tensor slot, tied ones under each of their names: name, kind, tensor, whether `state_dict` has it."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield clean(prefix + name), PARAMETER, parameter, True
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield clean(prefix + name), BUFFER, buffer, name not in module._non_persistent_buffers_set
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield clean(prefix + name), ATTRIBUTE, value, False


def table(model: nn.Module) -> Table:
    """The table of `model`.

    Raises:
        ModelError: a tensor cannot be stored as plain bytes; names each one and its type.
    """
    found, objects, storages = Table(), dict[int, str](), dict[tuple[object, ...], str]()
    problems = []
    for name, kind, tensor, persistent in walk(model):
        refusal = _refusal(tensor)
        if refusal:
            problems.append(Problem(where=name, what=refusal, fix="turn it into plain tensors before saving"))
        elif name in found.entries or name in found.aliases:
            continue
        elif id(tensor) in objects:
            found.aliases[name] = Alias(of=objects[id(tensor)], same="object", kind=kind)
        elif _memory(tensor) in storages:
            found.aliases[name] = Alias(of=storages[_memory(tensor)], same="storage", kind=kind)
        else:
            objects[id(tensor)] = name
            if tensor.numel():
                storages[_memory(tensor)] = name
            found.tensors[name] = tensor
            found.entries[name] = _entry(kind, tensor, persistent)
    if problems:
        raise ModelError(*problems)
    return found


def ties(model: nn.Module) -> dict[str, str]:
    """Each name of a tied tensor but the first -> the first; works on meta tensors."""
    first: dict[int, str] = {}
    found = {}
    for name, _, tensor, _ in walk(model):
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            found[name] = canonical
    return found


def _refusal(tensor: Tensor) -> str:
    """Why a tensor cannot be stored as it is, or an empty string."""
    kind = type(tensor)
    if kind not in (Tensor, nn.Parameter):
        return f"is a {kind.__module__}.{kind.__qualname__}, which no plain file format holds"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"has the layout {tensor.layout} ({tensor.dtype}), which no plain file format holds"
    if tensor.dtype not in STORABLE:
        return f"has the dtype {tensor.dtype}, which safetensors cannot hold"
    return ""


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements of the same storage."""
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _entry(kind: str, tensor: Tensor, persistent: bool) -> Entry:
    stride = list(tensor.stride()) if not tensor.is_contiguous() and _dense(tensor) else None
    return Entry(
        kind=kind,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        stride=stride,
        requires_grad=tensor.requires_grad,
        persistent=persistent,
    )


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def assign(model: nn.Module, entries: Mapping[str, Entry], aliases: Mapping[str, Alias], tensors: Mapping[str, Tensor]) -> None:
    """Puts stored tensors into the slots of `model`, in place, and ties what was tied.

    Raises:
        ModelError: a tensor has no slot, a slot has another shape, or a slot is left without values; names all.
    """
    placed = {name: _restored(entry, tensors[name]) for name, entry in entries.items()}
    problems = [problem for name, entry in entries.items() if (problem := _put(model, name, entry, placed[name]))]
    for name, alias in aliases.items():
        entry, tensor = replace(entries[alias.of], kind=alias.kind), placed[alias.of]
        problem = _put(model, name, entry, tensor if alias.same == "object" else _another(tensor, alias.kind))
        if problem:
            problems.append(problem)
    empty = [(name, kind) for name, kind, tensor, _ in walk(model) if tensor.is_meta]
    problems += [Problem(where=name, what=f"this {kind} of the model is not in the artifact") for name, kind in empty]
    if problems:
        raise ModelError(*_shortened(problems))


def _shortened(problems: list[Problem]) -> list[Problem]:
    """The first problems and how many more there are: a wrong model misses every name."""
    more = len(problems) - SHOWN_PROBLEMS
    return problems if more <= 0 else [*problems[:SHOWN_PROBLEMS], Problem(where="tensors", what=f"{more} more do not fit this model")]


def _restored(entry: Entry, tensor: Tensor) -> Tensor:
    if entry.stride is not None:
        laid_out = torch.empty_strided(entry.shape, entry.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = laid_out.copy_(tensor)
    return nn.Parameter(tensor, requires_grad=entry.requires_grad) if entry.kind == PARAMETER else tensor


def _another(tensor: Tensor, kind: str) -> Tensor:
    """A new object over the same storage."""
    return nn.Parameter(tensor.data, requires_grad=tensor.requires_grad) if kind == PARAMETER else tensor.detach()


def _put(model: nn.Module, name: str, entry: Entry, tensor: Tensor) -> Problem | None:
    """Sets one slot; says what is wrong instead when the model has no such slot, or one of another shape."""
    path, _, local = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return Problem(where=name, what="the model has no such module")
    by_kind: dict[str, dict[str, Any]] = {PARAMETER: module._parameters, BUFFER: module._buffers, ATTRIBUTE: vars(module)}
    slots = by_kind[entry.kind]
    slot = slots.get(local)
    if slot is None and entry.kind == BUFFER and not hasattr(module, local):
        module.register_buffer(local, tensor, persistent=entry.persistent)  # one that a forward pass or a step made
        return None
    if not isinstance(slot, Tensor):
        return Problem(where=name, what=f"the model has no such {entry.kind}")
    if list(slot.shape) != entry.shape:
        return Problem(where=name, what=f"has the shape {entry.shape} in the artifact and {list(slot.shape)} in the model")
    slots[local] = tensor
    return None
