"""Rotates the values of attention within each head, against the columns of the output projection that read them.

Attention sums values over tokens, head by head, so a rotation within a head goes through it. Which rows make the values is found by
sending factors through the block (`quantize.folds`); how wide a head is, the attention module says.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from optforge.calibrate.walk import Block
from optforge.transforms.quantize import folds as folding
from optforge.transforms.quantize.folds import ROWS, Fold
from optforge.transforms.rotate.matrices import rotation


def sites(model: nn.Module, writers: Mapping[str, nn.Linear]) -> dict[str, int]:
    """Writers whose parent says how wide its heads are -> that width."""
    found = {}
    for name, linear in writers.items():
        size = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        if isinstance(size, int) and size > 1 and linear.in_features % size == 0:
            found[name] = size
    return found


def told(chosen: Mapping[str, int]) -> str:
    """One sentence for the receipt."""
    if not chosen:
        return "no attention module says how wide its heads are (head_dim): values are not rotated within them"
    return f"values are rotated within heads of {', '.join(map(str, sorted(set(chosen.values()))))} in {len(chosen)} layers"


def rotate_(block: Block, chosen: Mapping[str, int], seed: int) -> dict[str, str]:
    """Rotates in place what can be; the reasons for the others. `chosen` holds paths within the block."""
    if not chosen:
        return {}
    call = block.calls[0]
    wanted = {path: block.module.get_submodule(path) for path in chosen}
    folds, refused = folding.find(block, call, wanted, set())
    left = {path: f"values are not rotated within heads, since {why}" for path, why in refused.items()}
    for fold in folds:
        (path, *others) = [path for path in fold.readers if path in chosen]
        matrix, _ = rotation(chosen[path], seed)
        if others or len(fold.readers) != 1 or fold.kind != ROWS or not _whole_heads(fold, chosen[path]):
            left[path] = "values are not rotated within heads, since what makes them is not laid out head by head"
        elif not _applied(block, fold, matrix):
            left[path] = "values are not rotated within heads, since that would change what the block computes"
    return left


def _whole_heads(fold: Fold, size: int) -> bool:
    """Whether every `size` columns of the reader are one head of the source, in its order."""
    if fold.size % size:
        return False
    if fold.channels is None:
        return True
    heads = fold.channels.reshape(-1, size)
    return bool((heads[:, :1] % size == 0).all()) and bool((heads - heads[:, :1] == torch.arange(size, device=heads.device)).all())


def _applied(block: Block, fold: Fold, matrix: Tensor) -> bool:
    """Multiplies both sides by the matrix; puts the old weights back where the block then gives something else."""
    source, reader = (block.module.get_submodule(path) for path in (fold.source, fold.readers[0]))
    before = folding.flow(block, block.calls[0])
    held = dict(source._parameters), dict(reader._parameters)
    for name in ("weight", "bias"):
        old = source._parameters.get(name)
        if old is not None:
            rows = old.detach().double().clone()
            part = rows[fold.start : fold.stop]
            blocks = part.reshape(-1, len(matrix), *part.shape[1:])
            rows[fold.start : fold.stop] = torch.einsum("ij,hi...->hj...", matrix.to(rows), blocks).reshape(part.shape)
            source._parameters[name] = nn.Parameter(rows.to(old.dtype), requires_grad=old.requires_grad)
    old = reader._parameters["weight"]
    assert old is not None
    columns = old.detach().double()
    turned = (columns.reshape(len(columns), -1, len(matrix)) @ matrix.to(columns)).reshape(columns.shape)
    reader._parameters["weight"] = nn.Parameter(turned.to(old.dtype), requires_grad=old.requires_grad)
    if folding.same(before, folding.flow(block, block.calls[0])):
        return True
    source._parameters.update(held[0])
    reader._parameters.update(held[1])
    return False
