"""`optforge run`: checks everything that can be checked, makes the run's folder, and hands over to Hydra.

The checks come first because Hydra reports a mistake with exit code 1 and late; the folder is made here, with mkdir as
the lock, because Hydra's own pattern gives two runs of one second the same one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from optforge import config, preflight
from optforge.cli.job import Settings, exit_code, hydra_main
from optforge.config import Arguments
from optforge.config.store import quoted
from optforge.distributed.world import is_another_rank

QUESTIONS = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--version")
"""Flags of Hydra's that print something and run nothing; they need no folder."""

QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none")
"""Hydra's console logging is off: OptForge shows progress itself and keeps the log in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `run` and `show` as Typer parsed them; `argv` is what it passed through, in order."""

    argv: tuple[str, ...] = ()
    config: Path | None = None
    set_: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    debug: bool = False
    verbose: bool = False
    command: str = ""

    def parse(self, cwd: Path) -> Arguments:
        """Rewrites the arguments for Hydra. `--config` goes back among them, since the config layer owns its meaning."""
        named = ("--config", str(self.config)) if self.config is not None else ()
        return config.parse([*self.argv, *named], cwd=cwd, set_=self.set_, drop=self.drop, add=self.add)


def run_command(request: Request) -> int:
    """Runs what was asked for and returns the exit code."""
    cwd = Path.cwd()
    arguments = request.parse(cwd)
    settings = Settings(command=request.command, cwd=cwd, debug=request.debug, verbose=request.verbose)
    if any(flag.split("=", 1)[0] in QUESTIONS for flag in arguments.hydra):
        return exit_code(hydra_main([*arguments.hydra, *arguments.overrides], settings))
    if arguments.multirun:
        from optforge.cli.sweep import sweep_command

        return sweep_command(arguments, settings, QUIET)
    if is_another_rank(os.environ):
        return _as_another_rank(arguments, settings)
    return exit_code(hydra_main([*arguments.hydra, *QUIET, *arguments.overrides, *_run_folder(arguments, cwd)], settings))


def _as_another_rank(arguments: Arguments, settings: Settings) -> int:
    """The same run without a folder that stays and without a word on stdout: both are rank 0's."""
    kept = [text for text in arguments.overrides if text.partition("=")[0].lstrip("+") != preflight.RUN_OVERRIDE]
    with tempfile.TemporaryDirectory(prefix="optforge-rank-") as name, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return exit_code(hydra_main([*arguments.hydra, *QUIET, *kept, _override(preflight.RUN_OVERRIDE, Path(name))], settings))


def _run_folder(arguments: Arguments, cwd: Path) -> list[str]:
    """Checks the run, and makes its folder; the override that tells Hydra, or none where the user named one."""
    named = value_of(arguments.overrides, preflight.RUN_OVERRIDE)
    if named is not None:
        _claim(named, cwd, preflight.RUN_OVERRIDE)
    run = config.compose(arguments, cwd=cwd)
    if named is not None:
        return []
    return [_override(preflight.RUN_OVERRIDE, preflight.run_folder(Path(run.output_dir), run.recipe.name, run.hardware.name))]


def _claim(named: str, cwd: Path, override: str) -> None:
    if "${" not in named:  # what Hydra still has to fill in is claimed by Hydra
        preflight.claim(cwd / named, override)


def value_of(overrides: Sequence[str], key: str) -> str | None:
    """The last value given to `key`, without quotes, or None."""
    values = [text.partition("=")[2] for text in overrides if text.partition("=")[0].lstrip("+") == key]
    return values[-1].strip("'\"") if values else None


def _override(key: str, folder: Path) -> str:
    """`key="<folder>"` in Hydra's grammar."""
    return f"{key}={quoted(str(folder.absolute()))}"
