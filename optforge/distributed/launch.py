"""Starts the processes of one machine through torch's elastic agent, which is what torchrun runs, and ends them together.

Each rank has a folder with its logs. The agent watches the processes, stops the others when one fails, and starts all of
them again up to `max_restarts` times; a function that is started again finds its checkpoints and goes on.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from optforge.distributed import failures
from optforge.distributed.relay import Relay
from optforge.distributed.world import TIMEOUT_S, TORCHRUN
from optforge.errors import Terminated
from optforge.progress import Progress

CALL = "call.pickle"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those whose handlers the agent replaces."""
GRACE_S = 5
"""Seconds that the other ranks get to end after one failed, before they are killed."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What each worker is told: a function by its address, its arguments, and how it joins the others."""

    path: list[str]
    address: str
    packed: bytes
    device: str
    timeout_s: float


def launch(
    address: str,
    *args: Any,
    count: int,
    folder: Path,
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Calls `package.module:function(*args)` in `count` processes that have joined one process group.

    Args:
        folder: where the ranks' folders go (`<attempt>/<rank>/stdout.log, stderr.log`), made here.
        device: type of the device that each rank has for itself, `cpu` or `cuda`.
        timeout_s: how long a rank waits for the others in a collective before all are ended.
        max_restarts: how often all are started again after one failed.
        env: added to the environment of each.
        progress: is told what rank 0 tells (`relay.teller`).

    Raises:
        OptForgeError: the first failing rank's message; a user's error keeps its class.
        KeyboardInterrupt, Terminated: this process was told to end; the ranks have ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder.mkdir(parents=True, exist_ok=True)
    call = Call(path=list(sys.path), address=address, packed=pickle.dumps(args), device=device, timeout_s=timeout_s)
    (folder / CALL).write_bytes(pickle.dumps(call))
    logs = _logs(folder)
    known = {field.name for field in fields(LaunchConfig)}
    newer: dict[str, Any] = {"shutdown_timeout": GRACE_S} if "shutdown_timeout" in known else {}  # than torch 2.11
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        logs_specs=logs,
        **newer,
    )
    with _environment(count, env or {}), _handlers(), Relay(folder, progress):
        try:
            elastic_launch(config, sys.executable)("-m", "optforge.distributed.worker", str(folder))
        except ChildFailedError as error:
            exits = {failure.local_rank: failure.exitcode for failure in error.failures.values()}
            raise failures.raised(failures.collect(logs.last, exits), count, timeout_s) from None
        except SignalException as error:
            raise KeyboardInterrupt if error.sigval == signal.SIGINT else Terminated(128 + error.sigval) from None
        finally:
            (folder / CALL).unlink(missing_ok=True)


def _logs(folder: Path) -> Any:
    """Where the agent puts each rank's output: `<folder>/<attempt>/<rank>/`."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class Logs(LogsSpecs):
        last: dict[int, Path]
        """Of the latest attempt, each rank's folder."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            self.last = {}
            found = LogsDest()
            for rank, env in envs.items():
                own = folder / env.get("TORCHELASTIC_RESTART_COUNT", "0") / str(rank)
                own.mkdir(parents=True, exist_ok=True)
                self.last[rank] = own
                env["OPTFORGE_RANK_FOLDER"] = str(own)
                found.stdouts[rank], found.stderrs[rank] = str(own / "stdout.log"), str(own / "stderr.log")
                found.tee_stdouts[rank] = found.tee_stderrs[rank] = ""
                found.error_files[rank] = str(own / "error.json")
            return found

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    return Logs()


@contextmanager
def _environment(count: int, more: Mapping[str, str]) -> Iterator[None]:
    """The environment that the workers inherit: this very copy of the package, a share of the cores, nothing of another job."""
    package = str(Path(__file__).resolve().parent.parent.parent)
    threads = max(1, len(os.sched_getaffinity(0)) // count if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) // count)
    wanted = {
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", ""),
        **more,
    }
    saved = {name: os.environ.get(name) for name in (*wanted, *TORCHRUN, "LOCAL_RANK", "GROUP_RANK")}
    os.environ.update(wanted)
    for name in (*TORCHRUN, "LOCAL_RANK", "GROUP_RANK"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _handlers() -> Iterator[None]:
    """The handlers of signals as they were, once the agent, which sets its own, has ended. What it logs of failures we tell."""
    agent = logging.getLogger("torch.distributed.elastic")
    level = agent.level
    agent.setLevel(logging.CRITICAL)
    try:
        with _signals():
            yield
    finally:
        agent.setLevel(level)


@contextmanager
def _signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    saved = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
