"""One forward pass: each family's inputs, dtypes that follow the module, operations and bytes by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optforge.errors import Problem
from optforge.models.base import Loaded
from optforge.workloads.base import Work, Workload
from optforge.workloads.forward import Forward

CPU = torch.device("cpu")


class Ramp:
    """Token ids 0, 1, 2, ... within the vocabulary; images that are the same for the same seed."""

    real = False

    def check(self) -> Iterator[Problem]:
        return iter(())

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        return torch.arange(count) % loaded.vocab_size

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        generator = torch.Generator().manual_seed(seed)
        yield torch.rand((batch_size, *loaded.image_shape), generator=generator), None

    def prompts(self) -> list[str]:
        return []


class Never(Ramp):
    """Data that must not be read."""

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        raise AssertionError("data was read")

    def batches(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
        raise AssertionError("data was read")


def cnn(dtype: torch.dtype = torch.float32) -> Loaded:
    """3 x 8 x 8 images, one convolution to 4 channels (3 x 3, padded), 10 classes."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10)).to(dtype)
    return Loaded(module=module, family="image_classifier", name="cnn", image_shape=(3, 8, 8))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, index: Tensor) -> Tensor:
        self.seen = [x.dtype, index.dtype]
        return self.linear(x)[index]


def test_protocols() -> None:
    assert isinstance(Forward(), Workload)
    assert isinstance(Forward(batch_size=2).prepare(cnn(), Ramp(), CPU), Work)


def test_a_classifier_runs_a_batch_of_its_data() -> None:
    loaded = cnn()
    work = Forward(batch_size=5).prepare(loaded, Ramp(), CPU, seed=3)
    images, _ = next(Ramp().batches(loaded, 5, 5, 3))
    assert (work.unit, work.units, work.calls) == ("items", 5, 1)
    torch.testing.assert_close(work.run(loaded.module), loaded.module(images))


class Few(Ramp):
    """Three images, however many are wanted."""

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        yield next(super().batches(loaded, 3, 3, seed))


def test_fewer_images_than_the_batch_are_gone_over_again() -> None:
    """The batch that is timed, and counted, is the one that was asked for."""
    work = Forward(batch_size=8).prepare(cnn(), Few(), CPU)
    (images,), _ = work.arguments
    assert work.units == len(images) == 8
    assert torch.equal(images[3:6], images[:3]) and torch.equal(images[6:], images[:2])


def test_operations_and_bytes_of_a_classifier_by_hand() -> None:
    loaded = cnn()
    work = Forward(batch_size=5).prepare(loaded, Ramp(), CPU)
    convolution = 5 * 2 * (8 * 8) * 4 * (3 * 3 * 3)
    linear = 5 * 2 * 256 * 10
    assert work.flops(loaded.module) == convolution + linear
    weights = 4 * (4 * 27 + 4 + 256 * 10 + 10)
    assert work.bytes(loaded.module) == weights + 4 * 5 * 3 * 64


def test_images_follow_the_dtype_of_the_module_at_hand() -> None:
    loaded = cnn()
    work = Forward(batch_size=2).prepare(loaded, Ramp(), CPU)
    lower = cnn(torch.bfloat16).module
    assert work.run(loaded.module).dtype == torch.float32
    assert work.run(lower).dtype == torch.bfloat16
    lower.float()
    work.ready(lower)
    assert work.run(lower).dtype == torch.float32


def test_a_module_runs_its_own_example_and_only_floats_of_its_dtype_are_cast() -> None:
    module = TwoInputs()
    loaded = Loaded(module=module, family="module", name="two", example=((torch.randn(3, 4),), {"index": torch.tensor([2, 0])}))
    work = Forward().prepare(loaded, Never(), CPU)
    assert (work.unit, work.units) == ("items", 3)
    assert work.flops(module) == 3 * 2 * 4 * 2
    module.to(torch.bfloat16)
    work.ready(module)
    assert work.run(module).shape == (2, 2)
    assert module.seen == [torch.bfloat16, torch.int64]


def test_on_meta_no_data_is_read() -> None:
    with torch.device("meta"):
        loaded = cnn()
    meta = torch.device("meta")
    work = Forward(batch_size=5).prepare(loaded, Never(), meta)
    assert work.flops(loaded.module) == Forward(batch_size=5).prepare(cnn(), Ramp(), CPU).flops(cnn().module)
    args, kwargs = Forward().example(loaded, meta)
    assert loaded.module(*args, **kwargs).shape == (2, 10)


def test_a_model_that_reads_values_has_no_operation_count() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum().item() > 0 else x

    module = Reads()
    work = Forward().prepare(Loaded(module=module, family="module", name="reads", example=((torch.ones(1, 4),), {})), Never(), CPU)
    assert work.flops(module) is None


def test_inputs_carry_no_gradient() -> None:
    loaded = cnn()
    with torch.enable_grad():
        assert not Forward().prepare(loaded, Ramp(), CPU).run(loaded.module).requires_grad


@pytest.mark.parametrize(
    ("workload", "loaded", "words"),
    [
        (Forward(batch_size=0), cnn(), "workload.batch_size: must be 1 or more, is 0"),
        (Forward(), Loaded(module=nn.Identity(), family="module", name="x"), "no example"),
        (Forward(), Loaded(module=nn.Identity(), family="image_classifier", name="x"), "shape of its images"),
    ],
)
def test_check_says_what_is_wrong(workload: Forward, loaded: Loaded, words: str) -> None:
    (problem,) = workload.check(loaded)
    assert words in str(problem)
