"""Which words of a command line are flags: Hydra's own pass through, OptForge's are taken, the dangerous are refused.

Hydra's `--config-path` and `--config-name` would replace the shipped options, and `--experimental-rerun` unpickles a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optforge.errors import ConfigError, Problem, near

FLAGS = {
    "-m": 0,
    "--multirun": 0,
    "--run": 0,
    "-r": 0,
    "--resolve": 0,
    "--hydra-help": 0,
    "--cfg": 1,
    "-c": 1,
    "--package": 1,
    "-p": 1,
    "--info": 1,
    "-i": 1,
}
"""Hydra's flags that pass through -> how many values follow."""
OWN_FLAGS = {"--config": "config", "--config-dir": "config_dir", "-cd": "config_dir"}
REFUSED = {
    "--config-path": "give your own options with --config-dir FOLDER",
    "-cp": "give your own options with --config-dir FOLDER",
    "--config-name": "repeat a run with --config FILE",
    "-cn": "repeat a run with --config FILE",
    "--experimental-rerun": "repeat a run with --config FILE",
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A command line as Hydra takes it."""

    overrides: tuple[str, ...] = ()
    hydra: tuple[str, ...] = ()
    """Hydra's own flags, such as -m or --cfg job."""
    multirun: bool = False
    config_file: Path | None = None
    config_dir: Path | None = None


def split(argv: Sequence[str], cwd: Path) -> tuple[Arguments, list[str]]:
    """Takes the flags out of a command line; what remains are overrides."""
    texts: list[str] = []
    hydra: list[str] = []
    own: dict[str, Path] = {}
    words = iter(argv)
    for word in words:
        name, equals, inline = word.partition("=")
        if not word.startswith("-") or word == "-":
            texts.append(word)
        elif name in FLAGS:
            hydra += [word, *itertools.islice(words, 0 if equals else FLAGS[name])]
        elif name in OWN_FLAGS:
            own[OWN_FLAGS[name]] = (cwd / Path(inline if equals else next(words, "")).expanduser()).resolve()
        else:
            known = [*FLAGS, *OWN_FLAGS, "--set", "--drop", "--add", "--debug", "--verbose"]
            fix = REFUSED.get(name) or near(name, known) or "see optforge run --help"
            raise ConfigError(Problem(where=word, what="is no option here" if name in REFUSED else "unknown option", fix=fix))
    multirun = any(flag in ("-m", "--multirun") for flag in hydra)
    for name, path in own.items():
        flag, kind = f"--{name.replace('_', '-')}", "folder" if name == "config_dir" else "file"
        if not (path.is_dir() if kind == "folder" else path.is_file()):
            raise ConfigError(Problem(where=flag, what=f"there is no {kind} {path}", fix="check the path"))
    folder = own.get("config_dir")
    if folder is not None and (folder / "recipe").is_dir():
        what = f"{folder / 'recipe'} holds recipes, which are given by path"
        raise ConfigError(Problem(where="--config-dir", what=what, fix="type recipe=./FILE.yaml"))
    return Arguments(hydra=tuple(hydra), multirun=multirun, config_file=own.get("config"), config_dir=folder), texts
