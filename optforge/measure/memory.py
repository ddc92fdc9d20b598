"""Peak memory of the process, and giving memory back after an error.

A peak is only worth something when its counter was reset before the section and when resident weights are in it. Linux
keeps a high-water mark of a process's resident pages (`VmHWM`) that the process itself may reset; where it may not, a
thread samples the resident size instead, and the report says which of the two was used.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import psutil

SAMPLE_S = 0.002
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): resets the peak resident set size to the current one


class ProcessPeak:
    """Peak resident bytes of this process since the last `reset`.

    `method` is `VmHWM` (the kernel's own counter, exact) or `sampled` (a thread looks every 2 ms; a shorter peak is
    missed).
    """

    def __init__(self) -> None:
        self.method = "VmHWM" if _kernel_reset() else "sampled"
        self._sampler: _Sampler | None = None

    def reset(self) -> None:
        """Starts a new section; the peak begins at what is resident now."""
        if self.method == "VmHWM":
            _CLEAR.write_text(_RESET_PEAK)
            return
        self.stop()
        self._sampler = _Sampler()
        self._sampler.start()

    def peak_bytes(self) -> int | None:
        """Peak resident bytes since `reset`; None before the first one."""
        if self.method == "VmHWM":
            return _high_water_mark()
        return None if self._sampler is None else self._sampler.read()

    def stop(self) -> None:
        """Ends the sampling thread, if there is one, so that it takes no time from what is timed next."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None


class _Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="optforge-memory", daemon=True)
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._peak: int = self._process.memory_info().rss

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.read()

    def read(self) -> int:
        self._peak = max(self._peak, int(self._process.memory_info().rss))
        return self._peak

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _kernel_reset() -> bool:
    """Whether this process may reset its own high-water mark, tried once."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
        return _high_water_mark() is not None
    except OSError:
        return False


def _high_water_mark() -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def released(error: BaseException) -> str:
    """Lets go of every frame that an error and its causes keep alive, and returns the error as one line.

    A stored exception keeps its traceback, the traceback its frames, and the frames the tensors of the call that ran
    out of memory; what runs next then fails as well. Frames that still run are left alone.
    """
    line = traceback.format_exception_only(error)[-1].strip()
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
    gc.collect()
    return line


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, contexts and (for a group) members, each once."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting.extend(other for other in (one.__cause__, one.__context__) if other is not None)
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
