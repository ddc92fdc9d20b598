"""What every workload keeps to: inputs prepared once on the device, then one call that does the work once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from optforge.data.base import DataSource
from optforge.errors import Problem
from optforge.models.base import Loaded

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@runtime_checkable
class Work(Protocol):
    """Prepared inputs on the device, ready to run any module of the same interface."""

    unit: str
    """`tokens` or `items`: what `units` counts."""
    units: int
    """Tokens or items that one call processes (decode: new tokens over the whole batch)."""
    calls: int
    """Forward passes in one call (decode: one per new token), for per-step figures."""

    def ready(self, module: nn.Module) -> None:
        """Prepares for `module` as it is now, untimed: inputs in its dtype, a cache filled with the prompt.

        Called again whenever a step has changed the module; `run` calls it for a module it has not seen.
        """
        ...

    def run(self, module: nn.Module) -> Any:
        """Does the work once, without gradients. Never synchronizes."""
        ...

    def once(self, module: nn.Module) -> Any:
        """The pass that `run` makes `calls` times, once. The plan traces it on meta tensors; `ready` has been called."""
        ...

    def kept(self, module: nn.Module) -> Sequence[Tensor]:
        """Tensors that one pass hands on to the next in place: the KV cache of `module`, or nothing."""
        ...

    def flops(self, module: nn.Module) -> int | None:
        """Floating-point operations of one call on the unmodified module (may be on meta), products counted twice."""
        ...

    def bytes(self, module: nn.Module) -> int | None:
        """Fewest bytes that one call must read and write: weights as stored, KV cache, once per forward pass."""
        ...


@runtime_checkable
class Workload(Protocol):
    """A frozen dataclass of a workload's YAML keys."""

    kind: ClassVar[str]
    families: ClassVar[tuple[str, ...]]
    """Model families it runs."""
    uses_cache: ClassVar[bool]

    def check(self, loaded: Loaded) -> Iterator[Problem]:
        """What is wrong with this workload for this model (a skeleton will do)."""
        ...

    def example(self, loaded: Loaded, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Arguments of one small forward pass on `device` (meta while planning), for transforms that look at data flow.

        None where the model brings nothing to be run on, which `check` tells.
        """
        ...

    def prepare(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int = 0) -> Work:
        """Inputs for the timed calls, on the device."""
        ...


def begin_pass(device: torch.device) -> None:
    """Tells CUDA graphs that a new forward pass begins, so that they may reuse the memory of the one before.

    With each block compiled by itself, PyTorch would otherwise take every block for a new pass and overwrite what the
    block before it has just returned.
    """
    if device.type == "cuda":
        import torch

        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch ships it untyped


def moved(arguments: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a pass with every tensor in them on `device`, within lists and dictionaries too."""
    import torch
    from torch.utils._pytree import tree_map_only

    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)
    return found


def token_ids(loaded: Loaded, data: DataSource, shape: tuple[int, int], device: torch.device, seed: int) -> Tensor:
    """Token ids from the data set, int64, of `shape` [batch, tokens], on `device`; empty ones on the meta device."""
    import torch

    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    return data.tokens(loaded, shape[0] * shape[1], seed).reshape(shape).to(device)


def example_ids(loaded: Loaded, device: torch.device) -> Tensor:
    """Token ids [2, 8] of one small forward pass. All different, and from the middle of the vocabulary: repeated and special
    tokens make activations that no text makes."""
    import torch

    vocabulary = loaded.vocab_size or 16
    return (vocabulary // 3 + torch.arange(16, device=device)).remainder(vocabulary).reshape(2, 8)


def not_positive(where: str, **sizes: int) -> Iterator[Problem]:
    """A problem for each size that is below 1."""
    for name, size in sizes.items():
        if size < 1:
            yield Problem(where=f"{where}.{name}", what=f"must be 1 or more, is {size}", fix=f"{where}.{name}=1")


def too_long(loaded: Loaded, field: str, tokens: int, more: int = 0) -> Iterator[Problem]:
    """A problem if `tokens` and the `more` that follow are beyond the positions that the model was made for."""
    limit = getattr(getattr(loaded.module, "config", None), "max_position_embeddings", None)
    if limit is not None and tokens + more > limit:
        what = f"{tokens + more} tokens are more than the {limit} positions of {loaded.name}"
        yield Problem(where=f"workload.{field}", what=what, fix=f"workload.{field}={max(1, limit - more)}")
