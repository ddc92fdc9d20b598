"""Results of calibrated blocks in the user's cache, each under a key made of everything that it depends on.

A run that was killed finds its finished blocks again, and the rows, sweeps and runs that calibrate the same weights on the same
inputs in the same way share one calibration. The key holds the block's tensors and inputs themselves, so what came before
the block (other steps, other data, other weights) needs no mention.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from optforge import __version__
from optforge.cache import cache_dir
from optforge.spec import Json

FOLDER = "calibrated"
CHUNK = 1 << 24
"""Elements that are hashed at a time, since each takes eight bytes meanwhile."""
_MULTIPLIERS = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))
"""Odd constants (of splitmix64 and of xxHash64) as signed integers."""
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Tells tensors apart by dtype, shape and every bit, on whatever device they are; 128 bits, no protection against forgery."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.is_meta or not tensor.numel():
            continue
        bits = tensor.detach().contiguous().reshape(-1).view(_WIDTHS[tensor.element_size()])
        for start in range(0, bits.numel(), CHUNK):
            part = bits[start : start + CHUNK].long()
            at = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
            for factor in _MULTIPLIERS:
                mixed = (part + at * factor) * (part ^ (at * factor) >> 17 | 1)  # int64 wraps around
                digest.update(str(int(mixed.sum())).encode())
    return digest.hexdigest()[:32]


class Kept:
    """Tensors of finished blocks for one set of options."""

    def __init__(self, options: Json, folder: Path | None = None) -> None:
        """
        Args:
            options: all that decides the result beside the block and its inputs, as JSON.
            folder: instead of the user's cache.
        """
        self.options = json.dumps([options, __version__, torch.__version__], sort_keys=True)
        self.folder = folder if folder is not None else cache_dir() / FOLDER

    def key(self, fingerprint: str) -> str:
        """Of a block with this fingerprint."""
        return hashlib.sha256(f"{self.options} {fingerprint}".encode()).hexdigest()[:32]

    def get(self, key: str, device: torch.device) -> dict[str, Tensor] | None:
        """The tensors that were put under `key`, or None; a damaged file counts as none."""
        path = self.folder / f"{key}.safetensors"
        try:
            return load_file(path, device=str(device)) if path.is_file() else None
        except (SafetensorError, OSError):
            return None

    def put(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keeps plain contiguous tensors under `key`. A cache that cannot be written is no reason to stop."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
            os.close(handle)
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
            os.replace(temporary, self.folder / f"{key}.safetensors")
        except OSError:
            return
