"""Random token ids: for shapes and speed where no text or tokenizer is at hand. No quality is measured on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from optforge.errors import DataError, Problem
from optforge.models.base import Loaded

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RandomTokens:
    """Token ids drawn evenly from the model's vocabulary, the same for the same seed."""

    real: ClassVar[bool] = False

    def check(self) -> Iterator[Problem]:
        return iter(())

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        import torch

        if loaded.vocab_size is None:
            raise DataError(Problem(where="data", what=f"{loaded.name} has no vocabulary", fix="use data=inputs or an image set"))
        return torch.randint(loaded.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        raise DataError(Problem(where="data", what=f"{loaded.name} takes images or tensors", fix="use data=inputs or an image set"))

    def prompts(self) -> list[str]:
        return []
