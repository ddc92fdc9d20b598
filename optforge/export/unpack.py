"""An optimized transformers model under its own names again: packed linears taken apart, quantized layers as parts.

Other engines know the model by its config, and load by name: q, k and v separate, whatever was packed for speed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optforge.artifact.table import clean, ties
from optforge.errors import ModelError, Problem
from optforge.kernels.quantized import Quantized
from optforge.pretrained import skeleton
from optforge.select import PARTS
from optforge.transforms.fuse.packing import PackedPart

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from optforge.export.base import Subject

SHOWN = 3
"""Names that a refusal lists before it counts the rest."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The quantized weight of one layer: all rows of a quantized module, or those of one part of a packed one."""

    module: Quantized
    start: int
    stop: int
    packed: bool = False

    def rows(self, name: str) -> Tensor | None:
        """These rows of a stored parameter; one that stands for all rows (a scale of the whole weight) as it is."""
        tensor = self.module._parameters.get(name)
        if tensor is None:
            return None
        alone = tensor.dim() == 0 or tensor.shape[0] == 1 != self.stop - self.start
        return tensor.detach() if alone else tensor.detach()[self.start : self.stop]

    def dequantize(self) -> Tensor:
        """fp32 [rows, K]."""
        return self.module.dequantize()[self.start : self.stop]

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.module.columns


@dataclass(kw_only=True)
class Unpacked:
    """A model's persistent state by the names that its config implies."""

    config: PreTrainedConfig
    structure: PreTrainedModel
    """Built from `config` on meta: what the loading engine will build."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Name of a layer -> its quantized weight."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Name -> any other tensor; tied ones once, under the name that the loader reads."""

    def layer(self, name: str) -> nn.Module | None:
        """The layer that the loading engine will have under `name`."""
        try:
            return self.structure.get_submodule(name)
        except AttributeError:
            return None


def model_class(module: nn.Module) -> type[PreTrainedModel] | None:
    """The class of transformers that a model is of, whatever was mixed into it; None for any other module."""
    import transformers

    for cls in type(module).__mro__:
        found = getattr(transformers, cls.__name__, None) if isinstance(module, transformers.PreTrainedModel) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and found is not transformers.PreTrainedModel:
            return found
    return None


def unpack(subject: Subject) -> Unpacked:
    """The model's state under its own names.

    Raises:
        ModelError: the model is none of transformers', or its config no longer describes its tensors; names them.
    """
    cls = model_class(subject.module)
    if cls is None:
        what = f"{type(subject.module).__name__} is no model of transformers, which this format is for"
        raise ModelError(Problem(where="export", what=what, fix="export it as torch_export, aot_inductor or onnx"))
    config = _config(subject.module, cls, subject.dtype)
    structure = skeleton(cls, config, _name(subject.dtype))
    found = Unpacked(config=config, structure=structure)
    for name, value in _state(subject.module):
        if isinstance(value, Part):
            found.parts[name] = value
        else:
            found.tensors[name] = value
    _untie(found)
    problems = list(_misfits(found))
    if problems:
        raise ModelError(*problems)
    return found


def counted(names: list[str]) -> str:
    """`a, b, c and 4 more`."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


def _config(module: Any, cls: type, dtype: torch.dtype) -> PreTrainedConfig:
    """The model's config as another engine must read it: no attention of ours, ties as they are, the model's own dtype."""
    config: PreTrainedConfig = copy.deepcopy(module.config)
    config._attn_implementation = "sdpa"
    config.architectures = [cls.__name__]
    config.dtype = dtype
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is not None and embedding is not None and hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = head.weight is embedding.weight
    return config


def _state(model: nn.Module) -> Iterator[tuple[str, Part | Tensor]]:
    """Every persistent tensor and every quantized weight under the model's own names."""
    for wrapped, module in model.named_modules():
        path = clean(wrapped)
        if isinstance(module, PackedPart):
            continue
        spans = _spans(model, path, module)
        names = [part for part, _, _ in spans] or [path]
        if isinstance(module, Quantized):
            rows = spans or [(path, 0, module.weight.shape[0])]
            yield from ((part, Part(module=module, start=a, stop=b, packed=bool(spans))) for part, a, b in rows)
        held = set(Quantized.STORED) if isinstance(module, Quantized) else set()
        for name, tensor in _own(module):
            if name in held:
                continue
            if spans and name in ("weight", "bias"):
                yield from ((f"{part}.{name}", tensor[a:b]) for part, a, b in spans)
            else:
                yield (f"{names[0]}.{name}" if path else name), tensor


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, and the buffers that its state dict has."""
    yield from ((name, parameter.detach()) for name, parameter in module._parameters.items() if parameter is not None)
    kept = ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
    yield from ((name, buffer) for name, buffer in kept if name not in module._non_persistent_buffers_set)


def _spans(model: nn.Module, path: str, module: nn.Module) -> list[tuple[str, int, int]]:
    """Name, first row and the row after the last of each linear that a packed one stands for; none for others."""
    parent = path.rpartition(".")[0]
    found = []
    for local in getattr(module, PARTS, ()):
        name = f"{parent}.{local}" if parent else local
        part = model.get_submodule(name)
        assert isinstance(part, PackedPart)
        found.append((name, part.start, part.stop))
    return found


def _untie(found: Unpacked) -> None:
    """Leaves out every name that the loader ties to another one itself, so that a tied weight is stored once."""
    for name, first in ties(found.structure).items():
        found.tensors.pop(name, None)
        path, _, local = name.rpartition(".")
        if local == "weight" and first.rpartition(".")[0] in found.parts:
            found.parts.pop(path, None)


def _misfits(found: Unpacked) -> Iterator[Problem]:
    """What the loading engine would not find, would not know, or would have in another shape."""
    wanted = {name: tensor.shape for name, tensor in found.structure.state_dict().items() if name not in ties(found.structure)}
    given = {f"{name}.weight": torch.Size(part.shape) for name, part in found.parts.items()}
    given |= {name: tensor.shape for name, tensor in found.tensors.items()}
    missing = [name for name in wanted if name not in given]
    foreign = [name for name in given if name not in wanted]
    shaped = [
        f"{name} {list(given[name])} for {list(wanted[name])}" for name in given if name in wanted and not _fits(given[name], wanted[name])
    ]
    told = {"are missing": missing, "are not the model's": foreign, "have another shape than the config says": shaped}
    for what, names in told.items():
        if names:
            where = f"{type(found.structure).__name__} of transformers"
            yield Problem(
                where=where, what=f"{len(names)} tensors {what}: {counted(names)}", fix="export it as torch_export, aot_inductor or onnx"
            )


def _fits(given: torch.Size, wanted: torch.Size) -> bool:
    """Equal, transposed (GPT-2's Conv1D), or flattened (a convolution's)."""
    return given == wanted or (given.numel() == wanted.numel() and (given[::-1] == wanted or given[0] == wanted[0]))
