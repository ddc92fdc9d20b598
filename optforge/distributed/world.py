"""The processes that this one works with: found in the environment, joined, and asked to agree.

torchrun, Slurm and Lightning each tell a process its rank in a way of their own. What they said to a job that is over may
still stand in a shell's environment, and a process that believed it would wait for others that never come: variables that
do not fit together are refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from optforge.errors import PlanError, Problem

T = TypeVar("T")

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, Lightning's launchers and the agent of `distributed.launch` set for each process."""
TIMEOUT_S = 60.0
"""How long a rank waits for the others, where nobody said."""
LEAST_PORT, PORTS = 15_000, 20_000


@dataclass(frozen=True, kw_only=True)
class World:
    """One process among those that run together."""

    rank: int
    size: int
    local_rank: int
    """Number of this process on its machine, which is the number of its device."""
    source: str
    """Who said so: `torchrun`, `Slurm`, `a process group`."""
    address: str = ""
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class Share:
    """What of a model, and of the data, one process has."""

    tensor: int = 1
    """Devices that divide each product."""
    batches: int = 1
    """Batches that are worked on at once: devices of FSDP times copies."""
    batch: int = 0
    """Which of them is this process's."""

    @property
    def devices(self) -> int:
        return self.tensor * self.batches


SHARE = "optforge_share"


def share_of(module: object) -> Share:
    """The share that a shard step left of a model in this process; of any other module, all of it."""
    found: Share = getattr(module, SHARE, Share())
    return found


_joined: World | None = None


def current() -> World | None:
    """The processes that `joined` has joined; None in a process that works alone."""
    return _joined


def found(env: Mapping[str, str] | None = None) -> World | None:
    """The processes that this one was started with, or None where it was started alone.

    Raises:
        PlanError: the environment says it in part, or what it says does not fit together: what another job left over.
    """
    if env is None and (group := _of_process_group()) is not None:
        return group
    env = os.environ if env is None else env
    if any(name in env for name in TORCHRUN[:2]):
        return _of_torchrun(env)
    if env.get("SLURM_PROCID", "").isdigit() and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _of_slurm(env)
    return None


def is_another_rank(env: Mapping[str, str]) -> bool:
    """Whether torchrun or Slurm started this process as one of several, and not as the first, which writes and tells."""
    try:
        own = found(env)
    except PlanError:  # told where it matters: a run on one device takes no notice
        return False
    return own is not None and own.rank > 0


def _of_process_group() -> World | None:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank = dist.get_rank()
    return World(rank=rank, size=dist.get_world_size(), local_rank=int(os.environ.get("LOCAL_RANK", rank)), source="a process group")


def _of_torchrun(env: Mapping[str, str]) -> World:
    given = {name: env[name] for name in TORCHRUN if name in env}
    missing = [name for name in TORCHRUN if name not in given]
    told = ", ".join(f"{name}={value}" for name, value in given.items())
    if missing:
        raise _left_over(given, f"{told} is set but not {', '.join(missing)}")
    numbers = [given[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")] + [env.get("LOCAL_RANK", given["RANK"])]
    if not all(number.isdigit() for number in numbers):
        raise _left_over(given, f"{told}: not all are whole numbers")
    rank, size, port, local = (int(number) for number in numbers)
    if rank >= size:
        raise _left_over(given, f"RANK={rank} is no rank of WORLD_SIZE={size} processes")
    return World(rank=rank, size=size, local_rank=local, source="torchrun", address=given["MASTER_ADDR"], port=port)


def _of_slurm(env: Mapping[str, str]) -> World:
    """Under srun; the first machine of the step's list answers, on a port that its number gives all of them."""
    job = int(env.get("SLURM_JOB_ID", "0"))
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "localhost"))
    first = re.sub(r"\[(\w+).*", r"\1", nodes.split(",")[0])
    return World(
        rank=int(env["SLURM_PROCID"]),
        size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(env.get("SLURM_LOCALID", "0")),
        source="Slurm",
        address=env.get("MASTER_ADDR", first),
        port=int(env.get("MASTER_PORT", LEAST_PORT + job % PORTS)),
    )


def _left_over(given: Mapping[str, str], what: str) -> PlanError:
    fix = f"unset {' '.join(given)} if another job left it over, or start with torchrun, which sets {', '.join(TORCHRUN)}"
    return PlanError(Problem(where="environment", what=what, fix=fix))


def fits(world: World, devices: int, where: str) -> None:
    """Holds the number of processes against the plan's.

    Raises:
        PlanError: they differ; says both.
    """
    if world.size != devices:
        told = "unset RANK WORLD_SIZE if another job left them over" if world.source == "torchrun" else "start as many processes"
        what = f"takes {devices} devices, and {world.source} has {world.size} processes (WORLD_SIZE={world.size})"
        raise PlanError(Problem(where=where, what=what, fix=f"let the degrees multiply to {world.size}, or {told}"))


@contextmanager
def joined(world: World, device: str, timeout_s: float = TIMEOUT_S, *, keep: bool = False) -> Iterator[World]:
    """Holds the process group of `world`; one that was there before is used and left as it is.

    Args:
        device: type of the device that tensors are sent from: `cpu` or `cuda`.
        timeout_s: how long a collective waits for the other ranks.
        keep: the group stays afterwards, for a module that goes on working with the others.
    """
    global _joined  # noqa: PLW0603 - one process belongs to one world
    import torch
    import torch.distributed as dist

    own = not dist.is_initialized()
    if device == "cuda":
        torch.cuda.set_device(world.local_rank % max(1, torch.cuda.device_count()))
    if own:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=_store(world, timeout), rank=world.rank, world_size=world.size, timeout=timeout)
    before, _joined = _joined, world
    try:
        yield world
        if own:
            dist.barrier()  # a rank that left early would break what the others still send
    finally:
        _joined = before
        if own and not keep:
            dist.destroy_process_group()


def _store(world: World, timeout: timedelta) -> Any:
    """Where the processes find each other. Under a prefix for each attempt: an agent may keep its store, and with it the addresses of
    processes that have ended."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    said = "env://" if world.source == "torchrun" else f"tcp://{world.address}:{world.port}"
    store, _, _ = next(iter(dist.rendezvous(said, rank=world.rank, world_size=world.size, timeout=timeout)))  # type: ignore[attr-defined]
    return PrefixStore(f"optforge_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def agree(value: T) -> T:
    """What rank 0 says; `value` itself in a process that works alone. Every rank must ask, in the same order.

    Decisions that rest on a clock differ between ranks, and ranks that do different things wait for each other forever.
    """
    if _joined is None or _joined.size == 1:
        return value
    import torch
    import torch.distributed as dist

    holder: list[Any] = [value]
    dist.broadcast_object_list(holder, src=0, device=torch.device("cpu"))
    agreed: T = holder[0]
    return agreed


def gather(value: T) -> list[T]:
    """What each rank says, by rank; `value` alone in a process that works alone. Every rank must ask."""
    if _joined is None or _joined.size == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * _joined.size
    dist.all_gather_object(found, value)
    return found
