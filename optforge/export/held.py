"""A file for PyTorch's archive writer, which ends the whole process when the disk is full.

That writer closes its file in a destructor and throws there, which C++ answers by aborting (measured with torch 2.13.0: no report, no
message, a half-written file). Here the first error is kept, everything after it is dropped, and the error is raised at the end.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Held(io.RawIOBase):
    """A file that is written to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = path.open("wb")
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.file.seek(offset, whence) if self.error is None else offset

    def tell(self) -> int:
        return self.file.tell() if self.error is None else 0

    def finish(self) -> None:
        """
        Raises:
            OSError: the first that any write met.
        """
        try:
            self.file.close()
        except OSError as error:
            self.error = self.error or error
        if self.error is not None:
            raise self.error


@contextmanager
def held(path: Path) -> Iterator[Held]:
    """Opens `path` for an archive writer; the first error of any write is raised when the block ends."""
    file = Held(path)
    try:
        yield file
    finally:
        file.finish()
