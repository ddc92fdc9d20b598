"""Processes of our own: each leads a session, so that all that it starts ends with it; how it ended is told in words.

What runs in them may crash, hang, print a gigabyte or be killed; every place that starts one needs the same care.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_TAIL_BYTES = 16384


def start(
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str],
    *,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    talks: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts `command` in a session of its own.

    Args:
        log: the file that it prints to.
        variables: added to the environment.
        talks: its stdin and stdout are pipes to this process, and only stderr goes to `log`; else it has no stdin.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else output,
            stderr=output,
            cwd=cwd,
            env={**os.environ, **variables},
            pass_fds=pass_fds,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> int:
    """Kills what `start` started and every process of its session, after `grace_s` seconds to leave; returns its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace_s)
    with contextlib.suppress(ProcessLookupError):  # also after a normal end: what it started must not outlive it
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def ending(code: int) -> str:
    """`was killed by SIGKILL (9)` or `ended with exit code 1`, from an exit code that is negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        name = "a signal"
    return f"was killed by {name} ({-code})"


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log, without the empty ones."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
