"""Peak memory of the process: reset before each section, resident weights in it, freed after an error."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from optforge.backends.base import Candidate
from optforge.backends.cpu import CpuBackend
from optforge.measure import memory, row
from optforge.measure.size import weight_bytes
from optforge.spec import Measure

MIB = 2**20


def touch(mebibytes: int) -> int:
    """Makes that much resident for a moment, in pages that the allocator maps and unmaps by itself."""
    return int(torch.ones(mebibytes * MIB, dtype=torch.uint8)[-1])


@pytest.fixture(params=["VmHWM", "sampled"])
def peak(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> memory.ProcessPeak:
    if request.param == "sampled":
        # a place that cannot be written, as /proc/self/clear_refs cannot in a locked-down container
        monkeypatch.setattr(memory, "_CLEAR", tmp_path / "absent" / "clear_refs")
    found = memory.ProcessPeak()
    if found.method != request.param:
        pytest.skip(f"this machine counts memory by {found.method}")
    return found


@pytest.mark.case("B102")
def test_b102_a_section_reports_its_own_peak_whatever_ran_before(peak: memory.ProcessPeak) -> None:
    def section(mebibytes: int) -> int:
        peak.reset()
        start = peak.peak_bytes()
        for _ in range(5):  # long enough for a sampling thread to see it
            touch(mebibytes)
        found = peak.peak_bytes()
        peak.stop()
        assert start is not None and found is not None
        return found - start

    large_first = (section(192), section(32))
    small_first = (section(32), section(192))
    assert large_first[0] > 150 * MIB
    assert small_first[1] > 150 * MIB
    assert large_first[1] < 64 * MIB
    assert small_first[0] < 64 * MIB


@pytest.mark.case("B103")
def test_b103_the_peak_holds_resident_weights_and_each_field_has_its_name() -> None:
    backend = CpuBackend()
    model = nn.Linear(4096, 4096)
    backend.reset_memory()
    model(torch.randn(1, 4096))
    found = backend.memory()
    assert set(found) == {"allocated", "reserved", "process"}
    assert found["allocated"] is None, "PyTorch counts no allocations on the CPU, and a guess is not a count"
    assert found["process"] is not None
    assert found["process"] >= weight_bytes(model) == 4 * (4096 * 4096 + 4096)


@pytest.mark.case("B102")
def test_b102_the_order_of_rows_does_not_change_their_peaks() -> None:
    backend = CpuBackend()
    quick = Measure(warmup=0, min_rounds=1, max_s=0.0, batch_ms=0.0)

    def peak_of(mebibytes: int) -> int:
        found = row.measure(backend, Candidate(name="touch", call=lambda: touch(mebibytes)), None, quick).peak_memory_bytes
        assert found is not None
        return found

    large_first = [peak_of(256), peak_of(16)]
    small_first = [peak_of(16), peak_of(256)]
    assert abs(large_first[0] - small_first[1]) < 32 * MIB
    assert abs(large_first[1] - small_first[0]) < 32 * MIB
    assert large_first[0] - large_first[1] > 200 * MIB


def test_bytes_that_only_the_baseline_holds_are_taken_off() -> None:
    backend = CpuBackend()
    quick = Measure(warmup=0, min_rounds=1, max_s=0.0, batch_ms=0.0)
    candidate = Candidate(name="touch", call=lambda: touch(8))
    held = Candidate(name="baseline", call=lambda: touch(8), resident_bytes=100 * MIB)
    with_baseline = row.measure(backend, candidate, held, quick)
    assert with_baseline.memory["process"] is not None and with_baseline.peak_memory_bytes is not None
    assert with_baseline.memory["process"] - with_baseline.peak_memory_bytes == 100 * MIB


class Big:
    """Stands for the tensors of a call that ran out of memory."""


def runs_out(alive: list[weakref.ref[Big]]) -> None:
    big = Big()
    alive.append(weakref.ref(big))
    raise MemoryError("not enough memory: you tried to allocate 12 bytes")


def wraps(alive: list[weakref.ref[Big]]) -> None:
    try:
        runs_out(alive)
    except MemoryError as error:
        more = Big()
        alive.append(weakref.ref(more))
        raise RuntimeError("step weights failed") from error


@pytest.mark.case("B108")
def test_b108_a_stored_error_keeps_no_frame_alive() -> None:
    alive: list[weakref.ref[Big]] = []
    stored: list[BaseException] = []
    try:
        wraps(alive)
    except RuntimeError as error:
        stored.append(error)
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, True], "without help the stored error keeps both"
    assert memory.released(stored[0]) == "RuntimeError: step weights failed"
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.case("B108")
def test_b108_members_of_a_group_are_released_too() -> None:
    alive: list[weakref.ref[Big]] = []
    members: list[Exception] = []
    for _ in range(2):
        try:
            runs_out(alive)
        except MemoryError as error:
            members.append(error)
    memory.released(ExceptionGroup("jobs", members))
    assert [ref() for ref in alive] == [None, None]
