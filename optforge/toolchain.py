"""Finds the compilers that torch.compile calls, in the order in which it looks for them.

A missing compiler shows itself only at the first compiled call, minutes into a run and as a long traceback, so it is
asked for before anything is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from optforge.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """What was looked for, and what was found: a path and the first line of its `--version`, or None for both."""

    looked_for: tuple[str, ...]
    path: str | None
    version: str | None


def cxx_compiler() -> Compiler:
    """The C++ compiler for Inductor: `CXX` when it is set and nothing else, otherwise `g++`, then `clang++`."""
    return _first("CXX", ("g++", "clang++"))


def cc_compiler() -> Compiler:
    """The C compiler for Triton's launchers: `CC` when it is set and nothing else, otherwise `gcc`, then `clang`."""
    return _first("CC", ("gcc", "clang"))


def missing(compiler: Compiler, language: str) -> list[Problem]:
    """The problem of a compiler that is not there, as a list of none or one."""
    if compiler.path is not None:
        return []
    looked = ", ".join(compiler.looked_for)
    return [
        Problem(where="", what=f"compile needs a {language} compiler (looked for {looked})", fix="install one or drop the compile step")
    ]


def _first(variable: str, names: tuple[str, ...]) -> Compiler:
    chosen = os.environ.get(variable)
    candidates = (chosen,) if chosen else names
    looked_for = (f"{variable}={chosen}",) if chosen else names
    for name in candidates:
        path = shutil.which(name)
        version = None if path is None else _version(path)
        if version is not None:
            return Compiler(looked_for=looked_for, path=path, version=version)
    return Compiler(looked_for=looked_for, path=None, version=None)


def _version(path: str) -> str | None:
    """First line of `--version`, or None for a program that does not run or answer."""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0] if answer.stdout else ""
