"""Fixtures of the comparison's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleets import CPU, Compare, Tree, read, write

from optforge.compare import Comparison, compare, load


@pytest.fixture
def side_by_side(tmp_path: Path) -> Compare:
    """Writes the given reports as run folders and compares them."""

    def call(*trees: Tree, **options: object) -> Comparison:
        folders = [write(tree, tmp_path / f"run{index}") for index, tree in enumerate(trees)]
        return compare(load([str(folder) for folder in folders], cwd=tmp_path).entries, **options)

    return call


@pytest.fixture
def five(side_by_side: Compare) -> Comparison:
    """The five committed reports of one workload on one CPU; one of them is for an A100."""
    return side_by_side(*map(read, CPU))
