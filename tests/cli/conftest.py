"""Fixtures of the command line's tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commandline import RECIPE, Optforge, command, environment


@pytest.fixture
def optforge(tmp_path: Path) -> Optforge:
    """Calls the command line in `tmp_path`."""

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = environment(tmp_path, **variables)
        return subprocess.run(command(*arguments), cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=280)

    return call


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The override that chooses a recipe file of one compile step."""
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    return "recipe=./tiny.yaml"
