"""Rounding arithmetic against numbers worked out by hand, and the int8 products against float64."""

from __future__ import annotations

import pytest
import torch

from optforge.kernels import rounding
from optforge.kernels.formats import OCP
from optforge.kernels.int8_dynamic import int8_dynamic


def test_int8_by_hand() -> None:
    stored, scale = rounding.int8_weight(torch.tensor([[1.27, -0.504, 0.006, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert stored.tolist() == [[127, -50, 1, 0], [0, 0, 0, 0]]
    assert scale[0].item() == pytest.approx(0.01) and scale[1].item() > 0


def test_int4_with_a_zero_point_by_hand() -> None:
    packed, scale, zero = rounding.int4_weight(torch.tensor([[-0.5, 1.0, 0.0, 0.2]]), 2, symmetric=False)
    assert zero is not None
    # first group: step 1.5/15 = 0.1, zero point 5, values 0 and 15; second: step 0.2/15, zero point 0, values 0 and 15
    assert scale.tolist() == [[pytest.approx(0.1), pytest.approx(0.2 / 15)]] and zero.tolist() == [[5, 0]]
    assert packed.tolist() == [[0xF0, 0xF0]]
    assert rounding.from_int4(packed, scale, zero, 4, 2, torch.float32).tolist() == [[pytest.approx(v) for v in (-0.5, 1.0, 0.0, 0.2)]]


def test_symmetric_int4_by_hand() -> None:
    packed, scale, zero = rounding.int4_weight(torch.tensor([[-0.7, 0.3, 0.0]]), 16, symmetric=True)
    assert zero is None and scale.tolist() == [[pytest.approx(0.1)]]
    assert packed.tolist() == [[1 + 16 * 11, 8]], "an odd width ends in half a byte"


def test_packing_is_undone() -> None:
    nibbles = torch.randint(0, 16, (5, 7), dtype=torch.uint8)
    assert torch.equal(rounding.unpack_int4(rounding.pack_int4(nibbles), 7), nibbles)


def test_fp8_by_hand() -> None:
    bits, scale = rounding.fp8_weight(torch.tensor([[448.0, 1.0, -1.0625, 2.0**-9]]), OCP, per_channel=True)
    # 448 = 0 1111 110; 1 = 0 0111 000; -1.0625 is a tie and goes to the even -1 = 1 0111 000; 2^-9 is the smallest step
    assert scale.item() == 1.0 and bits.tolist() == [[0b0_1111_110, 0b0_0111_000, 0b1_0111_000, 1]]


def test_rows_of_activations_by_hand() -> None:
    x = torch.tensor([[0.0, 2.53, 1.0], [-1.0, 1.53, 0.0], [-2.53, -1.0, 0.0], [0.0, 0.0, 0.0]])
    stored, scale, offset = rounding.int8_rows(x)
    assert stored.tolist() == [[-127, 126, -27], [-127, 126, -27], [-127, 26, 126], [-127] * 3]
    assert scale.flatten().tolist()[:3] == [pytest.approx(0.01)] * 3 and bool((scale > 0).all())
    assert offset.flatten().tolist() == [pytest.approx(v) for v in (1.27, 0.27, -1.26, 0.0)]


@pytest.mark.parametrize("mean", [-1e4, -3.0, 0.0, 0.5, 1e4])
def test_rows_of_activations_never_leave_int8_and_keep_zero(mean: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2000, 64) + mean
    x[:, 7] = 0
    stored, scale, offset = rounding.int8_rows(x)
    back = stored.double() * scale.double() + offset.double()
    assert bool(((back - x.double()).abs() <= scale.double() * 0.501).all()), "a value that left int8 would come back 256 steps away"
    assert bool((back[:, 7].abs() <= 1e-5 * scale.double().flatten()).all())


def test_ties_at_both_ends_stay_in_int8() -> None:
    """Both ends half a step off the grid and rounded outwards: the worst there is."""
    low = torch.arange(0.5, 253, 1.0)
    stored, _, _ = rounding.int8_rows(torch.stack([-low, 253 - low], dim=1))
    assert bool((stored[:, 0] < stored[:, 1]).all())


@pytest.mark.parametrize("columns", [3, 576, 14336])
def test_the_int8_product_is_that_of_the_rounded_numbers(columns: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, columns) + 3
    x[1] = 0.25
    weight = torch.randint(-127, 128, (16, columns), dtype=torch.int8)
    weight[0] = 127
    stored, row_scale, offset = rounding.int8_rows(x)
    scale = torch.rand(16, 1) / 100
    dequantized = weight.double() * scale.double()
    expected = (stored.double() * row_scale.double() + offset.double()) @ dequantized.t()
    y = int8_dynamic(x, weight, scale, dequantized.sum(1).float(), None)
    size = (stored.double().abs() * row_scale.double() + offset.double().abs()) @ dequantized.abs().t()
    assert float(((y.double() - expected).abs() / size).max()) < 3e-7
