"""Images: IDX files read safely, real sets in the model's shape, a user's own batches."""

from __future__ import annotations

import gzip
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optforge import fetch
from optforge.data.fashion_mnist import FashionMNIST
from optforge.data.inputs import Inputs
from optforge.data.photos import Photos, Split, _box
from optforge.errors import DataError
from optforge.idx import read_idx
from optforge.models.base import Loaded


def classifier(*shape: int) -> Loaded:
    return Loaded(module=nn.Identity(), family="image_classifier", name="toy", image_shape=(shape[0], shape[1], shape[2]))


def idx(values: bytes, *shape: int, kind: int = 8) -> bytes:
    return gzip.compress(bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values)


def test_an_idx_file_is_read_in_its_shape(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(idx(bytes(range(12)), 2, 2, 3))
    assert read_idx(tmp_path / "a.gz", (2, 2, 3)).tolist() == torch.arange(12).view(2, 2, 3).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(bytes(11), 2, 2, 3), "holds 11 values, 12 expected"),
        (idx(bytes(13), 2, 2, 3), "holds 13 values, 12 expected"),
        (idx(bytes(12), 2, 3, 2), "not an IDX file of bytes with shape"),
        (idx(bytes(12), 2, 2, 3, kind=13), "not an IDX file of bytes with shape"),
        (idx(bytes(12), 2**31, 2**31, 2**31), "not an IDX file of bytes with shape"),
        (idx(bytes(12), 2, 2, 3)[:-10], "cannot be read"),
        (b"plain", "cannot be read"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "a.gz", (2, 2, 3))


@pytest.mark.skipif(fetch.find("fashion_mnist") is None, reason=f"run `{fetch.command('fashion_mnist')}`")
def test_fashion_mnist_is_the_published_set() -> None:
    batches = list(FashionMNIST().batches(classifier(1, 28, 28), 10_000, 4_000))
    images, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
    assert images.shape == (10_000, 1, 28, 28) and float(images.min()) == 0.0 and float(images.max()) == 1.0
    assert labels.bincount().tolist() == [1000] * 10  # Xiao et al. 2017, section 2: balanced classes
    assert labels[:5].tolist() == [9, 2, 1, 1, 6]
    with pytest.raises(DataError, match="takes images of shape"):
        next(FashionMNIST().batches(classifier(3, 224, 224), 1, 1))


@pytest.mark.skipif(fetch.find("photos") is None, reason=f"run `{fetch.command('photos')}`")
def test_photos_are_twenty_labelled_images_in_the_models_size() -> None:
    images, labels = next(Photos().batches(classifier(3, 224, 224), 100, 50))
    assert images.shape == (20, 3, 224, 224) and labels[:3].tolist() == [243, 559, 438]
    assert float(images.min()) >= -127 / 128 and float(images.max()) <= 1.0
    small, _ = next(Photos().batches(classifier(3, 64, 96), 2, 2))
    assert small.shape == (2, 3, 64, 96)


@pytest.mark.skipif(fetch.find("photos") is None, reason=f"run `{fetch.command('photos')}`")
def test_views_are_seeded_crops_and_flips_and_the_split_shares_no_photo() -> None:
    toy = classifier(3, 32, 32)
    images, labels = next(Photos(views=3, split=Split.figure).batches(toy, 100, 100))
    assert images.shape == (30, 3, 32, 32) and labels[:10].tolist() == labels[10:20].tolist() == labels[20:].tolist()
    again, _ = next(Photos(views=3, split=Split.figure).batches(toy, 100, 100))
    other, _ = next(Photos(views=3, split=Split.figure).batches(toy, 100, 100, seed=1))
    assert torch.equal(images, again) and not torch.equal(images, other)
    assert not torch.equal(images[:10], images[10:20]), "each round has crops of its own"
    apart = Photos(views=3, split=Split.figure).for_calibration()
    assert apart == Photos(views=3, split=Split.calibration)
    _, rest = next(apart.batches(toy, 10, 10))
    _, every = next(Photos().batches(toy, 20, 20))
    assert sorted([*labels[:10].tolist(), *rest.tolist()]) == sorted(every.tolist())
    assert Photos().for_calibration() is None


def test_crops_stay_within_the_photo_and_hold_enough_of_it() -> None:
    draw = random.Random(0)
    for size in ((500, 375), (100, 900)):
        for _ in range(200):
            left, top, right, bottom = _box(size, draw)
            assert 0 <= left < right <= size[0] + 1e-9 and 0 <= top < bottom <= size[1] + 1e-9
            if size == (500, 375):
                assert (right - left) * (bottom - top) > 0.3 * size[0] * size[1]


def test_fashion_mnist_calibrates_on_training_images() -> None:
    assert FashionMNIST().for_calibration() == FashionMNIST(split="train") and FashionMNIST(split="train").for_calibration() is None


def own(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A data factory as a user would write it."""
    for index in range(10):
        yield torch.full((batch_size, 2), float(index)), torch.full((batch_size,), index)


def test_a_factorys_batches_are_taken_as_they_come() -> None:
    source = Inputs(factory="test_images:own")
    batches = list(source.batches(classifier(1, 1, 2), 7, 3))
    assert source.real and [batch[1].tolist() for batch in batches] == [[0] * 3, [1] * 3, [2] * 3]


def test_without_a_factory_there_are_random_images_that_are_not_called_real() -> None:
    sizes = [len(images) for images, _ in Inputs().batches(classifier(3, 4, 5), 7, 3)]
    assert sizes == [3, 3, 1] and not Inputs().real
    with pytest.raises(DataError, match="does not say the shape"):
        next(Inputs().batches(Loaded(module=nn.Identity(), family="module", name="toy"), 1, 1))
