"""Calibrations against hand arithmetic on points made up for the purpose, and files that come back as they went."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from optforge import config
from optforge.errors import ConfigError
from optforge.measure.machine.point import Overheads, Point
from optforge.plan import calibration_file, efficiency
from optforge.plan import graph as g
from optforge.plan.calibration import Band, Calibration, calibration_for, ideal_seconds, shipped
from optforge.plan.efficiency import EXACT, NONE, SAME_DTYPE, SAME_KIND
from optforge.spec import Hardware

DEVICE = Hardware(
    name="toy", description="a toy", backend="cpu", arch="x", peak_flops={"bf16": 1e12, "fp32": 1e11}, bandwidth_bytes_per_s=1e10
)
OVERHEADS = Overheads(eager_operator=2e-6, compiled_kernel=1e-6, captured_kernel=0.0, compiled_region=3e-5, call=0.0)


def moved(m: int, n: int, k: int) -> float:
    return 2.0 * (m * k + n * k + m * n)


def point(m: int, n: int, k: int, seconds: float, **changes: object) -> Point:
    made = Point(kind=g.PRODUCT, name="aten.mm", dtype="bf16", size=(1, m, n, k), bytes=moved(m, n, k), seconds=seconds, spread=0.01)
    return replace(made, **changes)  # type: ignore[arg-type]  # fields by name


def kernel(m: int, n: int, k: int, **changes: object) -> g.Kernel:
    made = g.Kernel(
        kind=g.PRODUCT,
        name="aten.mm",
        module="",
        phase=g.FORWARD,
        dtype="bf16",
        size=(1, m, n, k),
        flops=2.0 * m * n * k,
        bytes=moved(m, n, k),
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # fields by name


def calibration(*points: Point, **changes: object) -> Calibration:
    made = Calibration(name="toy", device="a toy", hardware=DEVICE, exact=True, source="by hand", overheads=OVERHEADS, points=points)
    return replace(made, **changes)  # type: ignore[arg-type]  # fields by name


def seconds(found: Calibration, of: g.Kernel, hardware: Hardware = DEVICE) -> float:
    return ideal_seconds(of, hardware) / found.efficiency(of, hardware)


def test_the_roofline_is_the_longer_of_arithmetic_and_memory() -> None:
    assert ideal_seconds(kernel(1, 1000, 1000), DEVICE) == pytest.approx(2.0 * (1000 + 1000 * 1000 + 1000) / 1e10)
    assert ideal_seconds(kernel(4096, 4096, 4096), DEVICE) == pytest.approx(2 * 4096**3 / 1e12)


def test_a_measured_size_gives_its_measured_time_back() -> None:
    found = calibration(point(1, 576, 576, 40e-6), point(64, 576, 576, 90e-6), point(256, 576, 576, 300e-6))
    assert seconds(found, kernel(64, 576, 576)) == pytest.approx(90e-6)
    assert found.estimate(kernel(64, 576, 576), DEVICE).distance == 0.0


def test_halfway_between_two_points_the_share_is_their_geometric_mean() -> None:
    low, high = point(16, 512, 512, 1e-4), point(64, 512, 512, 3e-4)
    found = calibration(low, high)
    shares = [ideal_seconds(kernel(m, 512, 512), DEVICE) / time for m, time in ((16, 1e-4), (64, 3e-4))]
    assert found.efficiency(kernel(32, 512, 512), DEVICE) == pytest.approx(math.sqrt(shares[0] * shares[1]))


def test_a_nearer_point_counts_by_the_square_of_its_nearness() -> None:
    """32 rows: one doubling from 16, two from 128, so weights 1 and 1/4."""
    found = calibration(point(16, 512, 512, 1e-4), point(128, 512, 512, 3e-4))
    near, far = (math.log(ideal_seconds(kernel(m, 512, 512), DEVICE) / time) for m, time in ((16, 1e-4), (128, 3e-4)))
    assert math.log(found.efficiency(kernel(32, 512, 512), DEVICE)) == pytest.approx((near + far / 4) / 1.25)


def test_a_fifth_point_has_no_say() -> None:
    near = [point(m, 512, 512, 1e-4 * (1 + number)) for number, m in enumerate((8, 16, 64, 128))]
    asked = kernel(32, 512, 512)
    alone = calibration(*near).efficiency(asked, DEVICE)
    assert calibration(*near, point(1, 512, 512, 1.0)).efficiency(asked, DEVICE) == pytest.approx(alone)


def test_more_rows_never_take_less_time_where_the_points_do_not() -> None:
    found = calibration(*(point(m, 576, 576, 2e-5 + m * 1e-6) for m in (1, 4, 16, 64, 256, 1024)))
    times = [seconds(found, kernel(m, 576, 576)) for m in (1, 2, 4, 8, 16, 48, 64, 128, 256, 512, 1024, 2048, 8192)]
    assert times == sorted(times)


def test_beyond_the_largest_point_the_share_stays_that_of_the_largest() -> None:
    found = calibration(point(1024, 512, 512, 2e-3))
    assert seconds(found, kernel(8192, 512, 512)) == pytest.approx(
        2e-3 * ideal_seconds(kernel(8192, 512, 512), DEVICE) / ideal_seconds(kernel(1024, 512, 512), DEVICE)
    )


def test_attention_is_looked_up_by_its_mask_and_phase() -> None:
    size = (1, 8, 8, 256, 256, 64)
    common = {"kind": g.ATTENTION, "name": "aten.scaled_dot_product_attention", "size": size, "bytes": 1e6}
    found = calibration(
        point(1, 1, 1, 1e-3, **common, detail="causal"),
        point(1, 1, 1, 2e-3, **common, detail="masked"),
        point(1, 1, 1, 5e-3, **common, detail="causal", phase=g.BACKWARD),
    )
    asked = kernel(
        1, 1, 1, kind=g.ATTENTION, name="aten.scaled_dot_product_attention", size=size, flops=4.0 * 8 * 64 * 256 * 256, bytes=1e6
    )
    assert seconds(found, replace(asked, detail="causal")) == pytest.approx(1e-3)
    assert seconds(found, replace(asked, detail="masked")) == pytest.approx(2e-3)
    assert seconds(found, replace(asked, detail="causal", phase=g.BACKWARD)) == pytest.approx(5e-3)


def test_another_way_of_counting_flops_does_not_change_the_time() -> None:
    """The plan may count causal attention in full or in half: what was measured is seconds."""
    size = (1, 8, 8, 256, 256, 64)
    found = calibration(point(1, 1, 1, 1e-3, kind=g.ATTENTION, name="a", size=size, detail="causal"))
    for flops in (1e8, 2e8):
        asked = kernel(1, 1, 1, kind=g.ATTENTION, name="a", size=size, detail="causal", flops=flops)
        assert seconds(found, asked) == pytest.approx(1e-3)


def test_merged_kernels_are_looked_up_as_such() -> None:
    fused = point(1, 1, 1, 7e-5, kind=g.REDUCTION, name="fused", size=(256, 576), bytes=1e6)
    single = point(1, 1, 1, 1e-5, kind=g.REDUCTION, name="aten.mean", size=(256, 576), bytes=1e6)
    asked = kernel(1, 1, 1, kind=g.REDUCTION, name="aten.mean + 4", operators=5, size=(1, 256, 576), flops=0.0, bytes=1e6)
    assert seconds(calibration(fused, single), asked) == pytest.approx(7e-5)


@pytest.mark.parametrize(
    ("kind", "operator", "measured", "expected"),
    [
        # what a compiler wrote is a merged kernel, unless that very operator was measured as a compiler writes it
        (g.COPY, "aten.clone", ("fused", "aten.clone"), "fused"),
        (g.COPY, "aten.clone", ("fused", "aten.clone", "fused aten.clone"), "fused aten.clone"),
        (g.REDUCTION, "aten.mean", ("fused", "aten.mean"), "fused"),
        # a library's kernel stays the library's, in the compiler's layout where that was measured
        (g.CONVOLUTION, "aten.convolution", ("fused", "aten.convolution"), "aten.convolution"),
        (g.CONVOLUTION, "aten.convolution", ("aten.convolution", "fused aten.convolution"), "fused aten.convolution"),
    ],
)
def test_a_single_operator_that_was_compiled_is_looked_up_as_the_compiler_runs_it(
    kind: str, operator: str, measured: tuple[str, ...], expected: str
) -> None:
    sizes = {g.CONVOLUTION: (1, 8, 8, 1, 9, 196)}
    size = sizes.get(kind, (256, 576))
    merged = g.REDUCTION if kind == g.REDUCTION else g.POINTWISE
    kinds = {name: merged if name == "fused" else kind for name in measured}
    times = {name: 1e-5 * (1 + number) for number, name in enumerate(measured)}
    found = calibration(*(point(1, 1, 1, times[name], kind=kinds[name], name=name, size=size, bytes=1e6) for name in measured))
    asked = kernel(1, 1, 1, kind=kind, name=operator, size=size, flops=0.0, bytes=1e6, compiled=True)
    assert seconds(found, asked) == pytest.approx(times[expected])
    assert found.estimate(asked, DEVICE).basis == EXACT
    assert seconds(found, replace(asked, compiled=False)) == pytest.approx(times[operator])


def test_a_long_row_is_told_from_many_short_ones() -> None:
    """An argmax over a vocabulary moves as much as a norm over many rows and takes longer."""
    many = point(1, 1, 1, 1e-5, kind=g.REDUCTION, name="r", size=(1024, 128), bytes=262144.0)
    one = point(1, 1, 1, 9e-5, kind=g.REDUCTION, name="r", size=(1, 131072), bytes=262144.0)
    asked = kernel(1, 1, 1, kind=g.REDUCTION, name="r", size=(1, 1, 131072), flops=0.0, bytes=262144.0)
    assert seconds(calibration(many, one), asked) == pytest.approx(9e-5)


def test_each_fallback_is_told() -> None:
    found = calibration(point(64, 512, 512, 1e-4), point(64, 512, 512, 2e-4, dtype="fp32"))
    changes: list[dict[str, object]] = [{}, {"name": "aten.bmm"}, {"dtype": "fp8"}, {"kind": g.CONVOLUTION}]
    asked = [kernel(64, 512, 512, **change) for change in changes]
    assert [found.estimate(one, DEVICE).basis for one in asked] == [EXACT, SAME_DTYPE, SAME_KIND, NONE]
    assert found.efficiency(asked[3], DEVICE) == 1.0
    told = found.unmeasured(asked)
    assert len(told) == 3
    assert "not measured" in told[0] and "aten.bmm in bf16" in told[0] and "counted at the peak" in told[2]


def test_borrowed_shares_are_shares_of_the_other_devices_peaks_and_carry_no_band() -> None:
    band = Band(workload="decode", points=9, median_error=0.05, p90_error=0.1, source="a table")
    own = calibration(point(4096, 4096, 4096, 4 * 4096**3 / 1e12), bands=(band,))  # half the rate of the peak
    borrowed = replace(own, exact=False)
    faster = replace(DEVICE, name="faster", peak_flops={"bf16": 3e12})
    assert seconds(borrowed, kernel(4096, 4096, 4096), faster) == pytest.approx(4 * 4096**3 / 3e12)
    assert own.band("decode") == band and borrowed.band("decode") is None
    assert borrowed.told() == "efficiencies of a toy, not of this device; no error known"


def test_a_band_of_the_dtype_goes_before_that_of_all() -> None:
    general = Band(workload="prefill", points=12, median_error=0.06, p90_error=0.2, source="t")
    special = replace(general, dtype="int8", median_error=0.09)
    found = calibration(bands=(general, special))
    assert found.band("prefill", "int8") == special
    assert found.band("prefill", "bf16") == general
    assert found.band("train", "bf16") is None


def written(path: Path, **changes: object) -> Calibration:
    values: dict[str, object] = {
        "device": "a toy",
        "hardware": DEVICE,
        "date": "2026-12-01",
        "command": "python benchmarks/calibrate.py",
        "versions": {"torch": "2.13.0"},
        "overheads": OVERHEADS,
        "points": [point(1, 576, 576, 40e-6), point(8, 576, 576, 5e-5, detail="group=64", phase=g.BACKWARD)],
        "errors": [Band(workload="decode", points=9, median_error=0.05, p90_error=0.1, source="a table")],
    }
    calibration_file.write(path, **(values | changes))  # type: ignore[arg-type]  # arguments by name
    return calibration_file.read(path)


def test_a_file_comes_back_as_it_went(tmp_path: Path) -> None:
    found = written(tmp_path / "toy.yaml")
    assert sorted(found.points, key=lambda one: one.size) == [
        point(1, 576, 576, 40e-6),
        point(8, 576, 576, 5e-5, detail="group=64", phase=g.BACKWARD),
    ]
    assert (found.name, found.device, found.hardware, found.overheads) == ("toy", "a toy", DEVICE, OVERHEADS)
    assert found.bands[0].p90_error == 0.1
    assert found.source == "measured on 2026-12-01 with torch 2.13.0"


def test_recorded_errors_replace_the_old_ones_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"
    before = written(path)
    calibration_file.with_errors(path, [Band(workload="prefill", dtype="bf16", points=4, median_error=0.02, p90_error=0.03, source="new")])
    calibration_file.read.cache_clear()
    after = calibration_file.read(path)
    assert (after.points, after.overheads, after.source) == (before.points, before.overheads, before.source)
    assert [band.workload for band in after.bands] == ["prefill"]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("device: a toy", "devise: a toy", "unknown key 'devise'"),
        ("compiled_region:", "compiled_regions:", "unknown key 'compiled_regions'"),
        (" 40.0000 ", " -40.0 ", "is no point"),
        (" 40.0000 ", " fast ", "is no point"),
        (" 40.0000 ", " 0.0 ", "is no point"),
        ("1x1x576x576", "1x1x576y576", "is no point"),
        ("profile:", "hardware: h200\nprofile:", "either hardware or profile"),
        ("bf16: 1000000000000.0", "bf16: -1.0", "must be above 0"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, old: str, new: str, what: str) -> None:
    path = tmp_path / "toy.yaml"
    written(path)
    text = path.read_text()
    assert old in text
    (wrong := tmp_path / "wrong.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=what):
        calibration_file.read(wrong)


@pytest.mark.parametrize("found", shipped(), ids=lambda found: found.name)
def test_shipped_calibrations_speak_for_their_device(found: Calibration) -> None:
    assert len(found.points) >= 100
    kinds = {one.kind for one in found.points}
    assert {g.PRODUCT, g.ATTENTION, g.POINTWISE, g.REDUCTION} <= kinds
    assert all(0 < one.seconds < 10 and one.bytes > 0 for one in found.points)
    assert found.hardware.bandwidth_bytes_per_s and found.hardware.peak_flops
    shares = [efficiency._share(one, found.hardware) for one in found.points if one.kind == g.PRODUCT]
    assert max(shares) < 3.0, "a product that is three times faster than the roofline was not measured right"


@pytest.mark.skipif(not shipped(), reason="no calibration is committed")
def test_a_device_of_another_family_has_no_calibration_unless_one_was_measured() -> None:
    families = {found.hardware.backend for found in shipped()}
    assert "xla" not in families
    assert calibration_for(config.hardware("tpu_v5e")) is None


def test_the_nearest_device_of_the_family_lends_its_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    lent = [calibration(point(1, 576, 576, 4e-5), hardware=config.hardware(name), name=name) for name in ("h200", "t4")]
    monkeypatch.setattr("optforge.plan.calibration.shipped", lambda: lent)
    found = calibration_for(config.hardware("h100"))
    assert found is not None and found.name == "h200" and not found.exact
    own = calibration_for(config.hardware("h200"))
    assert own is not None and own.exact


def test_another_architecture_is_further_than_any_bandwidth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 has nearly the bandwidth of an L4; an RTX 4090, with three times as much, has its architecture."""
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    lent = [calibration(point(1, 576, 576, 4e-5), hardware=config.hardware(name), name=name) for name in ("t4", "rtx4090")]
    monkeypatch.setattr("optforge.plan.calibration.shipped", lambda: lent)
    found = calibration_for(config.hardware("l4"))
    assert found is not None and found.name == "rtx4090"


@pytest.mark.parametrize("points", [(point(8, 64, 64, 2e-5),), ()], ids=["points", "overheads alone"])
def test_what_the_user_measured_goes_before_what_ships(points: tuple[Point, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = config.hardware("h200")
    ships = calibration(point(1, 576, 576, 4e-5), hardware=h200, name="ships", device="another")
    own = calibration(*points, hardware=h200, name="own", overheads=replace(OVERHEADS, call=1e-3))
    monkeypatch.setattr("optforge.plan.calibration.shipped", lambda: [ships])
    monkeypatch.setattr("optforge.plan.calibration.measured.calibration_of", lambda hardware: own)
    found = calibration_for(config.hardware("h100"))
    assert found is not None and found.overheads.call == 1e-3
    assert (found.name, found.exact) == (("own", True) if points else ("ships", False))


def test_a_file_holds_the_points_of_a_whole_accelerator(tmp_path: Path) -> None:
    """The safe parser takes 256 KiB and 20,000 values, and a survey of a GPU is some 2,000 points."""
    many = [point(rows, 128 * n, 4096, 1e-5 * rows) for rows in range(1, 51) for n in range(1, 51)]
    assert len(written(tmp_path / "large.yaml", points=many).points) == 2500
