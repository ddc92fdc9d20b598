"""What the baseline said, kept in the user's cache for runs on devices where the baseline does not fit.

Of each position the 128 largest log-probabilities are kept, with the perplexity: a few megabytes instead of the gigabyte
that all logits take. The key covers all that the numbers depend on, so that a stale file is never found.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from optforge.cache import building, cache_dir

if TYPE_CHECKING:
    from torch import Tensor, nn

TOP = 128
_FILE = "reference.safetensors"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The baseline's largest log-probabilities [positions, TOP] in fp32, their classes, and its mean loss in nats."""

    log_probabilities: Tensor
    indices: Tensor
    mean_loss: float

    def window(self, index: int, size: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and int64 classes of one window."""
        rows = slice(index * size, (index + 1) * size)
        return self.log_probabilities[rows], self.indices[rows].long()


def path_of(digest: str, module: nn.Module, ids: Tensor, window: int, dtype: str) -> Path:
    """The folder for one model (`digest` of its weights, and what it computes with them), one run of token ids, and the
    versions that computed it."""
    import transformers

    parts = [digest, _structure(module), hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest(), window, dtype, TOP]
    parts += [torch.__version__, transformers.__version__]
    return cache_dir() / "references" / hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _structure(module: nn.Module) -> list[str]:
    """What a module computes besides its weights: equal weights under another epsilon or head count are another model."""
    config = getattr(module, "config", None)
    settings = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    settings.pop("_name_or_path", None)  # where it was loaded from
    return [str(module), json.dumps(settings, sort_keys=True, default=str)]


def load(folder: Path) -> Reference | None:
    """The cached reference, or None when no run has stored one."""
    if not (folder / _FILE).is_file():
        return None
    from safetensors.torch import load_file

    tensors = load_file(folder / _FILE)
    return Reference(log_probabilities=tensors["log_probabilities"], indices=tensors["indices"], mean_loss=float(tensors["mean_loss"]))


def save(folder: Path, reference: Reference) -> None:
    """Stores a reference; the folder appears whole or not at all."""
    from safetensors.torch import save_file

    tensors = {
        "log_probabilities": reference.log_probabilities.contiguous(),
        "indices": reference.indices.contiguous(),
        "mean_loss": torch.tensor(reference.mean_loss, dtype=torch.float64),
    }
    with building(folder) as new:
        save_file(tensors, new / _FILE)
