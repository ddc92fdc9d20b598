"""Checkpoints of a training over several devices: written in the background, whole or not at all, read by any number of ranks.

Weights and optimizer states go through `torch.distributed.checkpoint`: each rank writes its own parts, and a reader takes the
parts that it needs, however many there are of either. Beside them stands what belongs to all (steps, the position in the
data, losses) and what belongs to one rank (a user's own loader, random states), which no other number of ranks can take.
A checkpoint is written under another name and renamed when the last part is there.
"""

from __future__ import annotations

import json
import pickle
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from optforge import atomic
from optforge.distributed import world
from optforge.errors import ModelError, Problem
from optforge.spec import Json

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

PART, META, RANK_STATE = ".part", "training.json", "rank_{}.pickle"
_groups: dict[int, Any] = {}


class Checkpoints:
    """The checkpoints of one training in a folder; the newest `keep` stay."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """
        Args:
            folder: seen by all ranks; made when missing. What an earlier process did not finish is removed.
        """
        self.folder, self.keep = folder, keep
        self._pending: tuple[int, Any] | None = None
        if _first():
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"*{PART}"):
                shutil.rmtree(left)
        world.agree(None)  # the others begin when it is there

    def latest(self) -> int | None:
        """The newest whole checkpoint's step, the same on every rank; None without one."""
        steps = sorted(int(path.name.removeprefix("step_")) for path in self.folder.glob("step_*") if path.suffix != PART)
        return world.agree(steps[-1] if steps else None)

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, state: dict[str, Json], own: Any = None) -> None:
        """Copies everything now and writes it while the training goes on; an earlier write is waited for first.

        Args:
            state: what belongs to all ranks, as JSON; rank 0's counts.
            own: what belongs to this rank alone, to be pickled; None where there is nothing.

        Raises:
            ModelError: the model's parts are in an order that another number of ranks cannot read.
        """
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import async_save
        from torch.distributed.checkpoint.state_dict_saver import save as save_now

        self.finish()
        _require_readable(model)
        target = self.folder / f"step_{step:08d}{PART}"
        if _first():
            target.mkdir(parents=True, exist_ok=True)
            meta = {"step": step, "ranks": _size(), "rank_state": own is not None, "state": state}
            atomic.write_bytes(target / META, json.dumps(meta).encode())
        world.agree(None)
        if own is not None:
            (target / RANK_STATE.format(_rank())).write_bytes(pickle.dumps(own))
        values = _values(model, optimizer)
        if not dist.is_initialized():
            save_now(values, checkpoint_id=target, no_dist=True)
            self._named(step)
            return
        future = async_save(values, checkpoint_id=target, process_group=_group())
        self._pending = step, cast("Future[Any]", future)

    def finish(self) -> None:
        """Waits for the write in the background, and gives the checkpoint its name once every rank's part is there."""
        if self._pending is None:
            return
        step, future = self._pending
        self._pending = None
        future.result()
        world.gather(None)
        self._named(step)
        world.agree(None)

    def poll(self) -> None:
        """Names the checkpoint if all of it is written by now; never waits for the disk. Every rank must ask."""
        if self._pending is not None and all(world.gather(self._pending[1].done())):
            self.finish()

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Json], Any]:
        """Fills model and optimizer with this rank's parts of a checkpoint; returns what belongs to all, and to this rank.

        Raises:
            ModelError: the checkpoint has state of its own for each of another number of ranks; both numbers are told.
        """
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load as load_parts

        source = self.folder / f"step_{step:08d}"
        meta = json.loads((source / META).read_text(encoding="utf-8"))
        if meta["rank_state"] and meta["ranks"] != _size():
            what = f"holds a state of its own for each of {meta['ranks']} ranks, and this training has {_size()}"
            fix = f"go on with {meta['ranks']} processes; weights alone are read by any number"
            raise ModelError(Problem(where=str(source), what=what, fix=fix))
        _require_readable(model)
        values = _values(model, optimizer)
        load_parts(values, checkpoint_id=source, no_dist=not dist.is_initialized())
        set_state_dict(model, optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"])
        own = pickle.loads((source / RANK_STATE.format(_rank())).read_bytes()) if meta["rank_state"] else None
        return meta["state"], own

    def _named(self, step: int) -> None:
        """The checkpoint under its own name, and the oldest gone."""
        if not _first():
            return
        part = self.folder / f"step_{step:08d}{PART}"
        whole = part.with_suffix("")
        shutil.rmtree(whole, ignore_errors=True)
        part.rename(whole)
        for old in sorted(path for path in self.folder.glob("step_*") if path.suffix != PART)[: -self.keep]:
            shutil.rmtree(old)


def _values(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights and states under their full names, as parts of what all ranks have."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def _require_readable(model: nn.Module) -> None:
    """
    Raises:
        ModelError: tensor parallelism has put the rows of packed linears into another order.
    """
    from optforge.select import PARTS

    if world.share_of(model).tensor == 1:
        return
    packed = next((name for name, module in model.named_modules() if hasattr(module, PARTS)), None)
    if packed is not None:
        what = f"{packed} is packed, and over tensor={world.share_of(model).tensor} its rows stand in another order than whole"
        raise ModelError(Problem(where="checkpoint", what=what, fix="train without fuse/decoder's packing, or with shard/fsdp"))


def _group() -> Any:
    """A process group for the writes alone, since they run beside the training's own collectives."""
    import torch.distributed as dist

    key = id(dist.group.WORLD)
    if key not in _groups:
        _groups.clear()
        _groups[key] = dist.new_group(backend="gloo")
    return _groups[key]


def _rank() -> int:
    own = world.current()
    return 0 if own is None else own.rank


def _size() -> int:
    own = world.current()
    return 1 if own is None else own.size


def _first() -> bool:
    return _rank() == 0
