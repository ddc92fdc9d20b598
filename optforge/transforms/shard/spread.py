"""Carries a shard step out in the processes of one mesh: tensor parallelism first, then FSDP2 around it, copies outside.

The mesh has three dimensions, `data`, `fsdp` and `tensor`, the innermost for the degree that sends most. Copies that train are
FSDP2 too, over a mesh whose first dimension replicates (Zhao et al., PyTorch FSDP, 2023, section 3.2: hybrid sharding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from optforge.distributed import world
from optforge.errors import Problem
from optforge.select import PARTS, original_name, repeated_blocks
from optforge.transforms.base import Context
from optforge.transforms.shard import layout
from optforge.transforms.shard.layout import COLUMN, Split, is_linear

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from optforge.transforms.shard import Shard

TRAIN = "train"
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def refused(model: nn.Module, step: Shard, name: str) -> list[Problem]:
    """What can be planned and not run yet, by name."""
    if step.tensor == 1:
        return []
    problems, where = [], f"step {name}"
    own = [split.name for split in layout.splits(model) if split.role == COLUMN and _packed_by_the_model(split)]
    if own:
        what = f"{own[0]} holds q, k and v in one weight of the model's own making, which cannot be divided over devices yet"
        problems.append(Problem(where=where, what=what, fix=f"steps.{name}.tensor=1 steps.{name}.fsdp={step.tensor}"))
    other = [split.name for split in layout.splits(model) if is_linear(split.module) and not isinstance(split.module, nn.Linear)]
    if other and not own:
        what = f"{other[0]} is no nn.Linear, and cannot be divided over devices yet"
        problems.append(Problem(where=where, what=what, fix=f"steps.{name}.tensor=1 steps.{name}.fsdp={step.tensor}"))
    return problems


def _packed_by_the_model(split: Split) -> bool:
    last = split.name.rpartition(".")[2]
    return not hasattr(split.module, PARTS) and last in ("qkv_proj", "query_key_value", "c_attn", "wqkv", "Wqkv")


def spread_(model: nn.Module, found: list[Split], step: Shard, ctx: Context) -> None:
    """Leaves this process its part of the model, in place.

    Raises:
        PlanError: the processes are not as many as the mesh has.
    """
    joined = world.current()
    assert joined is not None, "a process that works alone spreads nothing"
    world.fits(joined, step.devices, f"step {ctx.step}")
    mesh = mesh_of(step, ctx)
    if step.tensor > 1:
        from optforge.transforms.shard import tensor

        tensor.parallelize_(model, found, mesh["tensor"])
    batch = mesh["data"].get_local_rank() * step.fsdp + mesh["fsdp"].get_local_rank()
    model.__dict__[world.SHARE] = world.Share(tensor=step.tensor, batches=step.fsdp * step.data, batch=batch)
    if step.fsdp > 1 or (step.data > 1 and ctx.workload == TRAIN):
        _fully_shard(model, mesh["data", "fsdp"] if step.data > 1 else mesh["fsdp"])


def mesh_of(step: Shard, ctx: Context) -> DeviceMesh:
    """The mesh of these degrees over the processes that were joined; made once for them."""
    import torch.distributed as dist

    assert ctx.backend is not None, "a plan spreads nothing"
    key = (id(dist.group.WORLD), step.data, step.fsdp, step.tensor)
    if key not in _meshes:
        _meshes.clear()
        _meshes[key] = ctx.backend.mesh(data=step.data, fsdp=step.fsdp, tensor=step.tensor)
    return _meshes[key]


def _fully_shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each repeated layer is a group of FSDP2's; what is outside of them, and layers that share a parameter with others, is the root's."""
    from torch.distributed.fsdp import fully_shard

    groups, _ = layout.units(model)
    for name, block in repeated_blocks(model).items():
        if original_name(name) in groups:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.register_forward_hook(_part_again)


def _part_again(model: nn.Module, arguments: Any, output: Any) -> None:
    """The root's group stays whole until the backward pass. Without one it would stay so for good, and an optimizer that is made then
    would hold whole parameters."""
    if not torch.is_grad_enabled():
        model.reshard()  # type: ignore[operator]  # of the class that fully_shard gave it
