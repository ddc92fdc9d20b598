"""The small floats and the formats that share a scale, against tables worked out by hand from their specifications."""

from __future__ import annotations

import math

import pytest
import torch

from optforge.kernels import blocks
from optforge.kernels.formats import OCP, from_e2m1, from_e8m0, to_e2m1, to_e8m0
from optforge.kernels.rounding import unpack_int4
from optforge.schemes import SCHEMES

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
"""OCP MX specification 1.0, table 5: sign, two exponent bits (bias 1), one mantissa bit."""
BLOCKED = ["fp8_block", "mxfp8", "mxfp4", "nvfp4"]


def stored(values: list[float], name: str) -> dict[str, torch.Tensor]:
    return blocks.store(torch.tensor([values]), SCHEMES[name], OCP.name)


def back(found: dict[str, torch.Tensor], columns: int, name: str) -> torch.Tensor:
    whole = found.get("weight_global_scale")
    return blocks.dequantize(found["weight"], found["weight_scale"], whole, columns, SCHEMES[name], OCP.name)


def test_every_code_of_e2m1() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert from_e2m1(codes).tolist() == E2M1
    assert to_e2m1(torch.tensor(E2M1)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15], "-0 is stored as 0"


@pytest.mark.parametrize(
    ("value", "nearest"),
    [(0.25, 0), (0.2501, 0.5), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.01, 6), (7, 6), (1e30, 6), (0.1, 0)],
)
def test_e2m1_rounds_ties_to_even_and_saturates(value: float, nearest: float) -> None:
    assert from_e2m1(to_e2m1(torch.tensor([value, -value]))).tolist() == [nearest, -nearest]


def test_every_code_of_e8m0() -> None:
    found = from_e8m0(torch.arange(256, dtype=torch.int32).to(torch.uint8)).double()
    assert torch.equal(found[:255], torch.tensor([2.0 ** (code - 127) for code in range(255)], dtype=torch.float64))
    assert bool(found[255].isnan())


@pytest.mark.parametrize(
    ("largest", "dtype", "code"),
    [
        (6.0, "fp4", 127),  # 2^floor(log2 6) = 4, over e2m1's 4: 1
        (7.99, "fp4", 127),  # saturates
        (8.0, "fp4", 128),
        (3.99, "fp4", 126),
        (448.0, "fp8", 127),  # 256 over e4m3's 256
        (511.0, "fp8", 127),
        (512.0, "fp8", 128),
        (1.0, "fp8", 119),
        (0.0, "fp4", 1),
        (1e-44, "fp4", 1),  # subnormal
        (3.0e38, "fp4", 252),  # 2^127 over 4
    ],
)
def test_scales_of_mx_by_hand(largest: float, dtype: str, code: int) -> None:
    assert to_e8m0(torch.tensor([largest]), dtype).tolist() == [code]


def test_a_block_that_holds_no_number_is_none() -> None:
    for value in (math.nan, math.inf):
        assert to_e8m0(torch.tensor([value]), "fp4").tolist() == [255]
        for name in ("mxfp8", "mxfp4", "nvfp4"):
            assert not bool(back(stored([value] + [1.0] * 31, name), 32, name).isfinite().any())


def test_mxfp4_by_hand() -> None:
    """Largest 12: scale 2^(3 - 2) = 2. Values over it: 6, 0.75 (a tie, to 1), -2.4 (to -2), 0."""
    found = stored([12.0, 1.5, -4.8, 0.0] + [0.0] * 28 + [0.125, -0.75], "mxfp4")
    assert found["weight_scale"].tolist() == [[128, 124]], "0.75 is 1.5 * 2^-1, over 4: 2^-3"
    assert unpack_int4(found["weight"], 34)[0, [0, 1, 2, 3, 32, 33]].tolist() == [7, 2, 12, 0, 2, 15]
    assert back(found, 34, "mxfp4")[0, [0, 1, 2, 3, 32, 33]].tolist() == [12.0, 2.0, -4.0, 0.0, 0.125, -0.75]


def test_mxfp8_by_hand() -> None:
    """Largest 1: scale 2^(0 - 8). Values over it: 256 and 1.0625 * 16 = 17, halfway between 16 and 18, to the even mantissa 16."""
    found = stored([1.0, 17 / 256], "mxfp8")
    assert found["weight_scale"].tolist() == [[119]] and found["weight"].tolist() == [[0b0_1111_000, 0b0_1011_000]]
    assert back(found, 2, "mxfp8")[0].tolist() == [1.0, 0.0625]


