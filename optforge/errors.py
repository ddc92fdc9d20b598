"""The exception tree, and the one shape in which a problem is told.

Every error that a user can cause says where it is, what is wrong and what to type. The command line prints it as one
line and exits with `exit_code`; a traceback appears only under `--debug`.

    OptForgeError                 1  something of ours, or of the machine, went wrong
    ├── UserError                 2  the user must change something; carries one or more Problems
    │   ├── ConfigError              a key, value, recipe or override is wrong
    │   ├── SelectorError            a selector matches nothing, or splits what is packed
    │   ├── PlanError                the plan refuses: order, conflict, downgrade, stand-in, fit
    │   ├── ModelError               a model or checkpoint cannot be used: missing, truncated, NaN, on meta
    │   ├── DataError                a data set is missing, empty or damaged
    │   ├── MissingDependency        a package, compiler or device is not there; says what brings it
    │   ├── OutputError              a folder cannot be written, or its volume is full
    │   └── TrustError               loading this would run code
    ├── StepError                 1  a transform did not do what its receipt says
    ├── ExportError               1  an exported artifact does not load in its engine, or computes something else there
    ├── OutOfMemory               1  the device ran out of memory
    └── ChildFailed               1  an isolated process raised, ended or was killed
        └── ChildTimeout             it ran longer than it may
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

EXIT_OK, EXIT_CRASH, EXIT_USER, EXIT_LIMIT = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: where it is, what it is, and what to type."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return f"{line}; {self.fix}" if self.fix else line


class OptForgeError(Exception):
    """Root of every exception that OptForge raises on purpose."""

    exit_code = EXIT_CRASH


class UserError(OptForgeError):
    """The user must change something. Raised with one `Problem`, several, or a plain sentence."""

    exit_code = EXIT_USER

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(where="", what=p) for p in problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class ConfigError(UserError):
    """A key, a value, a recipe or an override is wrong."""


class SelectorError(UserError):
    """A selector matches nothing, is malformed, or would split a packed module."""


class PlanError(UserError):
    """The plan refuses the run; holds every problem at once."""


class ModelError(UserError):
    """A model or checkpoint cannot be used."""


class DataError(UserError):
    """A data set is missing, empty or damaged."""


class MissingDependency(UserError):
    """A package, compiler or device that the run needs is not there."""


class OutputError(UserError):
    """A folder cannot be written, or its volume has no space left."""


class TrustError(UserError):
    """Loading this file would run code, and `trust=true` was not given."""


class StepError(OptForgeError):
    """A transform did not do what its receipt says it did."""


class ExportError(OptForgeError):
    """An exported artifact does not load in its own engine, or computes something else there."""


class OutOfMemory(OptForgeError):
    """The device ran out of memory."""


class ChildFailed(OptForgeError):
    """An isolated process (`optforge.isolate`) did not bring a result.

    `kind` and `traceback` are the child's exception, `signal` the number of the signal that killed it, `output` the
    end of what it printed; each None or empty where it does not apply.
    """

    def __init__(self, message: str, *, kind: str | None = None, traceback: str = "", signal: int | None = None, output: str = "") -> None:
        super().__init__(message)
        self.kind, self.traceback, self.signal, self.output = kind, traceback, signal, output


class ChildTimeout(ChildFailed):
    """An isolated process ran longer than it may, and was stopped."""


class Terminated(SystemExit):
    """SIGTERM. A `SystemExit` of a class of its own, since a user's code may call `sys.exit`, which is a crash of the run."""


def message(error: BaseException) -> str:
    """What an exception says; that of `sys.exit` says nothing by itself."""
    return f"code of the run's own called sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)


def near(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5) -> str:
    """`did you mean a, b?` for the names nearest to `name`, or an empty string when none is near; `cutoff` is difflib's."""
    found = difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)
    return f"did you mean {', '.join(found)}?" if found else ""
