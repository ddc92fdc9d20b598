"""Tensor parallelism of one decoder: each device multiplies by its part of every split weight, and sums or gathers.

Parameters become `DTensor`s, so that FSDP2, optimizers and checkpoints know which part of what they are. The arithmetic is
local: under its usual name a layer's code finds its own part, a plain tensor. So every kernel works as it is, custom operators
and quantized linears too, without a sharding rule of its own; what must be exchanged stands here (Shoeybi et al.,
Megatron-LM, 2019, section 3): columns take a gradient's sum on the way back, rows sum on the way forward, the embedding sums
rows looked up, the head gathers logits.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optforge.kernels.linears import Quantized
from optforge.select import PARTS
from optforge.transforms.mixed import Mixed, mix_
from optforge.transforms.shard.layout import COLUMN, ROW, VOCABULARY, Split, dimension

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WEIGHT_SUM = "weight_sum"
"""Sums of a quantized weight's rows: those of a part are sums over the part."""


def parallelize_(model: nn.Module, found: list[Split], mesh: DeviceMesh) -> None:
    """Leaves every device its part of `model`, in place; what two modules share, they share afterwards.

    Args:
        found: of `layout.splits`; whole modules become replicated DTensors, so that an optimizer sees one kind.
        mesh: of one dimension, the tensor degree's.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the former one, whose id must stay taken
    for split in found:
        if isinstance(split.module, Quantized) and split.role == ROW and split.module._parameters.get(WEIGHT_SUM) is not None:
            _own_sum(split.module, mesh)
        for name, parameter in list(split.module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = parameter, _part(split, name, parameter, mesh)
            split.module._parameters[name] = made[id(parameter)][1]
        _reclass(split, mesh)
        _resize(model, split, mesh.size())


def _part(split: Split, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This device's part of a parameter as a DTensor over all parts."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    at = dimension(split, name)
    if at is None:
        # a copy: the baseline's tensors are never trained with
        whole = DTensor.from_local(parameter.detach().clone(), mesh, [Replicate()], run_check=False)
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)
    rank, size = mesh.get_local_rank(), mesh.size()
    scale = parameter.shape[at] / sum(split.parts) if split.parts else 1.0
    widths = [round(width * scale) for width in split.parts] if split.role == COLUMN else [parameter.shape[at]]
    own = [part.chunk(size, at)[rank] for part in torch.split(parameter.detach(), widths, at)]
    local = torch.cat(own, at) if len(own) > 1 else own[0].clone()
    whole = DTensor.from_local(local.contiguous(), mesh, [Shard(at)], run_check=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _own_sum(module: Quantized, mesh: DeviceMesh) -> None:
    """The sums over this device's columns in the place of those over all: asymmetric activations are corrected by part."""
    own = module.weight.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()]
    found = own.sum(1, dtype=torch.int32).float() * module.weight_scale.detach().flatten()
    module._parameters[WEIGHT_SUM] = nn.Parameter(found, requires_grad=False)


def _resize(model: nn.Module, split: Split, size: int) -> None:
    """What a layer says of its own size, and where the parts of a packed one begin, become this device's."""
    module: Any = split.module
    if split.role == COLUMN or (split.role == VOCABULARY and isinstance(module, nn.Linear)):
        module.out_features //= size
    elif split.role == ROW:
        module.in_features //= size
    if split.role == COLUMN and hasattr(module, PARTS):
        parent = model.get_submodule(split.name.rpartition(".")[0])
        for name in getattr(module, PARTS):
            part: Any = parent.get_submodule(name)
            part.start, part.stop = part.start // size, part.stop // size


class _Local(Mixed):
    """Root of the mixins below; `_optforge_mesh` is the tensor degree's."""

    _optforge_mesh: DeviceMesh


class Column(_Local):
    """Columns: a whole input, this device's columns of the output."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(enter(input, self._optforge_mesh))  # type: ignore[misc,no-any-return]  # of the class it is mixed into


class Row(_Local):
    """Rows: this device's columns of the input, the whole output, summed over the devices; the bias is added once."""

    def forward(self, input: Tensor) -> Tensor:
        found = summed(super().forward(input), self._optforge_mesh)  # type: ignore[misc]  # of the class it is mixed into
        bias = self._parameters.get("bias")  # type: ignore[attr-defined]  # a module's
        return found if bias is None else found + _local(bias)


class Table(_Local):
    """An embedding of which this device has some rows; the others' tokens give zero here."""

    def forward(self, input: Tensor) -> Tensor:
        rows = _local(self._parameters["weight"]).shape[0]  # type: ignore[attr-defined]  # a module's
        own = input - rows * self._optforge_mesh.get_local_rank()
        here = (own >= 0) & (own < rows)
        found = super().forward(own.clamp(0, rows - 1))  # type: ignore[misc]  # of the class it is mixed into
        return summed(found.masked_fill(~here[..., None], 0), self._optforge_mesh)


class Head(_Local):
    """The head, split by the vocabulary; its logits are gathered."""

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(enter(input, self._optforge_mesh))  # type: ignore[misc]  # of the class it is mixed into
        return gathered(found, self._optforge_mesh)


class Whole(_Local):
    """Held whole by every device."""


def enter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """`x` as it is; on the way back, its gradient's sum over the devices."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    from torch.distributed.tensor import DTensor, Partial, Replicate

    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of `x` over the devices; on the way back, the gradient as it is."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def gathered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """`x` of all devices, beside one another along the last dimension; on the way back, each one's own part of the gradient."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    return DTensor.from_local(x, mesh, [Shard(x.dim() - 1)], run_check=False).redistribute(placements=[Replicate()]).to_local()


def _local(parameter: Tensor | None) -> Any:
    """This device's part of a parameter. One that FSDP2 has cut as well, over a mesh of more dimensions, is as it is: FSDP2 looks
    at it, and gives a layer's code tensor parallelism's part."""
    mesh = getattr(parameter, "device_mesh", None)
    return parameter if parameter is None or mesh is None or mesh.ndim > 1 else parameter.to_local()  # type: ignore[attr-defined]  # a DTensor


def _read(name: str, module: nn.Module) -> Any:
    return _local(module._parameters[name])


def _nothing(module: nn.Module) -> None:
    """A row's bias, for the code that multiplies: it is added after the sum."""


@cache
def _reading(mixin: type[_Local], names: tuple[str, ...]) -> type[_Local]:
    """The mixin under whose `names` a layer's code finds its own part of a parameter."""
    shown: dict[str, Any] = {name: property(partial(_read, name)) for name in names}
    if mixin is Row and "bias" in shown:
        shown["bias"] = property(_nothing)
    return type(mixin.__name__, (mixin,), {"__module__": mixin.__module__, **shown})


def _reclass(split: Split, mesh: DeviceMesh) -> None:
    module, names = split.module, tuple(name for name, held in split.module._parameters.items() if held is not None)
    if split.role == VOCABULARY:
        mixin: type[_Local] = Head if isinstance(module, nn.Linear) else Table
    else:
        mixin = {COLUMN: Column, ROW: Row}.get(split.role, Whole)
    mix_(module, _reading(mixin, names))  # type: ignore[arg-type]  # a class is hashable, whatever the stubs say
    module.__dict__["_optforge_mesh"] = mesh
