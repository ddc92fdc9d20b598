"""A training that is killed, or goes on with another number of ranks, ends where one that was left alone ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from started import start

from optforge.errors import ModelError

STEPS = 8


def result(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return values


def close(one: list[float], other: list[float]) -> bool:
    return one == pytest.approx(other, rel=1e-5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The training in one process, without a stop."""
    folder = tmp_path_factory.mktemp("alone")
    start("ranks:trained", folder, STEPS, 0, 1, count=1)
    return result(folder)


@pytest.mark.slow
def test_a_killed_worker_goes_on_from_the_last_checkpoint_as_if_nothing_had_happened(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    start("ranks:trained", tmp_path, STEPS, 7, 2, count=2, max_restarts=1)
    ended = result(tmp_path)
    assert ended["first"] in (4, 7), "the checkpoint of step 3 was whole when that of step 6 began; the latter may have been whole too"
    assert close(ended["losses"], undisturbed["losses"]) and len(ended["losses"]) == STEPS
    assert list(ended["weights"].values()) == pytest.approx(list(undisturbed["weights"].values()), rel=1e-4, abs=1e-4)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step_00000006", "step_00000008"]
    assert (tmp_path / "ranks" / "1" / "0" / "stderr.log").exists(), "each attempt has logs of its own"


@pytest.mark.slow
@pytest.mark.case("B112")
def test_b112_two_ranks_then_one_then_four_make_one_training(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    start("ranks:trained", tmp_path, 3, 0, 2, count=2)
    start("ranks:trained", tmp_path, 6, 0, 1, count=1)
    start("ranks:trained", tmp_path, STEPS, 0, 4, count=4)
    ended = result(tmp_path)
    assert ended["first"] == 7
    assert close(ended["losses"], undisturbed["losses"])
    assert list(ended["weights"].values()) == pytest.approx(list(undisturbed["weights"].values()), rel=1e-4, abs=1e-4)


@pytest.mark.slow
@pytest.mark.case("B112")
def test_b112_state_of_each_rank_is_refused_by_another_number_of_ranks(tmp_path: Path) -> None:
    start("ranks:rank_state", tmp_path, False, count=2)
    (tmp_path / "own" / "step_00000009.part").mkdir()  # of a process that was killed while it wrote
    with pytest.raises(ModelError, match="a state of its own for each of 2 ranks, and this training has 1"):
        start("ranks:rank_state", tmp_path, True, count=1)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step_00000001"]
    shutil.rmtree(tmp_path / "own")
