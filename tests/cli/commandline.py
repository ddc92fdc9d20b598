"""The command line as a stranger calls it: a process in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Optforge = Callable[..., subprocess.CompletedProcess[str]]
"""Takes arguments, and variables that are added to the environment."""

RECIPE = """\
name: tiny
description: One compiled block
goal: latency
steps:
  compile: {use: compile/inductor}
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "optforge", *arguments]


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Python modules in `folder` can be imported, as they can with a current folder on the path."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **variables}
