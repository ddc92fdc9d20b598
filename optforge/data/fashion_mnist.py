"""Fashion-MNIST: 70,000 images of clothes in ten classes, from a Debian package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from optforge import fetch
from optforge.errors import DataError, Problem
from optforge.models.base import Loaded

if TYPE_CHECKING:
    from torch import Tensor

_COUNTS = {"test": ("t10k", 10_000), "train": ("train", 60_000)}
SHAPE = (1, 28, 28)


@dataclass(frozen=True, kw_only=True)
class FashionMNIST:
    """Images in [0, 1] of shape [1, 28, 28] with labels 0 to 9, in the order of the files."""

    split: str = "test"
    """test (10,000 images that no training saw) or train (60,000)."""

    real: ClassVar[bool] = True

    def check(self) -> Iterator[Problem]:
        if self.split not in _COUNTS:
            yield Problem(where="data.split", what=f"unknown split {self.split!r}", fix="write data.split=test or data.split=train")
        absent = fetch.missing("fashion_mnist")
        if absent is not None:
            yield absent

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        raise DataError(Problem(where="data", what="fashion_mnist holds images, no text", fix="use data=wikipedia"))

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The first `count` images, fp32 [batch, 1, 28, 28] in [0, 1], and labels int64 [batch]; at most the whole split."""
        from optforge.idx import read_idx

        if loaded.image_shape is not None and loaded.image_shape != SHAPE:
            what = f"{loaded.name} takes images of shape {loaded.image_shape}, fashion_mnist has {SHAPE}"
            raise DataError(Problem(where="data", what=what, fix="use data=photos, or model=fashion_cnn"))
        folder = fetch.require("fashion_mnist")
        prefix, total = _COUNTS[self.split]
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz", (total, 28, 28))[:count]
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", (total,))[:count]
        for start in range(0, len(images), batch_size):
            rows = slice(start, start + batch_size)
            yield images[rows].unsqueeze(1).float() / 255.0, labels[rows].long()

    def for_calibration(self) -> FashionMNIST | None:
        """Training images, where figures are made of the test images."""
        return replace(self, split="train") if self.split == "test" else None

    def prompts(self) -> list[str]:
        return []
