"""The user's cache folder: what is fetched, converted or trained once and used by every later run.

Kept outside the repository and the run folders, because its contents are large, can be made again, and are shared by
all runs of one user.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optforge.errors import OutputError, Problem


def cache_dir() -> Path:
    """`$OPTFORGE_CACHE`, else `$XDG_CACHE_HOME/optforge`, else `~/.cache/optforge`. Not created here."""
    own = os.environ.get("OPTFORGE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "optforge"


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """A new empty folder beside `target` that takes its place when the block ends without an error.

    Whoever looks at `target` sees nothing or all of it, also after a kill in the middle. Where another process has put
    `target` there meanwhile, the new one replaces it.

    Raises:
        OutputError: the folder cannot be written, or its volume is full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise _not_writable(target.parent, error) from error
    try:
        yield folder
        _replace(folder, target)
    except OSError as error:
        raise _not_writable(target, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, target: Path) -> None:
    """Renames `folder` to `target`; an older `target` is moved aside first, since a folder cannot replace a full one."""
    folder.chmod(0o755)
    if target.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        target.rename(aside / target.name)
        folder.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        folder.rename(target)


def _not_writable(path: Path, error: OSError) -> OutputError:
    what = f"cannot be written ({error.strerror or error})"
    return OutputError(Problem(where=str(path), what=what, fix="free space there, or set OPTFORGE_CACHE to another folder"))
