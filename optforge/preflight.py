"""What must hold of the machine before a run starts: a folder that can be written, space in it, a compiler cache.

A run that finds out after hours that it cannot save has lost the hours, so these are asked first. Each failure is one
line with the path, the reason and what to type.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from optforge import atomic
from optforge.errors import OutputError, Problem

RUN_OVERRIDE, SWEEP_OVERRIDE = "hydra.run.dir", "hydra.sweep.dir"


def run_folder(root: Path, recipe: str, hardware: str, now: datetime | None = None) -> Path:
    """Makes and returns `root/<recipe>/<hardware>/<date>_<time>[-n]`, which no other run has.

    Raises:
        OutputError: it cannot be made or written.
    """
    return _exclusive(root / slug(recipe) / slug(hardware), _stamp(now), "output_dir=<folder>")


def sweep_folder(root: Path, now: datetime | None = None) -> Path:
    """Makes and returns `root/sweeps/<date>_<time>[-n]`; see `run_folder`."""
    return _exclusive(root / "sweeps", _stamp(now), "output_dir=<folder>")


def tune_folder(root: Path, now: datetime | None = None) -> Path:
    """Makes and returns `root/tunes/<date>_<time>[-n]`; see `run_folder`."""
    return _exclusive(root / "tunes", _stamp(now), "output_dir=<folder>")


def comparison_folder(root: Path, now: datetime | None = None) -> Path:
    """Makes and returns `root/comparisons/<date>_<time>[-n]`; see `run_folder`."""
    return _exclusive(root / "comparisons", _stamp(now), "--html FILE")


def gate_folder(root: Path, now: datetime | None = None) -> Path:
    """Makes and returns `root/gates/<date>_<time>[-n]`; see `run_folder`."""
    return _exclusive(root / "gates", _stamp(now), "run it in a folder that can be written")


def claim(folder: Path, override: str = RUN_OVERRIDE) -> Path:
    """Makes the folder that the user named, if it is not there, and proves that it can be written.

    Raises:
        OutputError: with the path, the reason and the override to use.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _touch(folder)
    except OSError as error:
        raise _refused(folder, error, f"{override}=<folder>") from error
    return folder


def write_text(path: Path, text: str) -> None:
    """Writes a file that the user named, and the folders above it.

    Raises:
        OutputError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(Problem(where=str(path), what=f"cannot be written ({error.strerror})", fix="give another file")) from error
    atomic.write_bytes(path, text.encode("utf-8", "replace"))


def slug(name: str, limit: int = 80) -> str:
    """A name that is safe as one folder: letters, digits, `.`, `_`, `-`."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.")[:limit] or "unnamed"


def space(path: Path, needed_bytes: int) -> int:
    """Free bytes on the volume that `path` will be written to (its nearest folder that exists).

    Raises:
        OutputError: fewer than `needed_bytes` are free; says the path, what is needed and what is free.
    """
    free = shutil.disk_usage(_existing(path)).free
    if free < needed_bytes:
        raise OutputError(
            Problem(
                where=str(path),
                what=f"needs {_size(needed_bytes)}, but only {_size(free)} are free on its volume",
                fix="free some space, give output_dir=<folder on another volume>, or save=false",
            )
        )
    return free


@contextmanager
def compiler_cache(folder: Path) -> Iterator[list[str]]:
    """Holds writable compiler caches while it is open, and yields one sentence for each that had to be moved.

    Triton and Inductor write to `TRITON_CACHE_DIR` and `TORCHINDUCTOR_CACHE_DIR`, else under the home and the
    temporary folder. Where such a place cannot be written, a private one under `folder` takes it over.

    Raises:
        OutputError: neither can be written; names the variable to set.
    """
    moved: dict[str, Path] = {}
    notes: list[str] = []
    for variable, place in _caches().items():
        reason = "there is no temporary folder" if place is None else _unwritable(place)
        if reason is None:
            continue
        moved[variable] = _private(folder / ".cache" / variable.split("_")[0].lower(), variable, reason)
        notes.append(f"compiler cache {place or variable} cannot be used ({reason}); this run uses {moved[variable]}")
    saved = {variable: os.environ.get(variable) for variable in moved}
    os.environ.update({variable: str(place) for variable, place in moved.items()})
    try:
        yield notes
    finally:
        for variable, value in saved.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


def _caches() -> dict[str, Path | None]:
    """The variable and the folder of each compiler's cache, as the compilers themselves choose it; None if they cannot."""
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.environ.get("TRITON_HOME", os.path.expanduser("~/")), ".triton", "cache")
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor is None:
        try:
            inductor = os.path.join(tempfile.gettempdir(), f"torchinductor_{_user()}")
        except FileNotFoundError:
            return {"TRITON_CACHE_DIR": Path(triton), "TORCHINDUCTOR_CACHE_DIR": None}
    return {"TRITON_CACHE_DIR": Path(triton), "TORCHINDUCTOR_CACHE_DIR": Path(inductor)}


def _user() -> str:
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid_{os.getuid()}"


def _private(place: Path, variable: str, reason: str) -> Path:
    try:
        place.mkdir(parents=True, exist_ok=True)
        _touch(place)
    except OSError as error:
        what = f"the compiler's cache cannot be written ({reason}), nor can {place} ({_reason(error)})"
        raise OutputError(Problem(where=variable, what=what, fix=f"export {variable}=<writable folder>")) from error
    return place.resolve()


def _unwritable(place: Path) -> str | None:
    """Why a folder cannot be written or made, or None. One that is not there is judged by the nearest that is."""
    try:
        _touch(_existing(place))
    except OSError as error:
        return _reason(error)
    return None


def _exclusive(parent: Path, name: str, fix: str) -> Path:
    """Makes a folder that was not there: `name`, or with the first free `-2`, `-3`, ...; mkdir itself is the lock."""
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            _touch(folder)
            return folder
        except FileExistsError as error:
            if not parent.is_dir():
                raise _refused(folder, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)), fix) from error
            number += 1
        except OSError as error:
            raise _refused(folder, error, fix) from error


def _touch(folder: Path) -> None:
    """Writes and removes a file, since permission bits do not tell the truth to root, on /proc and on network drives."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".optforge-")
    os.close(descriptor)
    os.unlink(name)


def _refused(folder: Path, error: OSError, fix: str) -> OutputError:
    what = f"the output folder cannot be written: {_reason(error)}"
    return OutputError(Problem(where=str(folder.absolute()), what=what, fix=f"give {fix}"))


def _reason(error: OSError) -> str:
    """The system's word for it; a file in the place of a folder is told as that."""
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        return f"{error.filename or 'part of the path'} is a file, or below one"
    return error.strerror or str(error)


def _existing(path: Path) -> Path:
    """`path`, or what exists nearest above it."""
    path = path.absolute()
    while not os.path.exists(path):
        path = path.parent
    return path


def _stamp(now: datetime | None) -> str:
    return (now or datetime.now()).strftime("%Y-%m-%d_%H-%M-%S")


def _size(count: float) -> str:
    """Bytes in words: `1.4 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
