"""One forward pass over a batch: the workload of classifiers and of any module that is only called.

A language model gives logits for every position; a classifier gets a batch of its data set; any other module gets the
example that came with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from optforge.data.base import DataSource
from optforge.errors import Problem
from optforge.measure.work import compute_dtype, count_flops, read_bytes, tensor_bytes
from optforge.models.base import FAMILIES, Loaded
from optforge.workloads.base import begin_pass, example_ids, moved, not_positive, token_ids

if TYPE_CHECKING:
    import torch
    from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One forward pass over `batch_size` items."""

    kind: ClassVar[str] = "forward"
    families: ClassVar[tuple[str, ...]] = FAMILIES
    uses_cache: ClassVar[bool] = False

    batch_size: int = 1
    """Items in a batch; a module that comes with an example runs that example as it is."""
    sequence: int = 256
    """Tokens of each item, for language models."""

    def check(self, loaded: Loaded) -> Iterator[Problem]:
        yield from not_positive("workload", batch_size=self.batch_size, sequence=self.sequence)
        if loaded.family == "module" and loaded.example is None:
            fix = "let model.factory return the module and an example; from Python, give example=(args, kwargs)"
            yield Problem(where="workload", what="the model comes with no example to run", fix=fix)
        if loaded.family == "image_classifier" and loaded.image_shape is None:
            yield Problem(
                where="workload", what="the model does not say the shape of its images", fix="set image_shape on the loaded model"
            )

    def example(self, loaded: Loaded, device: torch.device) -> Arguments | None:
        """Two items: tokens, images of random values in the model's dtype, or the module's own example; None where `check` misses it."""
        import torch

        if loaded.family == "causal_lm":
            ids = example_ids(loaded, device)
            return (), {"input_ids": ids, **_without_cache(loaded)}
        if loaded.family == "image_classifier":
            if loaded.image_shape is None:
                return None
            return (torch.rand((2, *loaded.image_shape), dtype=compute_dtype(loaded.module), device=device),), {}
        return None if loaded.example is None else moved(loaded.example, device)

    def prepare(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int = 0) -> ForwardWork:
        """The batch on `device`; on the meta device its shapes, without reading data."""
        if loaded.family == "causal_lm":
            ids = token_ids(loaded, data, (self.batch_size, self.sequence), device, seed)
            arguments: Arguments = ((), {"input_ids": ids, **_without_cache(loaded)})
            return ForwardWork(arguments=arguments, unit="tokens", units=ids.numel(), tokens=ids.numel())
        if loaded.family == "image_classifier":
            images = self._images(loaded, data, device, seed)
            return ForwardWork(arguments=((images,), {}), dtype=images.dtype, unit="items", units=len(images))
        assert loaded.example is not None, "check() refuses a module without an example"
        arguments = moved(loaded.example, device)
        tensors = [value for value in (*arguments[0], *arguments[1].values()) if getattr(value, "ndim", 0) > 0]
        return ForwardWork(
            arguments=arguments,
            dtype=compute_dtype(loaded.module),
            unit="items",
            units=int(tensors[0].shape[0]) if tensors else 1,
        )

    def _images(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int) -> torch.Tensor:
        import torch

        if device.type == "meta":
            assert loaded.image_shape is not None, "check() refuses a classifier without the shape of its images"
            return torch.empty((self.batch_size, *loaded.image_shape), device=device)
        images, _ = next(iter(data.batches(loaded, self.batch_size, self.batch_size, seed)))
        # a data set with fewer images than the batch is gone over again: the time is that of the batch that was asked for
        return images[torch.arange(self.batch_size) % len(images)].to(device)


@dataclass(kw_only=True)
class ForwardWork:
    """A batch, and per module that batch in the module's dtype."""

    arguments: Arguments
    unit: str
    units: int
    dtype: torch.dtype | None = None
    """Floating-point inputs of this dtype follow the module's; other inputs stay as they are."""
    tokens: int = 0
    calls: int = 1
    _ready: WeakKeyDictionary[nn.Module, Arguments] = field(default_factory=WeakKeyDictionary, repr=False)

    def ready(self, module: nn.Module) -> None:
        """Casts the inputs to the dtype that the module computes in."""
        dtype = compute_dtype(module)

        def cast(value: Any) -> Any:
            return (
                value.to(dtype) if self.dtype is not None and dtype is not None and getattr(value, "dtype", None) == self.dtype else value
            )

        self._ready[module] = _mapped(self.arguments, cast)

    def run(self, module: nn.Module) -> Any:
        """The logits of a language model, or whatever the module returns."""
        import torch

        if module not in self._ready:
            self.ready(module)
        args, kwargs = self._ready[module]
        with torch.no_grad():
            begin_pass(_device(args, kwargs))
            output = module(*args, **kwargs)
        return getattr(output, "logits", output)

    def once(self, module: nn.Module) -> Any:
        return self.run(module)

    def kept(self, module: nn.Module) -> tuple[torch.Tensor, ...]:
        return ()

    def flops(self, module: nn.Module) -> int | None:
        """Operations of the pass; see `count_flops`."""
        dtype = compute_dtype(module)

        def fake(value: Any) -> Any:
            import torch

            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty(value.shape, dtype=dtype if dtype is not None and value.dtype == self.dtype else value.dtype)

        def call(forward: Any) -> Any:
            args, kwargs = _mapped(self.arguments, fake)
            return forward(*args, **kwargs)

        return count_flops(module, call)

    def bytes(self, module: nn.Module) -> int | None:
        """Weights once, and the inputs once."""
        args, kwargs = self.arguments
        return read_bytes(module, self.tokens) + tensor_bytes((*args, *kwargs.values()))


def _without_cache(loaded: Loaded) -> dict[str, Any]:
    """The argument that turns a transformers model's KV cache off; a language model of another make has none."""
    return {"use_cache": False} if "use_cache" in inspect.signature(type(loaded.module).forward).parameters else {}


def _mapped(arguments: Arguments, change: Any) -> Arguments:
    args, kwargs = arguments
    return tuple(change(value) for value in args), {key: change(value) for key, value in kwargs.items()}


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    import torch

    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
