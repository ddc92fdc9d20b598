"""Carries what rank 0 tells of its progress to the process that started it, line by line through a file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from optforge.progress import Progress

FILE = "progress.jsonl"
EVERY_S = 0.2


class Teller:
    """A `Progress` whose words end in a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[None]:
        self._say("stage", name)
        try:
            yield
        finally:
            self._say("end", name)

    def advance(self, count: int = 1) -> None:
        """Not carried: it counts single calls."""

    def note(self, text: str) -> None:
        self._say("note", text)

    def _say(self, what: str, text: str) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([what, text]) + "\n")


class Relay:
    """Reads that file in a thread while it is open, and tells a `Progress` what stands there."""

    def __init__(self, folder: Path, progress: Progress | None) -> None:
        self.file, self.progress = folder / FILE, progress
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Relay:
        self.file.unlink(missing_ok=True)
        if self.progress is not None:
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.done.set()
        if self.progress is not None:
            self.thread.join()
        self.file.unlink(missing_ok=True)

    def _run(self) -> None:
        assert self.progress is not None
        read = 0
        with ExitStack() as open_:
            while True:
                last = self.done.wait(EVERY_S)
                text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
                whole = text[: text.rfind("\n") + 1]
                for line in whole[read:].splitlines():
                    what, words = json.loads(line)
                    if what == "note":
                        self.progress.note(words)
                    else:
                        open_.close()
                    if what == "stage":
                        open_.enter_context(self.progress.stage(words))
                read = len(whole)
                if last:
                    return
