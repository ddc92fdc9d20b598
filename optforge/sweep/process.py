"""One job's process: a fresh interpreter in a session of its own, that ends when its sweep does.

Jobs leak state, exit, hang and get killed; none of that may reach another job or the sweep. A pipe whose other end only
the sweep holds tells the job when the sweep is gone, so that no orphan keeps a device after a SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from optforge import processes

LIFELINE = "OPTFORGE_SWEEP_LIFELINE"
"""The variable that tells a job the number of its end of the pipe."""
GRACE_S = 10.0
"""Between SIGTERM, on which a job writes its report and leaves, and SIGKILL."""
POLL_S = 0.05


class JobProcess:
    """A running command, its output in `log`; every process that it starts ends with it."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        """Starts it.

        Args:
            command: a program that calls `end_with_sweep`, and its arguments.
            log: the file that stdout and stderr are written to.
            variables: added to the environment.
        """
        self.started = time.monotonic()
        self._asked = False
        self._oom_kills = _oom_kills()
        reader, self._lifeline = os.pipe()
        try:
            self._process = processes.start(command, log, {**variables, LIFELINE: str(reader)}, pass_fds=(reader,))
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(reader)

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self.started

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs. What it started has ended when a code is returned."""
        code = self._process.poll()
        if code is not None:
            self._reap()
        return code

    def wait(self, limit_s: float) -> int | None:
        """The exit code; None where it still runs `limit_s` seconds after its start."""
        while (code := self.poll()) is None and self.seconds < limit_s:
            time.sleep(POLL_S)
        return code

    def ask_to_stop(self) -> None:
        """SIGTERM, once: a second one would interrupt the writing of the report."""
        if not self._asked:
            self._asked = True
            self._process.terminate()

    def stop(self, grace_s: float = GRACE_S) -> int:
        """Ends it: SIGTERM, then SIGKILL for whoever has not left after `grace_s` seconds."""
        self.ask_to_stop()
        return self._reap(grace_s)

    def was_killed_for_memory(self) -> bool:
        """Whether the system killed a process for memory since this one started, which ended by SIGKILL itself."""
        return self._process.returncode == -signal.SIGKILL and _oom_kills() > self._oom_kills

    def _reap(self, grace_s: float = 0.0) -> int:
        code = processes.end(self._process, grace_s)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return code


def end_with_sweep() -> None:
    """The job's side: kills this process and all that it started once the sweep that started it is gone.

    Called once, at the start of a process that leads its own group.
    """
    lifeline = int(os.environ.pop(LIFELINE))
    os.set_inheritable(lifeline, False)

    def watch() -> None:
        os.read(lifeline, 1)  # nothing is ever written: this returns when the sweep has closed its end, or is gone
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, name="sweep-lifeline", daemon=True).start()


def job_command(words: Sequence[str]) -> list[str]:
    """The command of a job: `optforge <words>` in a fresh interpreter that imports from where this one does."""
    safe = [] if sys.path[0] in ("", os.getcwd()) else ["-P"]  # -m puts the current folder first on the path, a script does not
    return [sys.executable, *safe, "-m", "optforge.cli.child", *words]


def _oom_kills() -> int:
    """Processes that the kernel has killed for memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
