"""Where log lines of a run go: all of them to `optforge.log` in its folder, to the terminal only when asked for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@contextmanager
def to_file(path: Path, *, verbose: bool) -> Iterator[None]:
    """Sends log records and Python warnings to `path` while it is open, and to stderr as well under `verbose`."""
    handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
    if verbose:
        handlers.append(logging.StreamHandler(sys.stderr))
    root = logging.getLogger()
    level = root.level
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


@contextmanager
def adopted(*names: str) -> Iterator[None]:
    """Lets loggers that print by themselves (torch's, transformers') hand their records to the root logger for a while.

    Call it after their packages are imported. Under TORCH_LOGS torch prints as the user asked.
    """
    taken: list[tuple[logging.Logger, list[logging.Handler], bool]] = []
    for name, logger in list(logging.root.manager.loggerDict.items()):
        wanted = name.split(".", 1)[0] in names and not (name.startswith("torch") and "TORCH_LOGS" in os.environ)
        if wanted and isinstance(logger, logging.Logger) and logger.handlers:
            taken.append((logger, list(logger.handlers), logger.propagate))
            logger.handlers.clear()
            logger.propagate = True
    try:
        yield
    finally:
        for logger, handlers, propagate in taken:
            logger.handlers[:], logger.propagate = handlers, propagate


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Keeps what libraries log off the terminal while it is open, for a command that has no log of its own.

    Call it after the packages `names` are imported; see `adopted`.
    """
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    logging.captureWarnings(True)
    try:
        with adopted(*names):
            yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(silent)
