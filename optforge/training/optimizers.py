"""Optimizers by name, and the two ways to train weights of a lower precision than their updates need.

A bf16 weight has 8 bits of mantissa: an update smaller than 1/256 of it is lost when it is rounded to nearest. `Chunked` keeps
fp32 weights beside the model's, or rounds up or down at random, so that small updates arrive on average. It works through
chunks of weights, so that what it needs in fp32 for a moment stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optforge.errors import PlanError, Problem
from optforge.training.settings import Settings, take_master

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ADAMW, SGD, ADAMW_8BIT = "adamw", "sgd", "adamw_8bit"
FUSED = ("cpu", "cuda")
"""Devices whose optimizers PyTorch has as one kernel."""
PIECE = 16 << 20
"""Most elements of a weight that are updated at once: their fp32 copies take 64 MiB each."""
QUANTIZED_FROM, BLOCK, TABLE_BYTES = 4096, 256, 1024
"""Of torchao's 8-bit states (Dettmers and others, 8-bit optimizers via block-wise quantization, 2021, section 2): tensors of
this size and more, one fp32 scale for each block, and for each tensor the 256 fp32 values that its codes stand for."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What every optimizer is told."""

    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    seed: int = 0


def make(parameters: Sequence[nn.Parameter], name: str, settings: Settings, rates: Rates) -> torch.optim.Optimizer | Chunked:
    """The optimizer of these weights.

    Args:
        parameters: all that are trained, on one device.
        name: the workload's optimizer; `settings.optimizer` goes before it.
        settings: masters and stochastic rounding apply to weights in bf16 and fp16; the others are updated as they are.
    """
    name = settings.optimizer or name

    def plain(weights: Sequence[Tensor]) -> torch.optim.Optimizer:
        return _plain(weights, name, rates)

    if not (settings.masters or settings.stochastic or settings.offload):
        return plain(parameters)
    return Chunked(parameters, plain, stochastic=settings.stochastic, host=settings.offload, seed=rates.seed)


def state_bytes(parameter: Tensor, name: str, settings: Settings) -> int:
    """Bytes that the optimizer keeps on the device for one weight, masters included; from its shape and dtype alone."""
    if settings.offload:
        return 0
    name = settings.optimizer or name
    count, size = parameter.numel(), parameter.element_size()
    low = size == 2 and (settings.masters or settings.stochastic)
    masters = 4 * count if low and settings.masters else 0
    if name == SGD:
        return masters
    each = 4 if low and settings.masters else size
    if name == ADAMW_8BIT:
        pieces = [end - start for start, end in _spans(count)] if low else [count]
        return masters + sum(_eight_bit_bytes(piece, each) for piece in pieces)
    return masters + 2 * each * count


