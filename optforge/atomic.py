"""Writes files so that a kill leaves either the old content or the new one, and says how much space was missing.

Reports are rewritten after every step and artifacts take minutes to write; a half-written file that looks whole is
worse than none. Everything goes to a temporary name in the same folder, is flushed to the disk, and is renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optforge.errors import OutputError, Problem

TEMPORARY = ".tmp-"
"""Part of every temporary name that is written here; what carries it is garbage once its writer is gone."""


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces the file at `path` by `content`, or leaves it as it was.

    Raises:
        OutputError: the folder cannot be written, or its volume is full; says path, bytes needed and bytes free.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise cannot_write(path, len(content), error) from error


def write_json(path: Path, values: object) -> None:
    """Replaces the file at `path` by `values` as strict JSON.

    Raises:
        OutputError: as `write_bytes`.
        ValueError: a number is not finite.
    """
    write_bytes(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode("ascii"))


@contextmanager
def folder(target: Path, needed: int, elsewhere: str = "output_dir=<another volume>") -> Iterator[Path]:
    """An empty folder beside `target` that takes its place, flushed, when the block ends without an error.

    Whoever looks at `target` sees the old content or all of the new one, also after a kill in the middle. A full folder cannot be
    renamed over, so the old one steps aside first; where a kill falls between the two renames, the next writer puts it back.

    Args:
        needed: bytes that must be free on the volume.
        elsewhere: what a user types to write to another volume.

    Raises:
        OutputError: the folder cannot be written or its volume is full, now or in the block; nothing partial is left.
    """
    temporary = target.with_name(f".{target.name}{TEMPORARY}{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target)
        remove_stale(target.parent, target.name)
        if free_bytes(target.parent) < needed:
            raise cannot_write(target, needed, OSError("no space left on the volume"), elsewhere)
        temporary.mkdir()
        yield temporary
        _finish(temporary)
        _replace(temporary, target)
    except OSError as error:
        raise cannot_write(target, needed, error, elsewhere) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def recover(target: Path) -> None:
    """Puts the old folder back where a kill between the two renames left it aside."""
    aside = previous(target)
    if aside.exists() and not target.exists():
        os.rename(aside, target)


def previous(target: Path) -> Path:
    """Where the old folder lies between the two renames that replace it."""
    return target.with_name(f".{target.name}.previous")


def _finish(folder: Path) -> None:
    """Flushes every file, and gives each the mode of any new file: some libraries write theirs for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _replace(temporary: Path, target: Path) -> None:
    aside = previous(target)
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(temporary, target)
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_stale(folder: Path, name: str) -> list[str]:
    """Removes what killed writers of `name` left in `folder`; returns the removed names. What another process still writes stays."""
    stale = sorted(path for path in folder.glob(f".{name}{TEMPORARY}*") if not _at_work(path.name.rpartition(TEMPORARY)[2]))
    for path in stale:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in stale]


def _at_work(writer: str) -> bool:
    """Whether the process of that number is another one that lives."""
    if not writer.isdecimal() or int(writer) == os.getpid():
        return False
    try:
        os.kill(int(writer), 0)  # signal 0 asks, and sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def free_bytes(path: Path) -> int:
    """Free bytes of the volume that holds `path`, or its nearest parent that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def cannot_write(path: Path, needed: int, error: Exception, elsewhere: str = "output_dir=<another volume>") -> OutputError:
    """The one line that a failed write becomes."""
    free = free_bytes(path)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    what = f"cannot be written ({reason}): needs {needed:,} bytes, {free:,} bytes are free on its volume"
    fix = "check the folder's permissions and limits" if free >= needed else f"free some space there, or give {elsewhere}"
    return OutputError(Problem(where=str(path), what=what, fix=fix))
