"""Reads IDX files, the format of MNIST and its relatives (layout: yann.lecun.com/exdb/mnist, section "IDX file format")."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from optforge.errors import DataError, Problem

if TYPE_CHECKING:
    from torch import Tensor

_UNSIGNED_BYTE = 8


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The uint8 tensor in a gzipped IDX file that must have this shape.

    Raises:
        DataError: the file is missing, damaged, or of another type or shape.
    """
    import torch

    try:
        with gzip.open(path, "rb") as file:
            # one byte more than expected tells a longer file, without reading whatever a damaged header announces
            content = file.read(4 + 4 * len(shape) + math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(Problem(where=str(path), what=f"cannot be read ({error})", fix="delete its folder and fetch it again")) from error
    header = bytes([0, 0, _UNSIGNED_BYTE, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    if content[: len(header)] != header:
        raise DataError(Problem(where=str(path), what=f"is not an IDX file of bytes with shape {shape}"))
    data = content[len(header) :]
    if len(data) != math.prod(shape):
        raise DataError(Problem(where=str(path), what=f"holds {len(data)} values, {math.prod(shape)} expected"))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape)
