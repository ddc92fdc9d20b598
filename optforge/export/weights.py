"""Writes tensors as transformers stores them: one safetensors file, or shards with an index; each tensor made only when its file is.

The tensors are made one file at a time, so that what is dequantized or repacked never lies in memory as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Most bytes of one file, as transformers' own shards."""


Maker = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor that is to be written: its size, and how it is made."""

    nbytes: int
    make: Maker


def as_it_is(tensor: Tensor, dtype: torch.dtype | None = None) -> Stored:
    """A tensor, cast to `dtype` where it is a floating-point one."""
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return Stored(nbytes=tensor.numel() * cast.itemsize, make=lambda: tensor.to(cast))


def total(state: Mapping[str, Stored]) -> int:
    """Bytes of all tensors."""
    return sum(stored.nbytes for stored in state.values())


def write(state: Mapping[str, Stored], folder: Path) -> None:
    """Writes every tensor, on the CPU and contiguous, into `folder`.

    Raises:
        OSError: the volume is full, or the folder cannot be written.
    """
    shards = list(_shards(state))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        made = _alone({name: state[name].make().cpu().contiguous() for name in names})
        try:
            save_file(made, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        listed = {"metadata": {"total_size": total(state)}, "weight_map": dict(sorted(index.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def _alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor with memory of its own: safetensors refuses two that share theirs, as rows of one packed weight and its scales do."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        if memory.data_ptr() in seen or memory.nbytes() != tensor.numel() * tensor.element_size():
            tensors[name] = tensor.clone()
        seen.add(memory.data_ptr())
    return tensors


def _shards(state: Mapping[str, Stored]) -> Iterator[list[str]]:
    """Names of the tensors of each file, in order."""
    names: list[str] = []
    size = 0
    for name, stored in state.items():
        if names and size + stored.nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += stored.nbytes
    yield names
