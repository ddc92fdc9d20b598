"""Static schemes: scales of activations from calibration samples, bad ones left out, and layers that no sample reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import FixedSamples, context

from optforge.backends.cpu import CpuBackend
from optforge.calibrate.samples import Samples
from optforge.data.inputs import Inputs
from optforge.errors import DataError, PlanError
from optforge.kernels.int8_dynamic import int8_static
from optforge.kernels.linears import QuantizedLinear
from optforge.kernels.rounding import int8_range
from optforge.models.base import Loaded
from optforge.spec import CalibrationData
from optforge.transforms.base import Receipt
from optforge.transforms.quantize import Quantize, SchemeName
from optforge.transforms.quantize.algorithms import Uncalibrated

STATIC = [SchemeName.int8_static, SchemeName.fp8_static]


def apply(model: nn.Module, scheme: SchemeName, samples: Any, **fields: Any) -> Receipt:
    given = dataclasses.replace(context("weights"), samples=samples, backend=CpuBackend())
    return Quantize(scheme=scheme, samples=4, **fields).apply(model, given)


def batches(*values: Tensor) -> FixedSamples:
    return FixedSamples([((value,), {}) for value in values])


def bad(batch_size: int) -> Iterator[Tensor]:
    """Four samples, of which one holds NaN and one Inf; the good ones lie between -1 and 1.53."""
    x = torch.linspace(-1, 1.53, 64).reshape(1, 64)
    for value in (None, float("nan"), float("inf"), None):
        sample = x.clone()
        if value is not None:
            sample[0, 5] = value
        yield sample


class Heads(nn.Module):
    """The second head is reached by rows with a positive first value alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) if float(x[0, 0]) > 0 else self.first(x)


def test_ranges_by_hand() -> None:
    """As `int8_rows` rounds a row of the same range: 253 steps of 0.01 from -1 to 1.53, and 0 exact."""
    scale, offset = int8_range(-1.0, 1.53)
    assert (scale, offset) == (pytest.approx(0.01), pytest.approx(0.27))
    assert int8_range(0.0, 0.0)[0] > 0
    model = nn.Sequential(nn.Linear(64, 16))
    apply(model, SchemeName.fp8_static, batches(torch.full((1, 64), -4.48), torch.full((1, 64), 1.0)))
    assert model[0].input_scale.tolist() == [pytest.approx(0.01)]


@pytest.mark.parametrize("scheme", STATIC, ids=lambda s: s.name)
def test_a_product_within_the_range_is_off_by_no_more_than_rounding_and_saturates_beyond(scheme: SchemeName) -> None:
    torch.manual_seed(0)
    x, linear = torch.randn(32, 192), nn.Linear(192, 96)
    expected = linear(x)
    model = nn.Sequential(linear)
    receipt = apply(model, scheme, batches(x))
    assert receipt.notes == ["calibrated on 1 samples of a test"]
    assert float((model(x) - expected).norm() / expected.norm()) < (0.03 if scheme is SchemeName.int8_static else 0.06)
    assert isinstance(linear, QuantizedLinear)
    edge = 1.02 * x.abs().max()
    once, more = linear(torch.full((1, 192), float(edge))), linear(torch.full((1, 192), 10 * float(edge)))
    assert torch.allclose(once, more, rtol=2e-2, atol=2e-2), "what is beyond the range counts as its end"


def test_the_int8_product_is_that_of_the_rounded_numbers() -> None:
    torch.manual_seed(0)
    x, weight, scale = torch.randn(9, 576) * 3, torch.randint(-127, 128, (40, 576), dtype=torch.int8), torch.rand(40, 1)
    step, offset = (torch.tensor([value]) for value in int8_range(-5.0, 6.0))
    sums = (weight.double() * scale.double()).sum(1).float()
    found = int8_static(x, weight, scale, sums, None, step, offset)
    rounded = torch.round((x - offset) / step).clamp(-128, 127).double() * step.double() + offset.double()
    expected = rounded @ (weight.double() * scale.double()).t()
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.case("B50")
def test_b50_scales_are_those_of_the_good_samples() -> None:
    def samples(fraction: float) -> Samples:
        loaded = Loaded(module=nn.Linear(64, 16), family="module", name="toy", weights="random")
        options = CalibrationData(factory="test_static:bad", max_bad_fraction=fraction)
        return Samples(loaded=loaded, data=Inputs(), data_name="inputs", options=options)

    model, good = nn.Sequential(nn.Linear(64, 16)), nn.Sequential(nn.Linear(64, 16))
    receipt = apply(model, SchemeName.int8_static, samples(0.5))
    assert "2 more left out: they hold NaN or Inf" in receipt.notes[0]
    apply(good, SchemeName.int8_static, batches(next(bad(1))))
    assert torch.equal(model[0].input_scale, good[0].input_scale) and torch.equal(model[0].input_offset, good[0].input_offset)
    with pytest.raises(DataError, match=r"2 of 4 calibration samples hold NaN or Inf \(sample 1, 2\)"):
        apply(nn.Sequential(nn.Linear(64, 16)), SchemeName.int8_static, samples(0.0))


@pytest.mark.parametrize("scheme", STATIC, ids=lambda s: s.name)
@pytest.mark.case("B55")
def test_b55_a_layer_that_no_sample_reaches_is_left_and_named_or_refused(scheme: SchemeName) -> None:
    x = -torch.ones(1, 64)
    model = Heads()
    receipt = apply(model, scheme, batches(x))
    assert [touched.name for touched in receipt.touched] == ["first"] and type(model.second) is nn.Linear
    assert "no calibration sample reaches it" in receipt.skipped["second"]
    assert list(receipt.decisions["layers"]) == ["first"]
    with pytest.raises(PlanError, match="no calibration sample reaches layer second"):
        apply(model := Heads(), scheme, batches(x), uncalibrated=Uncalibrated.error)
    assert type(model.first) is nn.Linear, "nothing was changed before"


def test_without_data_it_says_what_to_use_instead() -> None:
    with pytest.raises(DataError, match=r"needs data to find the scales of activations.*quantize/int8_dynamic"):
        apply(nn.Sequential(nn.Linear(64, 16)), SchemeName.int8_static, None)


def test_convolutions_and_embeddings_need_no_samples() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1))
    receipt = apply(model, SchemeName.int8_static, None, targets=["Conv2d"])
    assert receipt.touched[0].what == "int8_weight" and receipt.notes == []