def _eight_bit_bytes(count: int, element_bytes: int) -> int:
    """Of both states of so many elements; small and uneven ones stay in the dtype of the weights."""
    if count < QUANTIZED_FROM or count % BLOCK:
        return 2 * element_bytes * count
    return 2 * (count + 4 * count // BLOCK + TABLE_BYTES)


def set_rate(optimizer: torch.optim.Optimizer | Chunked, rate: float) -> None:
    """Sets the learning rate of all groups; some optimizers keep it in a tensor that compiled code has seen."""
    import torch

    for group in _groups(optimizer):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def held_bytes(optimizer: torch.optim.Optimizer | Chunked) -> int:
    """Bytes of all states and masters that lie on the device by now."""
    if isinstance(optimizer, Chunked) and optimizer.host:
        return 0
    inner = optimizer.inner if isinstance(optimizer, Chunked) else [optimizer]
    masters = sum(master.numel() * master.element_size() for master in optimizer.masters()) if isinstance(optimizer, Chunked) else 0
    return masters + sum(_bytes(value) for one in inner for state in one.state.values() for value in state.values())


def _bytes(value: Any) -> int:
    """Of a tensor, a sharded one's own part, and of one that is made of others, those others'."""
    import torch

    if not isinstance(value, torch.Tensor):
        return 0
    local = getattr(value, "_local_tensor", value)
    if hasattr(local, "__tensor_flatten__"):
        return sum(_bytes(getattr(local, name)) for name in local.__tensor_flatten__()[0])
    return int(local.numel() * local.element_size()) if local.dim() else 0


def _groups(optimizer: torch.optim.Optimizer | Chunked) -> Iterator[dict[str, Any]]:
    for one in optimizer.inner if isinstance(optimizer, Chunked) else [optimizer]:
        yield from one.param_groups


def _plain(weights: Sequence[Tensor], name: str, rates: Rates) -> torch.optim.Optimizer:
    import torch

    fused = bool(weights) and all(weight.device.type in FUSED for weight in weights)
    if name == SGD:
        return torch.optim.SGD(weights, lr=rates.learning_rate, weight_decay=0.0, fused=fused)
    if name == ADAMW:
        return torch.optim.AdamW(weights, lr=rates.learning_rate, weight_decay=rates.weight_decay, fused=fused)
    if name == ADAMW_8BIT:
        return eight_bit()(weights, lr=rates.learning_rate, weight_decay=rates.weight_decay)
    raise ValueError(f"there is no optimizer {name}")


def eight_bit() -> Callable[..., torch.optim.Optimizer]:
    """torchao's AdamW with 8-bit states.

    Raises:
        PlanError: torchao is missing, or too old.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        problem = Problem(where="optimizer", what=f"8-bit states need torchao ({error})", fix="pip install torchao, or optimizer: adamw")
        raise PlanError(problem) from error
    kind: Callable[..., torch.optim.Optimizer] = AdamW8bit
    return kind


class Chunked:
    """Updates weights of low precision through fp32 ones, some at a time; weights in fp32 are updated as they are.

    With `stochastic` nothing is kept in fp32: weights and states become fp32 for the update and are rounded back at random
    (Zamirai and others, Revisiting BFloat16 training, 2020, section 4.1). Otherwise the fp32 weights stay, as masters
    (Micikevicius and others, Mixed precision training, 2017, section 3.1), and the model's are their rounded copies.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
        *,
        stochastic: bool,
        seed: int,
        host: bool = False,
    ) -> None:
        """
        Args:
            host: everything that is kept lies in the host's memory, fp32 weights too, and is updated there (Ren and others,
                ZeRO-Offload, 2021, section 4).
        """
        import torch

        trained = list(parameters)
        low = [parameter for parameter in trained if host or parameter.element_size() == 2]
        full = [parameter for parameter in trained if not host and parameter.element_size() != 2]
        self.host = host
        self.stochastic, self.low = stochastic, low
        pieces = [piece for parameter in low for piece in _pieces(parameter)]
        self.chunks = list(_chunks(pieces, PIECE))
        masters = {id(parameter): _flat(self._kept(take_master(parameter))) for parameter in low}
        self.held: list[list[Tensor]] = [[self._held(masters[id(one.parameter)], one) for one in chunk] for chunk in self.chunks]
        """The masters; with `stochastic` they have no content between two updates."""
        self.inner = [make(held) for held in self.held]
        self.full = full
        if full:
            self.inner.append(make(full))
        self.draw = torch.Generator(device=trained[0].device).manual_seed(seed) if stochastic else None
        if stochastic:
            self._empty()

    def masters(self) -> Iterator[Tensor]:
        """The fp32 weights that are kept."""
        yield from () if self.stochastic else (master for held in self.held for master in held)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (*self.low, *self.full):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def step(self) -> None:
        import torch

        with torch.no_grad():
            for chunk, held, inner in zip(self.chunks, self.held, self.inner, strict=False):  # the last may be that of fp32 weights
                if self.stochastic:
                    self._raised(chunk, held, inner)
                for piece, master in zip(chunk, held, strict=True):
                    gradient = piece.gradient()
                    master.grad = None if gradient is None else gradient.to(master.device, torch.float32)
                inner.step()
                for master in held:
                    master.grad = None
                self._lowered(chunk, held, inner)
            if self.full:
                self.inner[-1].step()

    def state_dict(self) -> dict[str, Any]:
        """Masters and states, in the order of the weights."""
        return {
            "inner": [one.state_dict() for one in self.inner],
            "masters": [] if self.stochastic else [[master.clone() for master in held] for held in self.held],
            "draw": None if self.draw is None else self.draw.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        import torch

        for one, stored in zip(self.inner, state["inner"], strict=True):
            one.load_state_dict(stored)
        with torch.no_grad():
            for held, masters in zip(self.held, state["masters"], strict=False):
                for master, stored in zip(held, masters, strict=True):
                    master.copy_(stored)
        if self.draw is not None:
            self.draw.set_state(state["draw"])
            for held, inner in zip(self.held, self.inner, strict=False):
                for master in held:  # PyTorch gives loaded states the dtype of their weight
                    _round_states(inner.state.get(master, {}), lambda value: value.bfloat16())

    def _kept(self, master: Tensor) -> Tensor:
        """Where the masters lie: on the weights' device, or in memory of the host that a GPU reads directly."""
        if not self.host or master.device.type == "cpu":
            return master.clone() if self.host else master
        return _local(master).cpu().pin_memory()

    def _held(self, master: Tensor, piece: _Piece) -> Tensor:
        """A piece's fp32 weights, of its own where nothing of them is kept."""
        part = master[piece.start : piece.end] if piece.sliced else master
        return part.clone() if self.stochastic else part

    def _raised(self, chunk: Sequence[_Piece], held: Sequence[Tensor], inner: torch.optim.Optimizer) -> None:
        """Weights and states of a chunk as fp32."""
        for piece, master in zip(chunk, held, strict=True):
            master.untyped_storage().resize_(4 * master.numel())
            master.copy_(piece.weight())
            _round_states(inner.state.get(master, {}), lambda value: value.float())

    def _lowered(self, chunk: Sequence[_Piece], held: Sequence[Tensor], inner: torch.optim.Optimizer) -> None:
        """The updated weights rounded into the model's; with `stochastic` the states too, and the fp32 ones let go."""
        for piece, master in zip(chunk, held, strict=True):
            if not self.stochastic:
                piece.weight().copy_(master)
                continue
            piece.weight().copy_(stochastic_bf16(master, self.draw))
            _round_states(inner.state.get(master, {}), lambda value: stochastic_bf16(value, self.draw))
            master.untyped_storage().resize_(0)

    def _empty(self) -> None:
        for held in self.held:
            for master in held:
                master.untyped_storage().resize_(0)


def _round_states(state: dict[str, Any], change: Callable[[Tensor], Tensor]) -> None:
    """Every state that has a number for each weight; the count of steps stays."""
    import torch

    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.dtype in (torch.float32, torch.bfloat16):
            state[name] = change(value)


def stochastic_bf16(value: Tensor, draw: torch.Generator | None = None) -> Tensor:
    """fp32 rounded to bf16, up with the probability of what truncation would cut off; infinities and NaN stay.

    The 16 bits that bf16 lacks are added to a uniform 16-bit number; the carry is the rounding.
    """
    import torch

    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=draw)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


