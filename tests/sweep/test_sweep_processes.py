"""A job's process: every way in which it can end is seen, and it never outlives its sweep. Devices are shared out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optforge.errors import ConfigError
from optforge.sweep import devices
from optforge.sweep.devices import Visible
from optforge.sweep.process import JobProcess

JOB = """\
import subprocess, sys, time
from optforge.sweep.process import end_with_sweep
end_with_sweep()
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(grandchild.pid, flush=True)
time.sleep(60)
"""
SWEEP = """\
import sys, time
from pathlib import Path
from optforge.sweep.process import JobProcess
job = JobProcess([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), {})
print(job._process.pid, flush=True)
time.sleep(60)
"""


def _started(code: str, tmp_path: Path, **variables: str) -> JobProcess:
    return JobProcess([sys.executable, "-c", code], tmp_path / "job.log", variables)


def _code(process: JobProcess, seconds: float = 30.0) -> int:
    deadline = time.monotonic() + seconds
    while (code := process.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return code


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _alive(pid)


def _printed(path: Path, seconds: float = 30.0) -> int:
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text(encoding="utf-8").endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text(encoding="utf-8"))


@pytest.mark.case("B107")
@pytest.mark.parametrize(
    ("code", "ending"),
    [("pass", 0), ("import sys; sys.exit(3)", 3), ("import os; os._exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_b107_the_end_of_a_job_is_seen_at_once(tmp_path: Path, code: str, ending: int) -> None:
    process = _started(code, tmp_path)
    assert _code(process) == ending
    assert not process.was_killed_for_memory()


@pytest.mark.case("B107")
def test_b107_fifty_megabytes_of_output_do_not_block(tmp_path: Path) -> None:
    assert _code(_started("import sys; sys.stdout.write('x' * 50_000_000)", tmp_path)) == 0
    assert (tmp_path / "job.log").stat().st_size == 50_000_000


def test_a_job_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process = _started(code, tmp_path)
    _printed(tmp_path / "job.log")
    assert process.stop(grace_s=0.2) == -signal.SIGKILL


def test_what_a_job_started_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    process = _started(code, tmp_path)
    assert _code(process) == 0
    assert _gone(_printed(tmp_path / "job.log"))


def test_no_job_outlives_a_sweep_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    sweep = subprocess.Popen([sys.executable, "-c", SWEEP, JOB, str(log)], stdout=subprocess.PIPE, text=True)
    assert sweep.stdout is not None
    job = int(sweep.stdout.readline())
    grandchild = _printed(log)
    assert _alive(job) and _alive(grandchild)
    sweep.kill()
    sweep.wait()
    assert _gone(job) and _gone(grandchild)


def test_a_job_sees_the_variables_of_its_place(tmp_path: Path) -> None:
    assert _code(_started("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])", tmp_path, CUDA_VISIBLE_DEVICES="5")) == 0
    assert _printed(tmp_path / "job.log") == 5


@pytest.mark.parametrize(
    ("index", "environ", "hip", "expected"),
    [
        (1, {}, False, {"CUDA_VISIBLE_DEVICES": "1"}),
        (1, {"CUDA_VISIBLE_DEVICES": "4, 6"}, False, {"CUDA_VISIBLE_DEVICES": "6"}),
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-a1,GPU-b2"}, False, {"CUDA_VISIBLE_DEVICES": "GPU-a1"}),
        (1, {"HIP_VISIBLE_DEVICES": "2,3"}, True, {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}),
        (1, {"CUDA_VISIBLE_DEVICES": "2,3"}, True, {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}),
        (1, {"HIP_VISIBLE_DEVICES": "2,3"}, False, {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_a_device_is_counted_among_those_that_were_left(index: int, environ: dict[str, str], hip: bool, expected: dict[str, str]) -> None:
    assert devices.pinned(index, environ, hip=hip) == expected


def test_without_devices_one_job_runs_at_a_time_and_sees_all() -> None:
    (slot,) = devices.slots(None)
    assert (slot.name, dict(slot.variables)) == (None, {})


def test_devices_are_shared_out_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (devices.CUDA, devices.HIP):
        monkeypatch.delenv(name, raising=False)
    assert [slot.name for slot in devices.slots("all", seen=Visible(count=3))] == ["0", "1", "2"]
    assert [slot.variables["CUDA_VISIBLE_DEVICES"] for slot in devices.slots(("2", "0"), seen=Visible(count=3))] == ["2", "0"]


@pytest.mark.parametrize(
    ("wanted", "count", "said"),
    [
        (("0",), 0, "there is no GPU here"),
        (("0", "9", "x"), 2, "there is no device '9'"),
        (("0", "0"), 2, "name each device once"),
        ((), 2, "name each device once"),
    ],
)
def test_devices_that_are_not_there_are_refused(wanted: tuple[str, ...], count: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        devices.slots(wanted, seen=Visible(count=count))


def test_the_probe_counts_what_a_process_would_see() -> None:
    """In a process that is shown no device there is none, on any machine."""
    code = "from optforge.sweep.devices import visible; print(visible().count)"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "0"
