"""Completion as the shells ask for it: through the environment variables of their own scripts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HARDWARE = {path.stem for path in (ROOT / "conf/hardware").glob("*.yaml")}


def _bash(words: list[str]) -> list[str]:
    """What bash gets for the last word; it takes `=` for a word of its own."""
    env = {"_OPTFORGE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(map(shlex.quote, words)), "COMP_CWORD": str(len(words) - 1)}
    return _complete(env)


def _zsh(line: str) -> str:
    return "\n".join(_complete({"_OPTFORGE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}))


def _complete(env: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from optforge.cli.app import main; main()"],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not done.stderr, done.stderr
    return done.stdout.split("\n")


@pytest.mark.parametrize("words", [["hardware", "="], ["hardware", "=", ""]])
def test_bash_offers_every_option_of_a_group(words: list[str]) -> None:
    assert set(filter(None, _bash(["optforge", "run", *words]))) == HARDWARE


def test_bash_offers_what_begins_as_typed_after_other_overrides() -> None:
    offered = _bash(["optforge", "run", "-m", "recipe", "=", "x", "hardware", "=", "a100"])
    assert set(filter(None, offered)) == {name for name in HARDWARE if name.startswith("a100")}


def test_bash_keeps_what_stands_before_a_comma() -> None:
    assert "cpu,h200" in _bash(["optforge", "run", "-m", "hardware", "=", "cpu,h2"])


def test_zsh_gets_whole_words_and_descriptions() -> None:
    shown = _zsh("optforge run hardware=h20")
    assert "hardware=h200" in shown
    assert "hardware=a100" not in shown


def test_the_groups_themselves_are_offered() -> None:
    assert {"recipe=", "hardware=", "model=", "workload=", "data="} <= set(_bash(["optforge", "run", ""]))


def test_commands_and_nouns_are_offered() -> None:
    assert {"run", "show", "list", "doctor"} <= set(_bash(["optforge", ""]))
    assert {"recipes", "hardware"} <= set(_bash(["optforge", "list", ""]))
