"""What became of each rank, and which of several failures was the first one.

When a rank ends, the others fail too: their connections close, or they wait until they are stopped. Those are
consequences, and the user must see the cause.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from optforge import atomic, errors, processes
from optforge.errors import ChildFailed, OptForgeError, Problem, UserError, message

FAILURE = "failure.json"
CONSEQUENCES = ("closed by peer", "connection reset", "connection refused", "broken pipe", "socket closed", "heartbeat", "recv failed")
"""What the libraries say, in lower case, to a rank whose partner is gone."""
OUT_OF_MEMORY = ("OutOfMemory", "OutOfMemoryError", "MemoryError")
"""Classes of ours, of PyTorch and of Python."""
WAITED = ("timed out", "timeout", "wait timeout")
"""What they say to one that waited in vain."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank ended."""

    rank: int
    kind: str
    """Class of the exception; empty for a rank that was killed or ended without a word."""
    message: str
    time: float
    """Seconds since the epoch."""
    trace: str = ""
    problems: list[dict[str, str]] = field(default_factory=list)
    log: str = ""
    exit: int = 0
    """Of a rank that left no word: its exit code, negative for a signal."""

    @property
    def consequence(self) -> bool:
        """Whether another rank's end explains this one."""
        text = self.message.lower()
        return not self.problems and any(words in text for words in CONSEQUENCES)

    @property
    def waited(self) -> bool:
        text = self.message.lower()
        return not self.problems and any(words in text for words in WAITED)


def write(folder: Path, rank: int, error: BaseException) -> None:
    """Leaves word of an exception in the rank's folder."""
    problems = [asdict(problem) for problem in error.problems] if isinstance(error, UserError) else []
    told = message(error) or type(error).__name__
    failure = Failure(rank=rank, kind=type(error).__name__, message=told, time=time.time(), trace=traceback.format_exc(), problems=problems)
    atomic.write_bytes(folder / FAILURE, json.dumps(asdict(failure)).encode())


def collect(folders: Mapping[int, Path], exits: Mapping[int, int]) -> list[Failure]:
    """The failures of all ranks, the cause first.

    Args:
        folders: where each rank left its word and its logs.
        exits: exit codes of the ranks that ended in failure, negative for a signal.
    """
    found = []
    for rank, folder in folders.items():
        log = str(folder / "stderr.log")
        if (folder / FAILURE).exists():
            values = json.loads((folder / FAILURE).read_text(encoding="utf-8"))
            found.append(Failure(**{**values, "log": log}))
        elif rank in exits:
            told = f"the process {processes.ending(exits[rank])}"
            found.append(Failure(rank=rank, kind="", message=told, time=time.time(), log=log, exit=exits[rank]))
    return ordered(found)


def ordered(found: Sequence[Failure]) -> list[Failure]:
    """The cause first, its consequences after it, by time."""
    return sorted(found, key=lambda failure: (_distance(failure, found), failure.time))


def _distance(failure: Failure, found: Sequence[Failure]) -> int:
    """How far from the cause. A rank that waited in vain had partners that lived: whoever was killed then, was killed by the agent."""
    if failure.exit == -signal.SIGTERM or (failure.exit == -signal.SIGKILL and any(other.waited for other in found)):
        return 3
    return 2 if failure.consequence else int(failure.waited)


def raised(found: Sequence[Failure], size: int, timeout_s: float) -> OptForgeError:
    """The exception that a user sees for the failures of `size` ranks: the first one's, of its own class where that is ours."""
    if not found:
        return ChildFailed("the processes ended without a result")
    first = found[0]
    cls = getattr(errors, first.kind, None)
    if first.problems and isinstance(cls, type) and issubclass(cls, UserError):
        return cls(*(Problem(**problem) for problem in first.problems))
    told = f"rank {first.rank} of {size}: {first.kind + ': ' if first.kind else ''}{_lines(first.message)}"
    if first.waited:
        others = ", ".join(str(rank) for rank in range(size) if rank not in {failure.rank for failure in found if failure.waited})
        told = (
            f"rank {first.rank} of {size} waited {timeout_s:g} s (launch.timeout_s) for the others"
            f"{f', and rank {others} never came' if others else ''}: {_lines(first.message)}"
        )
    told += f" (log: {first.log})"
    if first.kind in OUT_OF_MEMORY:
        return errors.OutOfMemory(told)
    return ChildFailed(told, kind=first.kind or None, traceback=first.trace)


def _lines(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
