"""What a quantize step misses: weights that it neither changed nor was told to ignore, with their share of the bytes.

A model whose experts lie in one 3-D parameter looks quantized in a list of its linear layers, and is not: 91% of its
bytes are elsewhere. So every parameter is asked, and not every layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from optforge.measure.size import nbytes
from optforge.plan.document import LOOKED_UP, Missed
from optforge.select import original_name, select
from optforge.transforms.base import Receipt

SMALL = 1024
"""Elements below which a parameter is no weight worth asking for: scales, position biases of one head."""

REASONS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Embedding, LOOKED_UP),
    (nn.Conv2d, "a convolution, which is no target of the step (targets: [Linear, Conv2d])"),
    (nn.modules.conv._ConvNd, "a convolution that is not Conv2d, which no scheme stores"),
)


@dataclass(frozen=True)
class _Kind:
    """Parameters that differ in their layer's number alone."""

    pattern: str
    shape: tuple[int, ...]
    dtype: str
    reason: str


def missed(module: nn.Module, receipts: Sequence[Receipt], ignore: Sequence[str] = ()) -> list[Missed]:
    """The weights that the quantize steps left without being told to, those of one kind together, largest first.

    Args:
        module: the model after the steps, on meta or real; a parameter that several modules share is counted once.
        receipts: what each quantize step did; shares are of the bytes before the first.
        ignore: the selectors that the steps were given of what to leave.
    """
    if not receipts:
        return []
    spoken_for = {original_name(touched.name) for receipt in receipts for touched in receipt.touched}
    spoken_for |= set(select(module, ["re:.*"], ignore, step="quantize", strict=False).ignored)
    skipped = {name: why for receipt in receipts for name, why in receipt.skipped.items()}
    found: dict[_Kind, list[tuple[str, Tensor]]] = {}
    for name, kind, parameter in _left(module, spoken_for):
        reason = _reason(name, kind, skipped)
        key = _Kind(_pattern(name), tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), reason)
        found.setdefault(key, []).append((name, parameter))
    total = max(receipts[0].total_bytes, 1)
    rows = [
        Missed(
            pattern=kind.pattern if len(alike) > 1 else alike[0][0],
            count=len(alike),
            shape=list(kind.shape),
            dtype=kind.dtype,
            bytes=sum(nbytes(parameter) for _, parameter in alike),
            share=sum(nbytes(parameter) for _, parameter in alike) / total,
            reason=kind.reason,
        )
        for kind, alike in found.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _left(module: nn.Module, spoken_for: set[str]) -> Iterator[tuple[str, type[nn.Module], Tensor]]:
    """Original name, owner's class and tensor of every weight of which no owner is `spoken_for`; a tied one has several."""
    owned = [
        (original_name(path), key, type(owner), parameter)
        for path, owner in module.named_modules()
        for key, parameter in owner._parameters.items()
        if parameter is not None and _is_weight(parameter)
    ]
    seen = {id(parameter) for name, _, _, parameter in owned if _within(name, spoken_for)}
    for name, key, owner, parameter in owned:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield (f"{name}.{key}" if name else key), owner, parameter


def _is_weight(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.dim() >= 2 and parameter.numel() >= SMALL


def _within(name: str, names: set[str]) -> bool:
    """Whether `name` is one of `names` or lies below one."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))


def _reason(name: str, owner: type[nn.Module], skipped: Mapping[str, str]) -> str:
    """Why it was left: in the step's own words where it gave any."""
    said = skipped.get(name) or skipped.get(name.rpartition(".")[0])
    if said:
        return said.split(", ")[0] if said.startswith("a 3-D parameter") else said
    return next((reason for kind, reason in REASONS if issubclass(owner, kind)), "its module is no linear layer, or no target of the step")


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{name}")[1:]
