"""Real processes: they agree, one fails, dies or hangs, and all end in time with the first one's message."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from started import found, start

from optforge.distributed import failures
from optforge.errors import ChildFailed, PlanError


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.case("B109")
def test_b109_ranks_agree_and_the_first_one_that_fails_is_told(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    begun = time.monotonic()
    with pytest.raises(ChildFailed) as failed:
        start("light_ranks:agrees_then_fails", tmp_path, count=2)
    assert time.monotonic() - begun < 60
    assert str(failed.value).startswith("rank 1 of 2: ValueError: rank 1 cannot read its part (log: ")
    assert failed.value.kind == "ValueError" and "light_ranks.py" in failed.value.traceback
    for rank in (0, 1):
        assert found(tmp_path, rank) == {"agreed": "rank 0", "gathered": [0, 1], "size": 2, "source": "torchrun"}
        assert (tmp_path / "ranks" / "0" / str(rank) / "stderr.log").exists()
    assert "ValueError" in (tmp_path / "ranks" / "0" / "1" / "stderr.log").read_text()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert "WORLD_SIZE" not in os.environ and "RANK" not in os.environ


@pytest.mark.slow
def test_a_users_error_of_one_rank_keeps_its_class(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"step shard: does not divide; steps\.shard\.tensor=2"):
        start("light_ranks:refuses", tmp_path, count=2)


@pytest.mark.slow
@pytest.mark.case("B109")
def test_b109_a_rank_that_hangs_ends_with_the_others_in_time(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ChildFailed, match=r"rank 0 of 2 waited 3 s \(launch.timeout_s\) for the others, and rank 1 never came"):
        start("light_ranks:hangs", tmp_path, count=2, timeout_s=3)
    assert time.monotonic() - begun < 60
    assert all(ended(int((tmp_path / f"pid_{rank}").read_text())) for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.case("B109")
def test_b109_a_rank_that_is_killed_is_the_cause_and_not_the_closed_connection(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match=r"rank 1 of 2: the process was killed by SIGKILL \(9\)"):
        start("light_ranks:dies", tmp_path, count=2)


def failure(rank: int, message: str, time: float = 0.0, **fields: int) -> failures.Failure:
    return failures.Failure(rank=rank, kind="RuntimeError", message=message, time=time, **fields)


@pytest.mark.case("B109")
@pytest.mark.parametrize(
    ("all_of_them", "first"),
    [
        ([failure(0, "Connection closed by peer", 1.0), failure(1, "no room", 2.0)], 1),
        ([failure(0, "no room", 2.0), failure(1, "cannot read", 1.0)], 1),
        ([failure(0, "Timed out waiting 60000ms", 1.0), failure(1, "was killed", 2.0, exit=-9)], 0),
        ([failure(0, "Connection closed by peer", 1.0), failure(1, "was killed", 2.0, exit=-9)], 1),
        ([failure(0, "was killed", 1.0, exit=-15), failure(1, "no room", 2.0)], 1),
    ],
)
def test_b109_consequences_come_after_the_cause(all_of_them: list[failures.Failure], first: int) -> None:
    assert failures.ordered(all_of_them)[0].rank == first
