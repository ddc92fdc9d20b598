"""The model's own example as data, or what a user's factory gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from optforge import callables
from optforge.errors import DataError, Problem
from optforge.models.base import Loaded

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Without a factory: random inputs of the model's shape, or its example. With one: the batches it yields."""

    factory: str | None = None
    """package.module:callable, called as factory(batch_size); yields a batch, or a batch and its int64 labels."""

    @property
    def real(self) -> bool:
        """Only a user's own data is real; quality on a module's example needs none."""
        return self.factory is not None

    def check(self) -> Iterator[Problem]:
        if self.factory is not None and ":" not in self.factory:
            yield Problem(where="data.factory", what=f"{self.factory!r} is no callable's name", fix="write package.module:callable")

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        """The first `count` ids of the flattened batches of the factory."""
        import torch

        if self.factory is None:
            raise DataError(
                Problem(where="data", what="inputs has no tokens", fix="use data=random_tokens, data=wikipedia or data.factory")
            )
        found: list[Tensor] = []
        for inputs, _ in self._own(batch_size=1):
            found.append(inputs.flatten())
            if sum(each.numel() for each in found) >= count:
                return torch.cat(found)[:count].long()
        total = sum(each.numel() for each in found)
        raise DataError(Problem(where="data", what=f"{self.factory} gave {total} tokens, {count} are wanted"))

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        """`count` items from the factory (fewer where it ends), or random images of the model's shape."""
        import torch

        if self.factory is not None:
            yield from islice(self._own(batch_size), -(-count // batch_size))
            return
        if loaded.image_shape is None:
            raise DataError(Problem(where="data", what=f"{loaded.name} does not say the shape of its inputs", fix="give data.factory"))
        generator = torch.Generator().manual_seed(seed)
        for start in range(0, count, batch_size):
            yield torch.randn((min(batch_size, count - start), *loaded.image_shape), generator=generator), None

    def prompts(self) -> list[str]:
        return []

    def _own(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """What the user's factory yields, as inputs and labels."""
        assert self.factory is not None, "only called with a factory"
        for batch in callables.resolve(self.factory, "data.factory")(batch_size):
            yield batch if isinstance(batch, tuple) else (batch, None)
