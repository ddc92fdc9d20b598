"""Every shape of a model that a tensor degree does not divide, found before a weight is loaded and told at once.

Found later, a wrong degree is a view error on all ranks after minutes of loading, or a checkpoint cut in the wrong place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from optforge.errors import Problem
from optforge.kernels.linears import Quantized
from optforge.spec import Scheme
from optforge.transforms.quantize import GROUP_SIZES
from optforge.transforms.quantize.survey import counted
from optforge.transforms.shard.layout import COLUMN, ROW, VOCABULARY, Split, in_features, out_features, rows

HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
"""What configs and attention modules call them; without a count of key/value heads there are as many as query heads."""
LARGEST_DEGREE = 64
"""Degrees that are tried when the ones that fit are listed."""
FP8_MULTIPLE = 16
"""What cuBLASLt's fp8 product needs both sizes of a weight to be a multiple of."""


@dataclass(frozen=True)
class _Need:
    """A size that the degree must divide, with what is left over being a multiple of `multiple`."""

    where: str
    what: str
    size: int
    multiple: int = 1
    group: bool = False

    def holds(self, degree: int) -> bool:
        return self.size % degree == 0 and (self.size // degree) % self.multiple == 0

    def told(self, degree: int) -> str:
        if self.size % degree:
            return f"{self.what} {self.size} is not divisible by tensor={degree}"
        part = self.size // degree
        return f"{self.what} {self.size} / tensor={degree} = {part} is no multiple of {self.multiple}"


def problems(model: nn.Module, found: list[Split], degree: int, step: str) -> list[Problem]:
    """What does not fit the tensor degree; equal problems of several layers are one."""
    if degree == 1:
        return []
    needs = [*_model_needs(model, found), *(need for split in found for need in _layer_needs(split))]
    unknown = _unknown_heads(model, found, degree, step)
    fitting = [d for d in range(1, LARGEST_DEGREE + 1) if all(need.holds(d) for need in needs)]
    groups: dict[tuple[str, str], list[str]] = {}
    for need in needs:
        if not need.holds(degree):
            groups.setdefault((need.told(degree), _fix(need, degree, fitting)), []).append(need.where)
    told = [
        Problem(where=f"step {step}, {names[0] if names[0] == 'the model' else counted(names)}", what=what, fix=fix)
        for (what, fix), names in groups.items()
    ]
    return unknown + told


def heads(model: nn.Module, found: list[Split]) -> tuple[int, int] | None:
    """Query heads and key/value heads, from the model's config or from the modules that hold the projections."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    parents = (model.get_submodule(split.name.rpartition(".")[0]) for split in found if split.attention)
    for source in (text, *parents):
        query = next((getattr(source, name) for name in HEADS if isinstance(getattr(source, name, None), int)), None)
        if query is not None:
            return query, next((getattr(source, name) for name in KV_HEADS if isinstance(getattr(source, name, None), int)), query)
    return None


def _model_needs(model: nn.Module, found: list[Split]) -> Iterator[_Need]:
    """Heads and vocabulary."""
    counts = heads(model, found) if any(split.attention for split in found) else None
    if counts is not None:
        yield _Need("the model", "the number of attention heads", counts[0])
        if counts[1] != counts[0]:
            yield _Need("the model", "the number of key/value heads", counts[1])
    size = rows(model)
    if size is not None and any(split.role == VOCABULARY for split in found):
        yield _Need("the model", "the vocabulary of", size)


def _layer_needs(split: Split) -> Iterator[_Need]:
    """N of columns and K of rows, with the block or group that each device's part must hold whole."""
    scheme = split.module.scheme if isinstance(split.module, Quantized) else None
    multiple = _multiple(scheme)
    if split.role == COLUMN:
        for width in dict.fromkeys(split.parts):
            yield _Need(split.name, "its N =" if len(split.parts) == 1 else "its packed part N =", width, multiple)
    elif split.role == VOCABULARY and multiple > 1:
        yield _Need(split.name, "its N =", out_features(split.module), multiple)
    elif split.role == ROW:
        group = scheme.group_size if scheme is not None and scheme.granularity == "group" else None
        chosen = scheme is not None and scheme.weight_dtype == "int4"  # other schemes have one size
        yield _Need(split.name, "its K =", in_features(split.module), group or multiple, chosen and group is not None)


def _multiple(scheme: Scheme | None) -> int:
    """What both sizes of a device's part must be a multiple of: cuBLASLt's fp8 product, and squares that share a scale."""
    if scheme is not None and scheme.granularity == "block":
        return scheme.group_size or 1
    return FP8_MULTIPLE if scheme is not None and scheme.name in ("fp8_dynamic", "fp8_static") else 1


def _fix(need: _Need, degree: int, fitting: list[int]) -> str:
    """Degrees that fit the whole model, and for a group the sizes that fit this degree."""
    degrees = ", ".join(map(str, fitting[1:]))
    fix = f"degrees that fit everything: {degrees}" if degrees else "no degree above 1 fits everything: use shard/fsdp"
    if need.group and need.size % degree == 0:
        sizes = [str(size) for size in reversed(GROUP_SIZES) if (need.size // degree) % size == 0]
        fix += f"; group sizes that fit here: {', '.join(sizes)}" if sizes else ""
    return fix


def _unknown_heads(model: nn.Module, found: list[Split], degree: int, step: str) -> list[Problem]:
    first = next((split.name for split in found if split.attention), None)
    if first is None or heads(model, found) is not None:
        return []
    what = f"neither the model's config nor the module of {first} says how many heads there are, so tensor={degree} cannot be checked"
    return [Problem(where=f"step {step}", what=what, fix="use shard/fsdp, or give the attention module an attribute num_heads")]
