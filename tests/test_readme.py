"""What the README tells a newcomer to type is composed and checked here, every line of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from optforge import config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SKIPPED = ("--config",)
"""Needs the file that the command before it writes; tests/cli runs that pair for real."""


def commands() -> list[list[str]]:
    """Arguments of each `optforge run`, `show` or `plan` line, comments and redirections left out."""
    found = []
    for line in re.findall(r"^(?:    |\$ )optforge (?:run|show|plan) (.+)$", README, flags=re.MULTILINE):
        first = line.split(" && ")[0].split(" > ")[0]
        found.append(shlex.split(first, comments=True))
    return found


def recipe_block() -> str:
    block = re.search(r"```yaml\n(name: team_int4.*?)```", README, flags=re.DOTALL)
    assert block is not None
    return block.group(1)


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_each_command_composes(arguments: list[str], tmp_path: Path) -> None:
    assert not set(SKIPPED) & set(arguments)
    (tmp_path / "team_int4.yaml").write_text(recipe_block())
    (tmp_path / "my-checkpoint").mkdir()
    jobs = config.compose_all(config.parse(arguments, cwd=tmp_path), tmp_path)
    assert jobs and all(job.recipe.name for job in jobs)


def test_the_readme_shows_enough_commands_to_be_worth_testing() -> None:
    assert len(commands()) >= 8


def test_the_tree_names_what_is_there() -> None:
    tree = README[README.index("## The tree") : README.index("## Where to read next")]
    package = re.findall(r"^      ((?:[a-z_]+(?:\.py|/) ?)+)", tree, flags=re.MULTILINE)
    names = [name for line in package for name in line.split()]
    assert names and all((ROOT / "optforge" / name).exists() for name in names)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
