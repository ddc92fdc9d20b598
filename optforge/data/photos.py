"""Twenty labelled ImageNet photos: few, but real; they tell a broken classifier from a working one, not 1% from 2%.

Crops and flips of them (`views`) are more pictures of the same things: enough to say how often two models agree, and no test set.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from optforge import fetch
from optforge.errors import DataError, MissingDependency, Problem
from optforge.models.base import Loaded

if TYPE_CHECKING:
    from torch import Tensor

_FIX = "pip install 'optforge[vision]'"
LEAST_AREA, LONGEST = 0.35, 4 / 3
"""Of a random crop: its least share of the photo's area, and the longest ratio of its sides. The usual training augmentation goes down
to 0.08 of the area, where a picture need not hold its subject any more."""


class Split(Enum):
    all = "all"
    figure = "figure"
    calibration = "calibration"


@dataclass(frozen=True, kw_only=True)
class Photos:
    """Photos cut to the model's size: short side enlarged by 8/7 (bicubic), then the centre, `(value - mean) / scale`."""

    mean: float = 127.0
    """Taken from each value 0 to 255; 127 as EfficientNet-Lite was trained."""
    scale: float = 128.0
    """What the difference is divided by."""
    views: int = 1
    """Pictures of each photo. 1: the centre; more: seeded random crops and flips, a round over all photos after the other."""
    split: Split = Split.all
    """all; figure: every other photo, and calibration takes the others, so that no photo serves both."""

    real: ClassVar[bool] = True

    def check(self) -> Iterator[Problem]:
        absent = fetch.missing("photos")
        if absent is not None:
            yield absent
        if find_spec("PIL") is None:
            yield Problem(where="data photos", what="pillow is not installed", fix=_FIX)
        if self.scale == 0:
            yield Problem(where="data.scale", what="cannot be 0")
        if self.views < 1:
            yield Problem(where="data.views", what=f"must be 1 or more, is {self.views}", fix="data.views=1")

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        raise DataError(Problem(where="data", what="photos holds images, no text", fix="use data=wikipedia"))

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        """At most `views` pictures of each of the split's photos, fp32 [batch, 3, height, width], and labels int64 [batch] of ImageNet's
        1,000 classes. The same seed gives the same pictures."""
        import torch

        channels, height, width = loaded.image_shape or (3, 224, 224)
        if channels != 3:
            raise DataError(
                Problem(where="data", what=f"{loaded.name} takes {channels} channels, photos have 3", fix="use data=fashion_mnist")
            )
        pictures = [(file, view) for view in range(self.views) for file in self._files()][:count]
        for start in range(0, len(pictures), batch_size):
            chosen = pictures[start : start + batch_size]
            images = torch.stack([self._image(file, height, width, self._crop(file, view, seed)) for file, view in chosen])
            yield images, torch.tensor([int(file.stem.rpartition("_")[2]) for file, _ in chosen])

    def for_calibration(self) -> Photos | None:
        """The photos that no figure is made of; None where every photo is in the figure."""
        return replace(self, split=Split.calibration) if self.split is Split.figure else None

    def prompts(self) -> list[str]:
        return []

    def _files(self) -> list[Path]:
        files = sorted(fetch.require("photos").glob("imagenet_*"))
        return files if self.split is Split.all else files[self.split is Split.calibration :: 2]

    def _crop(self, file: Path, view: int, seed: int) -> random.Random | None:
        """What decides the crop of a picture; None for the centre."""
        return None if self.views == 1 else random.Random(f"{seed} {file.stem} {view}")

    def _image(self, path: Path, height: int, width: int, crop: random.Random | None) -> Tensor:
        """One picture as fp32 [3, height, width]."""
        import numpy
        import torch

        try:
            from PIL import Image
        except ModuleNotFoundError as error:
            raise MissingDependency(Problem(where="data photos", what="pillow is not installed", fix=_FIX)) from error
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        if crop is None:
            factor = max(height, width) * 8 / 7 / min(image.size)
            image = image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        else:
            image = image.resize((width, height), Image.Resampling.BICUBIC, box=_box(image.size, crop))
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.random() < 0.5 else image
        pixels = numpy.asarray(image, dtype=numpy.float32)
        return torch.from_numpy((pixels - self.mean) / self.scale).permute(2, 0, 1).contiguous()


def _box(size: tuple[int, int], draw: random.Random) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a random crop of a photo of this width and height."""
    width, height = size
    area = width * height * draw.uniform(LEAST_AREA, 1.0)
    ratio = LONGEST ** draw.uniform(-1, 1)
    across, down = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
    left, top = draw.uniform(0, width - across), draw.uniform(0, height - down)
    return left, top, left + across, top + down
