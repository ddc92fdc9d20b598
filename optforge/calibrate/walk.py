"""Walks a model block by block with calibration samples: a block is observed, changed, and run once more to feed the next.

What a block is given then contains the errors of the blocks before it, which the next one can make up for. Only the block at
work has to be on the device; what flows between the blocks lies where the model lies. A model whose repeated layers do not
form one chain (an encoder and a decoder, convolutions of changing shape) is a single block.

The arguments of the blocks (masks, rotary tables) are caught in one pass in which no block computes anything: each block's
forward is replaced by one that notes its arguments and returns its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from optforge.calibrate.kept import fingerprint
from optforge.calibrate.samples import to
from optforge.measure.mode import evaluating
from optforge.models.base import Example, Tell
from optforge.select import original_name, repeated_blocks

See = Callable[[str, Tensor], None]
"""Is given the name of a layer and its input [..., K] of one sample."""


@dataclass(kw_only=True)
class Block:
    """A part of the model on the device, and the arguments that each sample gives it. The whole model has the name ''."""

    name: str
    module: nn.Module
    calls: list[Example] = field(repr=False)
    device: torch.device

    def inside(self, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Those of `layers` (full names) that lie in this block."""
        own = {id(module) for module in self.module.modules()}
        return {name: layer for name, layer in layers.items() if id(layer) in own}

    def observe(self, layers: Mapping[str, nn.Module], see: See) -> None:
        """Runs every sample through the block as it is now; `see` is told each input of each of the layers."""
        with _watched(layers, see):
            for call in self.calls:
                self.run(call)

    def outputs(self) -> Iterator[Any]:
        """What the block gives for each sample as it is now."""
        return map(self.run, self.calls)

    def run(self, call: Example) -> Any:
        args, kwargs = to(call, self.device)
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def fingerprint(self) -> str:
        """Tells this block with these inputs from any other: of its tensors and of what each sample gives it."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        flows = [leaf for args, kwargs in self.calls for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
        return fingerprint([*tensors, *flows])


def walk(
    model: nn.Module,
    examples: Sequence[Example],
    visit: Callable[[Block], None],
    *,
    device: torch.device,
    outside: Mapping[str, nn.Module] | None = None,
    tell: Tell | None = None,
    title: str = "calibrate",
) -> bool:
    """Visits each repeated block in order with what the samples give it after all earlier visits; then the rest of the model.

    Args:
        model: on any device, in any mode; modes and places are as before when the walk ends.
        examples: arguments of one forward pass each; on the CPU or with the model.
        visit: may change the block's parameters, and replace layers in it.
        device: where a block is while it is visited.
        outside: layers that matter and lie outside the blocks (by full name). Where there are some, the whole model is visited
            once more at the end, in a block of the name '' whose blocks compute nothing anew.
        tell: is told `title` and the fraction of the blocks that is done.

    Returns:
        Whether the model was walked block by block; False if it was one block.
    """
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        chain = _Chain.of(model, examples, device)
        if chain is None:
            home = _home(model)
            visit(Block(name="", module=model, calls=[to(example, home) for example in examples], device=home))
            return False
        for index in range(len(chain.blocks)):
            if tell is not None:
                tell(title, index / len(chain.blocks))
            with chain.block(index) as block:
                visit(block)
                chain.advance(index, block)
        if outside:
            with chain.rest() as block:
                visit(block)
        if tell is not None:
            tell(title, 1.0)
    return True


@dataclass(kw_only=True)
class _Chain:
    """The repeated blocks of a model in the order in which they run, and what flows between them."""

    model: nn.Module
    examples: Sequence[Example]
    device: torch.device
    blocks: dict[str, nn.Module]
    hidden: list[Tensor]
    """What the next block is given, one of each sample."""
    others: list[list[Example]]
    """The other arguments of each block (outer index) for each sample: without its first, the hidden state."""
    key: str | None
    """The keyword that the hidden state is passed by; None: as the first positional argument."""
    wraps: bool
    """Whether a block returns a tuple that begins with the hidden state."""

    @classmethod
    def of(cls, model: nn.Module, examples: Sequence[Example], device: torch.device) -> _Chain | None:
        """The chain, or None where the blocks are not one."""
        blocks = {original_name(name): block for name, block in repeated_blocks(model).items()}
        parents = {name.rpartition(".")[0] for name in blocks}
        if len(parents) != 1 or not examples:
            return None
        home = _home(model)
        first, *_ = blocks.values()
        caught = _caught([first], model, to(examples[0], home))
        if not caught:
            return None
        (call,) = caught
        found = _split(call)
        if found is None:
            return None
        key, hidden, _ = found
        with _at(first, device):
            args, kwargs = to(call, device)
            output = first(*args, **kwargs)
        wraps = isinstance(output, tuple)
        state = output[0] if wraps else output
        if not isinstance(state, Tensor) or state.shape != hidden.shape:
            return None
        states, others = [], [[] for _ in blocks]  # type: list[Tensor], list[list[Example]]
        for example in examples:
            calls = _caught(list(blocks.values()), model, to(example, home), wraps=wraps)
            splits = [_split(one) for one in calls] if calls is not None else []
            if len(splits) != len(blocks) or any(one is None or one[0] != key for one in splits):
                return None
            states.append(splits[0][1])  # type: ignore[index]  # None was sorted out above
            for index, one in enumerate(splits):
                others[index].append(one[2])  # type: ignore[index]
        return cls(model=model, examples=examples, device=device, blocks=blocks, hidden=states, others=others, key=key, wraps=wraps)

    @contextmanager
    def block(self, index: int) -> Iterator[Block]:
        name, module = list(self.blocks.items())[index]
        with _at(module, self.device):
            yield Block(name=name, module=module, calls=self._calls(index), device=self.device)

    def _calls(self, index: int) -> list[Example]:
        if self.key is None:
            return [((state, *args), kwargs) for state, (args, kwargs) in zip(self.hidden, self.others[index], strict=True)]
        return [(args, {self.key: state, **kwargs}) for state, (args, kwargs) in zip(self.hidden, self.others[index], strict=True)]

    def advance(self, index: int, block: Block) -> None:
        """Lets the block's outputs flow on, one sample at a time, and forgets its own arguments."""
        for at, output in enumerate(block.outputs()):
            state = output[0] if self.wraps else output
            self.hidden[at] = state.to(self.hidden[at].device)
        self.others[index] = []

    @contextmanager
    def rest(self) -> Iterator[Block]:
        """The whole model, whose blocks hand on what they have given already."""
        home = _home(self.model)
        states = cycle(self.hidden)  # a pass takes all of them in order, so each pass begins with the first

        def final(*args: Any, **kwargs: Any) -> Any:
            state = next(states)
            return (state,) if self.wraps else state

        *earlier, last = self.blocks.values()
        with ExitStack() as stack:
            for module in earlier:
                stack.enter_context(_replaced(module, _identity(self.wraps)))
            stack.enter_context(_replaced(last, final))
            yield Block(name="", module=self.model, calls=[to(example, home) for example in self.examples], device=home)


