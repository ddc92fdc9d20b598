"""Writes files so that a kill leaves either the old content or the new one, and says how much space was missing.

Reports are rewritten after every step and artifacts take minutes to write; a half-written file that looks whole is
worse than none. Everything goes to a temporary name in the same folder, is flushed to the disk, and is renamed.
"""

from __future__ import annotations

import json
import os
import shutil
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


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_stale(folder: Path, name: str) -> list[str]:
    """Removes what killed writers of `name` left in `folder`; returns the removed names. A folder has one writer."""
    stale = sorted(folder.glob(f".{name}{TEMPORARY}*"))
    for path in stale:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in stale]


def free_bytes(path: Path) -> int:
    """Free bytes of the volume that holds `path`, or its nearest parent that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def cannot_write(path: Path, needed: int, error: Exception) -> OutputError:
    """The one line that a failed write becomes."""
    free = free_bytes(path)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    what = f"cannot be written ({reason}): needs {needed:,} bytes, {free:,} bytes are free on its volume"
    fix = "check the folder's permissions and limits" if free >= needed else "free some space there, or give output_dir=<another volume>"
    return OutputError(Problem(where=str(path), what=what, fix=fix))
