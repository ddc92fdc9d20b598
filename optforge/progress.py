"""What long work tells whoever waits for it. The terminal shows it; the Python API stays silent unless asked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """Names the stage that runs, counts within it, and passes notes on."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        """Holds while a stage runs; `total` is the number of `advance` calls to expect."""
        ...

    def advance(self, count: int = 1) -> None: ...

    def note(self, text: str) -> None: ...


class SilentProgress:
    """Says nothing."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def advance(self, count: int = 1) -> None:
        return None

    def note(self, text: str) -> None:
        return None
