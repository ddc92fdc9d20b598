"""One version of a program in a process of its own, which is asked for one sample at a time.

The process may crash, hang, exit or be killed; the coordinator hears of it at once, with the end of the process's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optforge import processes
from optforge.errors import ChildFailed, ChildTimeout, ConfigError, OptForgeError, OutOfMemory, Problem
from optforge.gate.serve import PROTOCOL

LOG_LINES = 3
"""Lines of a process's log that an error carries."""
GRACE_S = 5.0
"""Between the end of a side's stdin, on which it leaves, and SIGKILL."""


class Side:
    """A running process that answers over a pipe; a context manager, which ends it and all that it started."""

    def __init__(self, name: str, command: Sequence[str], *, cwd: Path, log: Path) -> None:
        """Starts it.

        Args:
            name: what errors call it.
            command: a program that calls `serve`, and its arguments.
            cwd: the folder it works in.
            log: the file for all that it prints.
        """
        self.name, self.log = name, log
        self._process = processes.start(command, log, {}, cwd=cwd, talks=True)
        self._unread = bytearray()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        processes.end(self._process, GRACE_S)
        self._process.stdout.close()

    def ready(self, timeout_s: float) -> dict[str, Any]:
        """What the program says once it is warm.

        Raises:
            ChildFailed, ChildTimeout: it crashed or ended, or took longer.
            OutOfMemory: it ran out of memory.
            ConfigError: something of its run must be changed first.
        """
        told = self._answer(timeout_s)
        if "failed" in told:
            raise self._failed(told)
        if told.get("protocol") != PROTOCOL:
            raise ChildFailed(f"side {self.name}: its OptForge speaks protocol {told.get('protocol')}, this one {PROTOCOL}")
        found: dict[str, Any] = told["ready"]
        return found

    def sample(self, call: str, timeout_s: float) -> float:
        """Seconds of one call.

        Raises:
            ChildFailed, ChildTimeout: the process ended, or took longer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{call}\n".encode("ascii"))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return float(self._answer(timeout_s)["seconds"])

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """The next line as JSON."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            read = b""
            while b"\n" not in read:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ChildTimeout(f"side {self.name}: no answer after {timeout_s:g} s; log: {self.log}")
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise self._ended()
                self._unread += read
        line, _, rest = self._unread.partition(b"\n")
        self._unread = bytearray(rest)
        told: dict[str, Any] = json.loads(line)
        return told

    def _failed(self, told: Mapping[str, Any]) -> OptForgeError:
        """What the side said of its failure, as the same error here."""
        if told.get("kind") == "user":
            return ConfigError(*(Problem(**{**problem, "where": f"side {self.name}: {problem['where']}"}) for problem in told["problems"]))
        return (OutOfMemory if told.get("kind") == "oom" else ChildFailed)(f"side {self.name}: {told['failed']}; log: {self.log}")

    def _ended(self) -> ChildFailed:
        code = self._process.wait()
        lines = processes.tail(self.log, LOG_LINES)
        last = f" ({' | '.join(lines)})" if lines else ""
        how = f"the process {processes.ending(code)}{last}"
        return ChildFailed(f"side {self.name}: {how}; log: {self.log}", signal=-code if code < 0 else None)
