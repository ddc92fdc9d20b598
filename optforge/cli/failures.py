"""What a failure looks like at the command line: lines on stderr and an exit code, never a stray traceback.

One place decides it for every command and for the jobs inside Hydra, so that the same mistake reads the same everywhere.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from optforge.errors import EXIT_CRASH, OptForgeError, Terminated, UserError, message

EXIT_INTERRUPT, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
MAX_LINES = 20
"""Lines printed of one error; a longer list is cut, and the cut is said."""

log = logging.getLogger("optforge")


@contextmanager
def guard(*, debug: bool) -> Iterator[None]:
    """Ends the command with the exit code that belongs to whatever was raised inside."""
    with _terminable():
        try:
            yield
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(EXIT_INTERRUPT) from None
        except BrokenPipeError:  # `optforge list models | head`: the reader has enough
            sys.stderr.close()
            raise typer.Exit(EXIT_CRASH) from None
        except typer.Exit:
            raise
        except Exception as error:  # the last line of defence: told, and turned into an exit code
            raise typer.Exit(tell(error, debug=debug)) from error


def tell(error: BaseException, *, debug: bool, logfile: Path | None = None) -> int:
    """Prints one `error: ...` line per problem on stderr and returns the exit code.

    A traceback is printed only under `debug`. Where the run has a log, it is written there, and a crash names the path.
    """
    if logfile is not None:
        log.error("%s", error, exc_info=error)
    if debug:
        traceback.print_exception(error)
    for line in _lines(error):
        _say(f"error: {line}")
    if not isinstance(error, UserError) and not debug:
        _say(f"details: {logfile}" if logfile is not None else "run again with --debug for the traceback")
    return error.exit_code if isinstance(error, OptForgeError) else EXIT_CRASH


def _lines(error: BaseException) -> list[str]:
    if isinstance(error, UserError):
        lines = [" ".join(str(problem).split()) for problem in error.problems]
    else:
        kind = "" if isinstance(error, OptForgeError) else f"{type(error).__name__}: "
        first = message(error).strip().splitlines()
        lines = [f"{kind}{first[0] if first else 'no message'}"]
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"and {plural(len(lines) - MAX_LINES, 'more problem')}"]
    return lines


def plural(count: int, noun: str) -> str:
    """`1 job`, `2 jobs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the command as an exception, so that reports and temporary files are closed on the way out."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated(EXIT_TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # only the main thread may; elsewhere the host program decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