class _Stop(Exception):
    """Ends a pass once the last block has been reached."""


def _caught(blocks: list[nn.Module], model: nn.Module, example: Example, *, wraps: bool = False) -> list[Example] | None:
    """The arguments of each of `blocks` in one pass that computes none of them; None where they are not called once each, in order."""
    found: list[tuple[int, Example]] = []

    def catch(index: int) -> Callable[..., Any]:
        passes = _identity(wraps)

        def forward(*args: Any, **kwargs: Any) -> Any:
            found.append((index, (args, kwargs)))
            if index == len(blocks) - 1:
                raise _Stop
            return passes(*args, **kwargs)

        return forward

    with ExitStack() as stack:
        for index, module in enumerate(blocks):
            stack.enter_context(_replaced(module, catch(index)))
        args, kwargs = example
        with suppress(_Stop):
            model(*args, **kwargs)
    return [call for _, call in found] if [index for index, _ in found] == list(range(len(blocks))) else None


def _identity(wraps: bool) -> Callable[..., Any]:
    """A forward that hands on its first tensor."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        state = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return (state,) if wraps else state

    return forward


def _split(call: Example) -> tuple[str | None, Tensor, Example] | None:
    """How the hidden state is passed (its keyword, or None: first of all), the state, and the other arguments."""
    args, kwargs = call
    if args and isinstance(args[0], Tensor):
        return None, args[0], (args[1:], kwargs)
    key = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    if args or key is None:
        return None
    return key, kwargs[key], ((), {name: value for name, value in kwargs.items() if name != key})


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for one instance; everything else of it stays, since models read attributes of their blocks."""
    before = vars(module).get("forward")
    module.forward = forward  # of the instance, for the length of a pass
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextmanager
def _watched(layers: Mapping[str, nn.Module], see: See) -> Iterator[None]:
    """Tells `see` what each layer is given: a convolution what it convolves, after what a subclass makes of its input (padding)."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def seen(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                see(name, args[0].detach())

        return seen

    with ExitStack() as stack:
        for name, layer in layers.items():
            if isinstance(layer, nn.Conv2d):
                stack.enter_context(_convolving(layer, hook(name)))
            else:
                stack.callback(layer.register_forward_pre_hook(hook(name)).remove)
        yield


@contextmanager
def _convolving(conv: nn.Conv2d, seen: Callable[[nn.Module, tuple[Any, ...]], None]) -> Iterator[None]:
    convolve = conv._conv_forward

    def forward(*args: Any) -> Tensor:
        seen(conv, args)
        result: Tensor = convolve(*args)
        return result

    vars(conv)["_conv_forward"] = forward  # of the instance, for the length of a pass
    try:
        yield
    finally:
        del vars(conv)["_conv_forward"]


@contextmanager
def _at(module: nn.Module, device: torch.device) -> Iterator[None]:
    """A module on `device` for the length of the block, then where it was."""
    home = _home(module)
    if home != device:
        module.to(device)
    try:
        yield
    finally:
        if home != device:
            module.to(home)


def _home(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
