"""The isolated call: every way in which a process can end is told to the caller, in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from optforge import isolate
from optforge.errors import ChildFailed, ChildTimeout


def _add(a: int, b: int = 1) -> int:
    return a + b


def _environment(name: str) -> str | None:
    return os.environ.get(name)


def _raise() -> None:
    raise RuntimeError("the probe says no")


def _leave() -> None:
    os._exit(7)


def _exit() -> None:
    sys.exit("enough")


def _kill_self(number: int) -> None:
    print("last words", flush=True)
    os.kill(os.getpid(), number)


def _large(count: int) -> bytes:
    return b"\x5a" * count


def _unpicklable() -> object:
    return lambda: None


def _sleep_with_a_child(path: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(process.pid))
    time.sleep(60)


def test_result_comes_back_from_another_process() -> None:
    assert isolate.call(_add, 2, b=40, timeout_s=60) == 42
    assert isolate.call("os:getpid", timeout_s=60) != os.getpid()


def test_environment_is_the_childs_own() -> None:
    assert isolate.call(_environment, "OPTFORGE_TEST", timeout_s=60, env={"OPTFORGE_TEST": "x"}) == "x"
    assert "OPTFORGE_TEST" not in os.environ


@pytest.mark.case("B107")
def test_b107_child_raises() -> None:
    with pytest.raises(ChildFailed, match="RuntimeError: the probe says no") as caught:
        isolate.call(_raise, timeout_s=60)
    assert caught.value.kind == "RuntimeError"
    assert "in _raise" in caught.value.traceback


@pytest.mark.case("B107")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_b107_child_is_killed_by_a_signal(number: signal.Signals) -> None:
    with pytest.raises(ChildFailed, match=rf"{number.name} \({int(number)}\)") as caught:
        isolate.call(_kill_self, int(number), timeout_s=60)
    assert caught.value.signal == number
    assert "last words" in caught.value.output


@pytest.mark.case("B107")
def test_b107_child_returns_50_mb() -> None:
    result = isolate.call(_large, 50_000_000, timeout_s=60)
    assert len(result) == 50_000_000
    assert result.count(b"\x5a") == 50_000_000


@pytest.mark.case("B107")
def test_b107_child_ends_without_a_result() -> None:
    with pytest.raises(ChildFailed, match="exit code 7 and no result"):
        isolate.call(_leave, timeout_s=60)
    with pytest.raises(ChildFailed, match="SystemExit: enough"):
        isolate.call(_exit, timeout_s=60)


def test_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(ChildFailed, match="_unpicklable"):
        isolate.call(_unpicklable, timeout_s=60)


def test_timeout_stops_the_child_and_what_it_started(tmp_path: object) -> None:
    path = f"{tmp_path}/pid"
    start = time.monotonic()
    with pytest.raises(ChildTimeout, match="still running after 3 s"):
        isolate.call(_sleep_with_a_child, path, timeout_s=3)
    assert time.monotonic() - start < 30
    with open(path, encoding="utf-8") as file:
        grandchild = int(file.read())
    assert not _runs(grandchild)


def test_a_function_that_no_fresh_process_can_find_is_refused() -> None:
    with pytest.raises(ValueError, match="importable module"):
        isolate.call(lambda: 1, timeout_s=1)


def _runs(pid: int) -> bool:
    """Whether a process still runs; one that is dead but not yet collected by its parent does not."""
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return False
        except FileNotFoundError:
            return False
        time.sleep(0.1)
    return True
