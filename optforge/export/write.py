"""Writes one export whole or not at all: refusals, then files, then the reload check, then its place under its name."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from optforge import __version__, artifact, atomic
from optforge.cache import sha256_of
from optforge.errors import ModelError, OutputError, Problem
from optforge.export import check
from optforge.export.base import Format, Subject, Written
from optforge.export.formats import FORMATS, require
from optforge.export.portable import portable
from optforge.progress import Progress, SilentProgress
from optforge.spec import Json

RECORD = "export.json"
FORMAT_VERSION = 1


def export(subject: Subject, name: str, target: Path, progress: Progress | None = None) -> dict[str, Json]:
    """Exports `subject` as the format `name` into the folder `target`, replacing an older export there whole or not at all.

    Returns what the report keeps, which is export.json: path, format, bytes, files, figures of the reload check, notes.

    Raises:
        ConfigError, MissingDependency: see `require`.
        ModelError: the format cannot hold something of the model; names all. Nothing was written.
        OutputError: `target` is no place for an export, cannot be written, or its volume is full; nothing partial is left.
        ExportError: the artifact does not load in its engine or computes something else. It was removed.
    """
    progress = progress or SilentProgress()
    require([name])
    fmt = FORMATS[name]
    subject, said = portable(subject)
    problems = list(_refusals(fmt, subject))
    if problems:
        raise ModelError(*problems)
    require_place(target, subject.sources)
    needed, start = artifact.room(fmt.nbytes(subject)), time.perf_counter()
    with atomic.folder(target, needed, "--out <folder on another volume>") as folder:
        with progress.stage(f"export {name}"):
            written = fmt.write(subject, folder)
        with progress.stage(f"reload check of {name} ({written.engine}, fresh process)"):
            checked = check.reloaded(folder, written, subject)
        written = replace(written, notes=(*said, *written.notes))
        record = _record(fmt, subject, written, folder) | {"check": checked, "seconds": time.perf_counter() - start}
        (folder / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return {"path": str(target.absolute()), **record}


def require_place(target: Path, sources: tuple[Path, ...] = ()) -> None:
    """Refuses a target that an export would destroy something at.

    Raises:
        OutputError: it is a file or a device, holds files that no export wrote, or is, holds or lies in what the export reads.
    """
    real = target.resolve()
    for source in (path.resolve() for path in sources):
        if real == source or real in source.parents or source in real.parents:
            raise _refused(target, f"would write over {source}, which the export reads", "give another folder")
    if not real.exists():
        return
    if not real.is_dir():
        raise _refused(target, f"is {_kind(real)}, and an export is a folder", "give the name of a folder")
    if any(real.iterdir()) and not (real / RECORD).is_file():
        raise _refused(target, "holds files that no export wrote", "give an empty or a new folder")


def _refusals(fmt: Format, subject: Subject) -> Iterator[Problem]:
    """Tensors that no file format holds, then what this format has no place for."""
    try:
        artifact.require_storable(subject.module)
    except ModelError as error:
        yield from error.problems
        return
    yield from fmt.refusals(subject)


def _record(fmt: Format, subject: Subject, written: Written, folder: Path) -> dict[str, Any]:
    """export.json without the check."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        "format_version": FORMAT_VERSION,
        "format": fmt.name,
        "loaded_by": fmt.loads,
        "optforge": __version__,
        **subject.facts,
        "content": dict(written.facts),
        "notes": list(written.notes),
        "bytes": sum(path.stat().st_size for path in files.values()),
        "files": {name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for name, path in files.items()},
    }


def _kind(path: Path) -> str:
    mode = path.stat().st_mode
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "a file"


def _refused(target: Path, what: str, fix: str) -> OutputError:
    return OutputError(Problem(where=str(target), what=what, fix=fix))
