"""Compiles the Triton kernels for an accelerator that is not in the machine, and keeps what became of them.

A kernel that needs more shared memory than the device has, spills its registers or is refused by the compiler shows that
on a laptop, and not after a download. Compiling happens in processes of their own: LLVM ends the whole process on some
errors, which then is that kernel's result and not the end of the plan, and its memory goes when they go. Results are kept
in the user's cache by source, configuration, arch and Triton's version, so that a second plan compiles nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from optforge import atomic, isolate
from optforge.cache import cache_dir
from optforge.errors import ChildFailed, MissingDependency, OutputError, Problem
from optforge.kernels import compiler
from optforge.kernels.compiler import REFUSED, SAID, Compiled, compile_here
from optforge.kernels.launches import Configuration
from optforge.progress import Progress, SilentProgress

PROCESSES = 2
"""Compilers at work at the same time; each takes about 200 MB."""

LIMIT_S = 180
"""Seconds that one kernel may take; the slowest of this package takes 4."""

START_S = 60
"""Seconds that a compiler's process may take to start, on a busy machine."""

FORMAT = 1
"""Of the kept results; a new one makes the old ones unseen."""

CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""How a compiler ends by its own fault, and will again; other signals come from outside and are not kept."""


def triton_version() -> str | None:
    """The installed version; None where there is no Triton. Does not load it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def compile_for(configuration: Configuration, arch: str) -> Compiled:
    """One configuration for one arch (`sm_80`, `gfx942`), from the cache or in a process of its own.

    Raises:
        MissingDependency: there is no Triton.
        OutputError: the cache folder cannot be written.
    """
    return compile_all([(configuration, arch)])[0]


def compile_all(jobs: Sequence[tuple[Configuration, str]], progress: Progress | None = None) -> list[Compiled]:
    """Every job's result, in their order. `progress` advances by one as each is done, kept ones at once.

    Raises:
        MissingDependency: there is no Triton.
        OutputError: the cache folder cannot be written.
    """
    if triton_version() is None:
        raise MissingDependency(
            Problem(where="kernels", what="compiling them needs Triton", fix="pip install triton (it exists for Linux)")
        )
    progress = progress or SilentProgress()
    folder = _folder()
    sources = {module: _sources(module) for module in {configuration.module for configuration, _ in jobs}}
    paths = [folder / f"{_key(configuration, arch, sources[configuration.module])}.json" for configuration, arch in jobs]
    found = {path: result for path in paths if (result := _read(path)) is not None}
    missing = [(path, *job) for path, job in dict(zip(paths, jobs, strict=True)).items() if path not in found]
    progress.advance(len(jobs) - len(missing))
    if missing:
        found |= _compile_missing(missing, folder, progress)
    return [found[path] for path in paths]


Job = tuple[Path, Configuration, str]
"""Where the result goes, what is compiled, for which arch."""


def _compile_missing(jobs: Sequence[Job], folder: Path, progress: Progress) -> dict[Path, Compiled]:
    shares = [share for share in (jobs[start::PROCESSES] for start in range(PROCESSES)) if share]
    done: set[Path] = set()
    # in this order: the threads are waited for before their folder goes
    with _working_folder(folder) as name, ThreadPoolExecutor(PROCESSES) as pool:
        futures = [pool.submit(_finish, share, Path(name) / str(number)) for number, share in enumerate(shares)]
        try:
            while wait(futures, timeout=0.1).not_done:
                _advance(jobs, done, progress)
        except BaseException:  # an interrupt too: the compilers stop after the kernel they are at
            (Path(name) / "stop").touch()
            raise
    progress.advance(len(jobs) - len(done))
    return _merged(futures)


def _advance(jobs: Sequence[Job], done: set[Path], progress: Progress) -> None:
    new = {path for path, *_ in jobs if path not in done and path.exists()}
    done |= new
    if new:
        progress.advance(len(new))


def _merged(futures: Sequence[Future[dict[Path, Compiled]]]) -> dict[Path, Compiled]:
    return {path: result for future in futures for path, result in future.result().items()}


def _finish(jobs: Sequence[Job], work: Path) -> dict[Path, Compiled]:
    """Results of these jobs, which run one after another; a process that ends before its time costs the one it was at."""
    work.mkdir()
    left = list(jobs)
    results: dict[Path, Compiled] = {}
    while left:
        environment = {"TRITON_CACHE_DIR": str(work / "triton"), "TRITON_INTERPRET": "0", "TRITON_OVERRIDE_ARCH": ""}
        ended: ChildFailed | None = None
        try:
            isolate.call(_child, left, work, LIMIT_S, timeout_s=LIMIT_S * len(left) + START_S, env=environment)
        except ChildFailed as error:
            if error.kind == OutputError.__name__:
                raise OutputError(str(error).partition(f"{error.kind}: ")[2]) from error
            if error.kind is not None:  # an exception of ours, not a compiler's end
                raise
            ended = error
        read = {path: result for path, *_ in left if (result := _read(path)) is not None}
        results |= read
        left = [job for job in left if job[0] not in read]
        if ended is None:
            break
        if left:
            path, _, arch = left.pop(0)
            results[path] = _crashed(path, arch, ended, work)
    return results


def _crashed(path: Path, arch: str, ended: ChildFailed, work: Path) -> Compiled:
    """The result of the kernel that ended its compiler's process."""
    printed = compiler.said(work)
    if ended.signal == signal.SIGALRM:
        why = f"the compiler was still at work after {LIMIT_S} s"
    else:
        how = str(ended).partition(": ")[2]
        why = f"{compiler.complaint(printed) or 'the compiler gave no reason'} ({how})"
    result = Compiled(arch=arch, status=REFUSED, reason=why)
    if ended.signal in CRASHES:
        _write(path, result)
    return result


# What is kept.


def _folder() -> Path:
    folder = cache_dir() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from error
    return folder


def _working_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """For what Triton and its compilers leave; goes when they are done."""
    try:
        return tempfile.TemporaryDirectory(prefix=".work-", dir=folder)
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> OutputError:
    fix = "free space there, or set OPTFORGE_CACHE to another folder"
    return OutputError(Problem(where=str(folder), what=f"cannot be written ({error.strerror or error})", fix=fix))


def _key(configuration: Configuration, arch: str, sources: str) -> str:
    """A name that changes with everything that the result depends on."""
    facts = [FORMAT, triton_version(), arch, sources, asdict(replace(configuration, label=""))]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]


def _sources(module: str) -> str:
    """A hash over every file in the folder of a kernel's module, since kernels may call functions of one another."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    digest = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Compiled | None:
    """A kept result; None where there is none, or a damaged one, which is made again."""
    try:
        return Compiled(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _write(path: Path, result: Compiled) -> None:
    atomic.write_json(path, asdict(result))


def _child(jobs: Sequence[Job], work: Path, limit_s: int) -> None:
    """In a process of its own: compiles the jobs one after another and writes each result as it comes."""
    said = (work / SAID).open("wb")
    os.dup2(said.fileno(), 1)  # the compilers complain on the descriptors, not through Python
    os.dup2(said.fileno(), 2)
    for path, configuration, arch in jobs:
        if (work.parent / "stop").exists():
            return
        said.seek(0)
        said.truncate()
        signal.alarm(limit_s)  # without a handler: ends the process wherever the compiler is
        result = compile_here(configuration, arch, work)
        signal.alarm(0)
        _write(path, result)
