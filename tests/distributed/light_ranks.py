"""What processes run that need no model: they start faster without one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from optforge.distributed import world
from optforge.errors import PlanError, Problem


def agrees_then_fails(folder: str) -> None:
    """Every rank writes what was agreed; then rank 1 raises before a collective that rank 0 has entered."""
    own = world.current()
    assert own is not None
    found = {"agreed": world.agree(f"rank {own.rank}"), "gathered": world.gather(own.rank), "size": own.size, "source": own.source}
    (Path(folder) / f"found_{own.rank}.json").write_text(json.dumps(found))
    if own.rank == 1:
        raise ValueError("rank 1 cannot read its part")
    dist.all_reduce(torch.ones(1))


def refuses(folder: str) -> None:
    if dist.get_rank() == 1:
        raise PlanError(Problem(where="step shard", what="does not divide", fix="steps.shard.tensor=2"))
    dist.all_reduce(torch.ones(1))


def hangs(folder: str) -> None:
    (Path(folder) / f"pid_{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def dies(folder: str) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
