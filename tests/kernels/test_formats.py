"""The 8-bit float of each device, and how one becomes the other."""

from __future__ import annotations

import pytest
import torch

from optforge.kernels.formats import FNUZ, FORMATS, OCP, Fp8Format, convert, format_for
from optforge.kernels.rounding import fp8_weight
from optforge.spec import Hardware

H100 = Hardware(name="h100", backend="nvidia", arch="sm_90", fp8_format="e4m3fn")
MI300X = Hardware(name="mi300x", backend="amd", arch="gfx942", fp8_format="e4m3fnuz")


@pytest.mark.case("B40")
def test_b40_the_target_decides_dtype_and_maximum() -> None:
    assert (format_for(H100).dtype, format_for(H100).maximum) == (torch.float8_e4m3fn, 448.0)
    assert (format_for(MI300X).dtype, format_for(MI300X).maximum) == (torch.float8_e4m3fnuz, 240.0)
    assert format_for(Hardware(name="a100", backend="nvidia", arch="sm_80")) is OCP


@pytest.mark.parametrize("target", [H100, MI300X], ids=lambda t: t.name)
@pytest.mark.case("B40")
def test_b40_values_come_back_within_a_step_and_minus_zero_is_no_nan(target: Hardware) -> None:
    fmt = format_for(target)
    bits, scale = fp8_weight(torch.tensor([[448.0, -0.0, 1.0]]), fmt, per_channel=True)
    back = bits.view(fmt.dtype).float() * scale
    assert bits[0, 1] == 0 and bool(back.isfinite().all())
    assert back[0, 0] == pytest.approx(448.0) and abs(float(back[0, 2]) - 1) < 1 / 8


@pytest.mark.case("B40")
def test_b40_every_byte_means_half_in_the_other_format() -> None:
    bits = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    scale = torch.tensor([[0.25]])
    for source, target in ((OCP, FNUZ), (FNUZ, OCP)):
        given = bits if source is OCP else bits[bits != 0x80]
        moved, rescaled = convert(given, scale, source, target)
        assert torch.equal(moved.view(target.dtype).float() * rescaled, given.view(source.dtype).float() * scale)
    with pytest.raises(ValueError, match="NaN"):
        convert(torch.tensor([0x80], dtype=torch.uint8), scale, FNUZ, OCP)
    with pytest.raises(ValueError, match="NaN"):
        convert(torch.tensor([0x7F], dtype=torch.uint8), scale, OCP, FNUZ)


@pytest.mark.case("B40")
def test_b40_the_largest_numbers_of_fnuz_are_no_nan_in_ocp() -> None:
    """+-240 are 0x7F and 0xFF there. Below 2^-6 OCP has steps of 2^-9 where FNUZ has 2^-10."""
    bits = torch.tensor([b for b in range(256) if b != 0x80], dtype=torch.uint8)
    scale = torch.tensor([[0.25]])
    moved, rescaled = convert(bits, scale, FNUZ, OCP)
    off = (moved.view(OCP.dtype).float() * rescaled - bits.view(FNUZ.dtype).float() * scale).flatten().abs()
    exact = bits.view(FNUZ.dtype).float().abs() >= 2.0**-6
    assert bool(exact[bits == 0x7F]) and not off[exact].any()
    assert float(off.max()) <= 2.0**-10 * 0.25


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_bits_under_a_float16_sign_are_the_value_over_the_half_factor(fmt: Fp8Format) -> None:
    finite = [b for b in range(256) if b != 0x80 and (fmt is FNUZ or b & 0x7F != 0x7F)]
    bits = torch.tensor(finite, dtype=torch.uint8)
    half = (((bits.int() & 0x80) << 8) | ((bits.int() & 0x7F) << 7)).to(torch.uint16).view(torch.float16)
    assert torch.equal(half.float() * fmt.half_factor, bits.view(fmt.dtype).float())
