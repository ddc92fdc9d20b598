"""Runs one function in a fresh process and brings its result back, whatever becomes of that process.

Device probes, imports that rename parts of torch and jobs of a sweep may crash, hang or be killed; none of that may
reach the caller. The call and its result travel through files, so that a result of any size cannot block on a pipe,
and the caller waits for the process itself, never for a queue that a dead process will not fill.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optforge import processes
from optforge.errors import ChildFailed, ChildTimeout

CALL, RESULT, OUTPUT = "call.pickle", "result.pickle", "output.txt"
TAIL_CHARACTERS = 4000
"""How much of the child's own output an error carries."""


def call(function: Callable[..., Any] | str, *args: Any, timeout_s: float, env: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
    """Calls `function(*args, **kwargs)` in a fresh Python process and returns its result.

    `function` is a function at the top of an importable module, or its address as `package.module:name`. Arguments
    and result are pickled. `env` is added to the child's environment. Whatever the child prints is kept for the error
    and is otherwise dropped. The child and every process it started are killed when the time is up, and when the
    caller is interrupted.

    Raises:
        ChildFailed: the function raised, the process ended or a signal killed it; says which.
        ChildTimeout: the process ran longer than `timeout_s` seconds.
    """
    address = function if isinstance(function, str) else _address(function)
    with tempfile.TemporaryDirectory(prefix="optforge-child-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(pickle.dumps((sys.path, address, pickle.dumps((args, kwargs)))))
        code = _wait(folder, address, timeout_s, dict(env or {}))
        output = _tail(folder)
        if not (folder / RESULT).exists():
            hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else " and no result" if code >= 0 else ""
            raise ChildFailed(f"{address}: the process {processes.ending(code)}{hint}", signal=-code if code < 0 else None, output=output)
        done, value = pickle.loads((folder / RESULT).read_bytes())
    if done:
        return value
    kind, message, trace = value
    raise ChildFailed(f"{address}: {kind}: {message}", kind=kind, traceback=trace, output=output)


def _address(function: Callable[..., Any]) -> str:
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise ValueError(f"{module}:{name} cannot be found by a fresh process; give a function at the top of an importable module")
    return f"{module}:{name}"


def _wait(folder: Path, address: str, timeout_s: float, env: dict[str, str]) -> int:
    """Starts the child in a session of its own and returns its exit code, negative for a signal."""
    command = [sys.executable, "-c", "from optforge.isolate import _child; _child()", str(folder)]
    # the child must find this very copy of the package before it has read the caller's sys.path
    package_root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    process = processes.start(command, folder / OUTPUT, {"PYTHONPATH": path, **env})
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ChildTimeout(f"{address}: still running after {timeout_s:g} s, stopped", output=_tail(folder)) from None
    finally:
        processes.end(process)


def _tail(folder: Path) -> str:
    return (folder / OUTPUT).read_text(errors="replace")[-TAIL_CHARACTERS:]


def _child() -> None:
    """The child's side: reads the call, writes the result beside it, in one rename so that half a result is none."""
    folder = Path(sys.argv[1])
    sys.path[:], address, packed = pickle.loads((folder / CALL).read_bytes())
    try:
        args, kwargs = pickle.loads(packed)
        module, name = address.split(":", 1)
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        answer = pickle.dumps((True, function(*args, **kwargs)))
    except BaseException as error:  # everything, SystemExit too, is the caller's to judge; it is written, not hidden
        answer = pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc())))
    partial = folder / f"{RESULT}.part"
    partial.write_bytes(answer)
    partial.rename(folder / RESULT)