def test_nvfp4_by_hand() -> None:
    """Largest of all 2688 = 6 * 448: the fp32 scale is 1 and the first block's 448. The second block's largest 6: scale 1."""
    found = stored([2688.0] + [0.0] * 15 + [6.0, 2.5, -0.2] + [0.0] * 13, "nvfp4")
    assert found["weight_global_scale"].tolist() == [1.0]
    assert found["weight_scale"].tolist() == [[0b0_1111_110, 0b0_0111_000]]
    assert back(found, 32, "nvfp4")[0, [0, 16, 17, 18]].tolist() == [2688.0, 6.0, 2.0, 0.0]


def test_squares_by_hand() -> None:
    weight = torch.zeros(130, 129)
    weight[0, 0], weight[129, 0], weight[0, 128] = 448.0, 44.8, -4.48
    found = blocks.store(weight, SCHEMES["fp8_block"], OCP.name)
    assert found["weight_scale"].shape == (2, 2)
    assert found["weight_scale"][:, 0].tolist() == [1.0, pytest.approx(0.1)] and float(found["weight_scale"][0, 1]) == pytest.approx(0.01)
    assert torch.allclose(back(found, 129, "fp8_block"), weight)


@pytest.mark.case("B46")
@pytest.mark.parametrize("name", BLOCKED)
def test_b46_a_block_of_zeros_comes_back_as_zeros(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    weight[:128, :128] = 0
    scheme = SCHEMES[name]
    for values in (weight, torch.zeros(256, 256)):
        found = blocks.store(values, scheme, OCP.name)
        result = back(found, 256, name)
        assert bool(result.isfinite().all()) and not bool(result[:128, :128].any())
        assert bool((found["weight_scale"] > 0).all())
        assert not bool(blocks.round_rows(torch.zeros(3, 256), scheme, OCP.name).any())


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_errors_stay_within_the_bound_and_reach_it(name: str, size: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 320) * size
    scheme = SCHEMES[name]
    found = blocks.store(weight, scheme, OCP.name)
    bound = blocks.bound(weight, found["weight_scale"], found.get("weight_global_scale"), scheme)
    share = float(((back(found, 320, name) - weight).abs() / bound).max())
    assert 0.6 < share <= 1.001


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_of_very_different_sizes_keep_to_their_bounds(name: str) -> None:
    """NVFP4's block scales reach from 448 down to 2^-9 of one fp32 scale: below that a block loses its values, within the bound."""
    torch.manual_seed(0)
    weight = torch.randn(64, 512) * 10 ** torch.linspace(-9, 0, 64)[:, None]
    scheme = SCHEMES[name]
    found = blocks.store(weight, scheme, OCP.name)
    bound = blocks.bound(weight, found["weight_scale"], found.get("weight_global_scale"), scheme)
    assert bool(((back(found, 512, name) - weight).abs() <= bound * 1.001).all())


@pytest.mark.parametrize("name", BLOCKED)
def test_activations_are_rounded_row_by_row_as_weights_are(name: str) -> None:
    """Each row alone gives what it gives among others: batching changes nothing."""
    torch.manual_seed(0)
    x = torch.randn(5, 100) * torch.tensor([[1e-4], [1.0], [30.0], [1e3], [0.0]])
    scheme = SCHEMES[name]
    together = blocks.round_rows(x, scheme, OCP.name)
    for row, alone in zip(together, x, strict=True):
        assert torch.equal(blocks.round_rows(alone[None], scheme, OCP.name)[0], row)
    if name != "fp8_block":
        assert torch.equal(together[1], back(blocks.store(x[1:2], scheme, OCP.name), 100, name)[0])
    assert blocks.round_rows(x.bfloat16(), scheme, OCP.name).dtype is torch.bfloat16
    assert blocks.round_rows(x[:0], scheme, OCP.name).shape == (0, 100)


@pytest.mark.parametrize("name", BLOCKED)
def test_the_product_is_that_of_the_rounded_numbers(name: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(7, 200), torch.randn(48, 200), torch.randn(48)
    scheme = SCHEMES[name]
    found = blocks.store(weight, scheme, OCP.name)
    y = blocks.block_product(x, found["weight"], found["weight_scale"], found.get("weight_global_scale"), bias, scheme, OCP.name)
    expected = blocks.round_rows(x, scheme, OCP.name).double() @ back(found, 200, name).double().t() + bias.double()
    assert torch.allclose(y.double(), expected, atol=1e-4)
