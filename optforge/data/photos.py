"""Twenty labelled ImageNet photos: few, but real; they tell a broken classifier from a working one, not 1% from 2%."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from optforge import fetch
from optforge.errors import DataError, MissingDependency, Problem
from optforge.models.base import Loaded

if TYPE_CHECKING:
    from torch import Tensor

_FIX = "pip install 'optforge[vision]'"


@dataclass(frozen=True, kw_only=True)
class Photos:
    """Photos cut to the model's size: short side enlarged by 8/7 (bicubic), then the centre, `(value - mean) / scale`."""

    mean: float = 127.0
    """Taken from each value 0 to 255; 127 as EfficientNet-Lite was trained."""
    scale: float = 128.0
    """What the difference is divided by."""

    real: ClassVar[bool] = True

    def check(self) -> Iterator[Problem]:
        absent = fetch.missing("photos")
        if absent is not None:
            yield absent
        if find_spec("PIL") is None:
            yield Problem(where="data photos", what="pillow is not installed", fix=_FIX)
        if self.scale == 0:
            yield Problem(where="data.scale", what="cannot be 0")

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        raise DataError(Problem(where="data", what="photos holds images, no text", fix="use data=wikipedia"))

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        """At most 20 photos, fp32 [batch, 3, height, width], and labels int64 [batch] of ImageNet's 1,000 classes."""
        import torch

        channels, height, width = loaded.image_shape or (3, 224, 224)
        if channels != 3:
            raise DataError(
                Problem(where="data", what=f"{loaded.name} takes {channels} channels, photos have 3", fix="use data=fashion_mnist")
            )
        files = sorted(fetch.require("photos").glob("imagenet_*"))[:count]
        for start in range(0, len(files), batch_size):
            chosen = files[start : start + batch_size]
            images = torch.stack([self._image(file, height, width) for file in chosen])
            yield images, torch.tensor([int(file.stem.rpartition("_")[2]) for file in chosen])

    def prompts(self) -> list[str]:
        return []

    def _image(self, path: Path, height: int, width: int) -> Tensor:
        """One photo as fp32 [3, height, width]."""
        import numpy
        import torch

        try:
            from PIL import Image
        except ModuleNotFoundError as error:
            raise MissingDependency(Problem(where="data photos", what="pillow is not installed", fix=_FIX)) from error
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        factor = max(height, width) * 8 / 7 / min(image.size)
        image = image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        pixels = numpy.asarray(image.crop((left, top, left + width, top + height)), dtype=numpy.float32)
        return torch.from_numpy((pixels - self.mean) / self.scale).permute(2, 0, 1).contiguous()
