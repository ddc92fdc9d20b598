"""Whether something else used the device: against a process that really does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from optforge.measure import contention, nvml

SPIN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


def _spinning_elsewhere() -> int:
    """A busy process that is no descendant of this one, as another user's would be; its number."""
    silent = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SPIN!r}], {silent}).pid)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout)


def test_another_programs_time_counts() -> None:
    number = _spinning_elsewhere()
    try:
        watch = contention.CpuWatch()
        time.sleep(1.5)
        found = watch.read()
    finally:
        os.kill(number, 9)
    cores = len(os.sched_getaffinity(0))
    # it takes a core, or what others leave of one
    assert found["contended"] is (found["contention"]["other_cpu_share"] > contention.SHARED)
    assert found["contention"]["other_cpu_share"] > 0.3 / cores
    assert found["contention"]["seconds"] == pytest.approx(1.5, abs=1.0)


def test_the_own_time_and_that_of_children_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores' counters are given, so that a busy test machine cannot decide: what this process and a child use is taken off."""
    spent = iter([(100.0, 0.0), (101.0, 0.0)])
    monkeypatch.setattr(contention, "_core_seconds", lambda cores: next(spent))
    watch = contention.CpuWatch()
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        before = time.process_time()
        while time.process_time() - before < 0.7:
            pass
        time.sleep(1.0)
        found = watch.read()
    finally:
        child.kill()
        child.wait()
    # 1 s was busy, and this process and its child have used as much and more
    assert found["contention"]["other_cpu_share"] == 0.0
    assert found["contended"] is False


def test_time_of_the_hosts_other_machines_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    spent = iter([(0.0, 0.0), (1.0, 0.5)])
    monkeypatch.setattr(contention, "_core_seconds", lambda _: next(spent))
    used = iter([0.0, 1.0])
    monkeypatch.setattr(contention, "_own_seconds", lambda: next(used))
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(contention.time, "monotonic", lambda: next(clock))
    found = contention.CpuWatch().read()
    assert found["contention"]["other_cpu_share"] == found["contention"]["stolen_share"] == pytest.approx(0.25 / cores)


def test_a_system_that_does_not_count_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "_core_seconds", lambda _: (0.0, 0.0))
    found = contention.CpuWatch().read()
    assert "contended" not in found and found["contention"]["other_cpu_share"] is None


@pytest.mark.parametrize(
    ("looks", "others"),
    [
        ([None, None], None),
        ([[], []], 0),
        ([[os.getpid()], [os.getpid()]], 0),
        ([[os.getpid(), 7], [os.getpid()]], 1),
        ([[], [7]], 0),  # a container's own process under the host's number
        ([[7], [7, 8]], 1),
    ],
)
def test_processes_on_a_gpu(monkeypatch: pytest.MonkeyPatch, looks: list[list[int] | None], others: int | None) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    seen = iter(looks)
    monkeypatch.setattr(nvml, "processes", lambda uuid: next(seen))
    found = contention.CudaWatch(torch.device("cuda")).read()
    assert found["contention"]["other_processes"] == others
    assert found.get("contended") is (None if others is None else others > 0)
    assert "sm_clock_mhz" in found["contention"] and "other_cpu_share" in found["contention"]


def test_a_report_says_whether_the_device_was_shared(tmp_path: Path) -> None:
    """A whole run of a small module: what the report on disk says agrees with itself."""
    import torch

    from optforge import api
    from optforge.report import store

    overrides = ["measure.max_s=0.1", "quality.enabled=false"]
    api.optimize(torch.nn.Linear(8, 8), "baseline", example=torch.zeros(2, 8), hardware="cpu", overrides=overrides, folder=tmp_path)
    environment = store.read(tmp_path).environment
    share = environment["contention"]["other_cpu_share"]
    assert 0.0 <= share <= 1.0
    assert environment["contended"] is (share > contention.SHARED)
    assert environment["contention"]["seconds"] > 0.1