@dataclass(frozen=True)
class _Piece:
    """A stretch of a weight's elements, or the whole of one whose elements do not lie in a row. Of a sharded weight this rank's part."""

    parameter: nn.Parameter
    start: int
    end: int
    sliced: bool

    def weight(self) -> Tensor:
        return self._of(self.parameter.detach())

    def gradient(self) -> Tensor | None:
        return None if self.parameter.grad is None else self._of(self.parameter.grad)

    def _of(self, tensor: Tensor) -> Tensor:
        local = _local(tensor)
        return local.reshape(-1)[self.start : self.end] if self.sliced else local


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _flat(master: Tensor) -> Tensor:
    local = _local(master)
    return local.reshape(-1) if local.is_contiguous() else local


def _spans(count: int) -> Iterator[tuple[int, int]]:
    yield from ((start, min(start + PIECE, count)) for start in range(0, count, PIECE))


def _pieces(parameter: nn.Parameter) -> Iterator[_Piece]:
    local = _local(parameter.detach())
    if not local.is_contiguous():
        yield _Piece(parameter, 0, local.numel(), sliced=False)
        return
    yield from (_Piece(parameter, start, end, sliced=True) for start, end in _spans(local.numel()))


def _chunks(pieces: Sequence[_Piece], elements: int) -> Iterator[list[_Piece]]:
    """The pieces in their order, cut where a chunk has `elements` elements."""
    chunk: list[_Piece] = []
    count = 0
    for piece in pieces:
        size = piece.end - piece.start
        if chunk and count + size > elements:
            yield chunk
            chunk, count = [], 0
        chunk.append(piece)
        count += size
    if chunk:
        yield chunk
