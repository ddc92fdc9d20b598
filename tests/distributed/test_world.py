"""Which processes this one belongs to, from what torchrun, Slurm and other jobs' remains say."""

from __future__ import annotations

import pytest

from optforge.distributed import world
from optforge.errors import PlanError

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


def test_nothing_is_said_to_a_process_that_was_started_alone() -> None:
    assert world.found({}) is None
    assert world.found({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None, "the batch script itself, outside of srun"


def test_torchrun_says_all_of_it() -> None:
    assert world.found(WHOLE) == world.World(rank=1, size=4, local_rank=1, source="torchrun", address="node1", port=29500)


def test_slurm_says_it_in_words_of_its_own() -> None:
    env = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "7"}
    assert world.found(env) == world.World(rank=5, size=8, local_rank=1, source="Slurm", address="gpu03", port=15007)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but not RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0"}, "RANK=0 is set but not WORLD_SIZE"),
        ({**WHOLE, "RANK": "4"}, "RANK=4 is no rank of WORLD_SIZE=4"),
        ({**WHOLE, "WORLD_SIZE": "many"}, "not all are whole numbers"),
    ],
)
def test_what_another_job_left_over_is_named(env: dict[str, str], told: str) -> None:
    with pytest.raises(PlanError) as refused:
        world.found(env)
    (problem,) = refused.value.problems
    assert told in problem.what and problem.fix.startswith("unset ") and all(name in problem.fix for name in env if name in world.TORCHRUN)


def test_another_number_of_processes_than_the_mesh_is_told_with_both() -> None:
    found = world.found(WHOLE)
    assert found is not None
    world.fits(found, 4, "the mesh")
    with pytest.raises(PlanError, match=r"takes 2 devices, and torchrun has 4 processes \(WORLD_SIZE=4\)"):
        world.fits(found, 2, "the mesh")


def test_a_process_alone_agrees_with_itself() -> None:
    assert world.current() is None
    assert world.agree(3) == 3 and world.gather("a") == ["a"]
    assert world.share_of(object()) == world.Share() and world.Share(tensor=2, batches=3).devices == 6


def test_only_the_first_of_several_writes() -> None:
    assert world.is_another_rank(WHOLE)
    assert not any(world.is_another_rank(env) for env in ({}, {**WHOLE, "RANK": "0"}, {"WORLD_SIZE": "4"}))
