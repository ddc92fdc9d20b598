"""Train: steps of a model on real data: forward, loss, backward, clipping, optimizer.

Each timed call is the next step of a training, on data that it has not seen yet, with the gradients of several batches added up
where the workload says so. The loss is the model's own where it has one, so that memory and time are those of a user's
loop. What steps of a recipe change (autocast, master weights, another optimizer) is read from the model (`training.settings`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from optforge.data.base import DataSource
from optforge.distributed.world import share_of
from optforge.errors import DataError, Problem
from optforge.measure.size import nbytes
from optforge.measure.work import compute_dtype, count_flops, read_bytes
from optforge.models.base import FAMILIES, Loaded
from optforge.training import trainer as training
from optforge.training.loss import Objective, objective_of, takes_labels
from optforge.training.optimizers import Rates, state_bytes
from optforge.training.settings import Settings, settings_of
from optforge.training.stream import Batch, Stream
from optforge.training.trainer import Options, Trainer
from optforge.workloads.base import example_ids, moved, not_positive, token_ids, too_long

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Optimizer(Enum):
    adamw = "adamw"
    sgd = "sgd"


DISTINCT = 400
"""Steps' worth of data that is read at most; a longer training goes over it again, in another order."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """One optimizer step over `accumulate` batches of `batch_size` items."""

    kind: ClassVar[str] = "train"
    families: ClassVar[tuple[str, ...]] = FAMILIES
    uses_cache: ClassVar[bool] = False

    batch_size: int = 1
    """Sequences (of classifiers: images) in one forward and backward pass, on each device that has a batch of its own."""
    sequence: int = 512
    """Tokens of each sequence, real ones from the data set; for language models."""
    accumulate: int = 1
    """Batches whose gradients are added up before the optimizer moves the weights."""
    optimizer: Optimizer = Optimizer.adamw
    """adamw, or sgd without momentum, which keeps no state. A step of kind `optimizer` goes before it."""
    learning_rate: float = 1e-4
    """Reached after `warmup` steps and kept from there on."""
    weight_decay: float = 0.01
    """Of adamw."""
    clip: float | None = 1.0
    """Largest norm of all gradients together; longer ones are cut to it. null: none are."""
    warmup: int = 2
    """Steps over which the learning rate rises."""
    steps: int = 20
    """Steps of the training whose loss is compared with the baseline's."""
    held_out: int = 4
    """Batches that are never trained on, for the loss before and after."""

    def check(self, loaded: Loaded) -> Iterator[Problem]:
        sizes = {name: getattr(self, name) for name in ("batch_size", "accumulate", "steps", "held_out")}
        yield from not_positive("workload", **sizes)
        if not self.learning_rate > 0:
            what = f"must be above 0, is {self.learning_rate}"
            yield Problem(where="workload.learning_rate", what=what, fix="workload.learning_rate=1e-4")
        if self.clip is not None and not self.clip > 0:
            yield Problem(where="workload.clip", what=f"must be above 0, is {self.clip}", fix="workload.clip=1.0, or null for none")
        if loaded.family == "causal_lm":
            if self.sequence < 2:
                yield Problem(where="workload.sequence", what=f"must be 2 or more, is {self.sequence}", fix="workload.sequence=512")
            yield from too_long(loaded, "sequence", self.sequence)
        elif loaded.family == "image_classifier" and loaded.image_shape is None:
            what = "the model does not say the shape of its images"
            yield Problem(where="workload", what=what, fix="set image_shape on the loaded model")
        elif loaded.family == "module" and loaded.example is None:
            what = "the model comes with no example to train on"
            yield Problem(where="workload", what=what, fix="let model.factory return the module and an example")
        if not any(parameter.requires_grad for parameter in loaded.module.parameters()):
            what = f"no weight of {loaded.name} asks for a gradient"
            yield Problem(where="workload", what=what, fix="set requires_grad on those that are to be trained, or workload=forward")

    def example(self, loaded: Loaded, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Two items: tokens, images of random values in the model's dtype, or the module's own example."""
        import torch

        if loaded.family == "causal_lm":
            options = {"use_cache": False} if takes_labels(loaded.module) else {}
            return (), {"input_ids": example_ids(loaded, device), **options}
        if loaded.family == "image_classifier":
            if loaded.image_shape is None:
                return None
            return (torch.rand((2, *loaded.image_shape), dtype=compute_dtype(loaded.module), device=device),), {}
        return None if loaded.example is None else moved(loaded.example, device)

    def prepare(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int = 0) -> TrainWork:
        """The data on `device`: token ids int64 [items, sequence], or images fp32 and labels, in batches that a seed orders."""
        if loaded.family == "causal_lm":
            source = self._text(loaded, data, device, seed)
        elif loaded.family == "image_classifier":
            source = self._images(loaded, data, device, seed)
        else:
            source = self._examples(loaded, device)
        options = Options(
            optimizer=self.optimizer.value,
            accumulate=self.accumulate,
            clip=self.clip,
            warmup=self.warmup,
            rates=Rates(learning_rate=self.learning_rate, weight_decay=self.weight_decay, seed=seed),
        )
        batch = 1 if loaded.family == "module" else self.batch_size  # its items are batches already
        held, learned = source.split(self.held_out * batch if device.type != "meta" else 0)
        stream = Stream(len(learned), lambda picked: source.take([learned[index] for index in picked]), batch_size=batch, seed=seed)
        return TrainWork(
            stream=stream,
            first=stream.again().next(),
            held_out=[source.take(held[at : at + batch]) for at in range(0, len(held), batch)],
            objective=objective_of(loaded),
            options=options,
            unit="tokens" if loaded.family == "causal_lm" else "items",
            each=self.sequence if loaded.family == "causal_lm" else source.each,
            device=device,
        )

    @property
    def _items(self) -> int:
        """Items of the steps and of what is held out."""
        steps = min(self.steps, DISTINCT) * self.accumulate
        return (steps + self.held_out) * self.batch_size

    def _text(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int) -> _Source:
        """Sequences of the corpus; where it is shorter than the training wants, a half as many, and so on."""
        items = self.batch_size * self.accumulate if device.type == "meta" else self._items
        least = (self.held_out + 1) * self.batch_size
        while True:
            try:
                ids = token_ids(loaded, data, (items, self.sequence), device, seed)
                break
            except DataError:
                if items <= least:
                    raise
                items = max(least, items // 2)
        takes = takes_labels(loaded.module)

        def take(picked: Sequence[int]) -> Batch:
            chosen = ids[_at(picked, ids)]
            own = {"labels": chosen, "use_cache": False} if takes else {}
            return Batch(kwargs={"input_ids": chosen, **own})

        return _Source(rows=items, take=take)

    def _images(self, loaded: Loaded, data: DataSource, device: torch.device, seed: int) -> _Source:
        """Images and labels from the part of the data that is for training, where it says which that is."""
        import torch

        if device.type == "meta":
            rows = self.batch_size * self.accumulate
            assert loaded.image_shape is not None, "check() refuses a classifier without the shape of its images"
            images = torch.empty((rows, *loaded.image_shape), device=device)
            labels = torch.empty(rows, dtype=torch.int64, device=device)
        else:
            for_training = getattr(data, "for_calibration", lambda: None)() or data
            parts = list(for_training.batches(loaded, self._items, self.batch_size, seed))
            if any(labels is None for _, labels in parts):
                fix = "use data=fashion_mnist, or a data.factory with labels"
                raise DataError(Problem(where="data", what="has no labels to train on", fix=fix))
            images, labels = (torch.cat([part[side] for part in parts]).to(device) for side in (0, 1))
        return _Source(rows=len(images), take=lambda picked: Batch(args=(images[_at(picked, images)],), labels=labels[_at(picked, labels)]))

    def _examples(self, loaded: Loaded, device: torch.device) -> _Source:
        """The batches of a module of no known kind; where it brings none, its one example again and again."""
        from torch.utils._pytree import tree_leaves

        assert loaded.example is not None, "check() refuses a module without an example"
        found = [loaded.example]
        if loaded.batches is not None and device.type != "meta":
            found = loaded.batches(min(self.steps, DISTINCT) * self.accumulate + self.held_out)
        batches = [moved(example, device) for example in found]
        sizes = [int(leaf.shape[0]) for leaf in tree_leaves(batches[0]) if getattr(leaf, "ndim", 0) > 0]

        def take(picked: Sequence[int]) -> Batch:
            args, kwargs = batches[picked[0]]
            return Batch(args=args, kwargs=kwargs)

        return _Source(rows=len(batches), take=take, each=sizes[0] if sizes else 1)

    def state_bytes(self, parameter: Tensor, settings: Settings) -> int:
        """Bytes that the optimizer keeps for one trained weight."""
        return state_bytes(parameter, self.optimizer.value, settings)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Items that lie on the device, and what makes a batch of some of them."""

    rows: int
    take: Any
    each: int = 1
    """Units (images) in one item."""

    def split(self, held: int) -> tuple[range, range]:
        """Numbers of the items that are held out, the last ones, and of those that are trained on."""
        held = min(held, self.rows - 1)
        return range(self.rows - held, self.rows), range(self.rows - held)


@dataclass(kw_only=True)
class TrainWork:
    """Data on the device, and per module a training of its own."""

    stream: Stream
    """Where every training begins; each has its own copy."""
    first: Batch
    """What `once` runs."""
    held_out: list[Batch]
    objective: Objective
    options: Options
    unit: str
    each: int
    """Tokens or images in one item."""
    device: torch.device
    ranks: int = 1
    """Batches that a step over several devices has at once. A module on one device makes the same step of them one after the other."""
    _trainers: WeakKeyDictionary[nn.Module, Trainer] = field(default_factory=WeakKeyDictionary, repr=False)

    @property
    def calls(self) -> int:
        """Forward and backward passes in one step, over all devices."""
        return self.options.accumulate * self.ranks

    @property
    def units(self) -> int:
        return self.calls * self.stream.batch_size * self.each

    def ready(self, module: nn.Module) -> None:
        """Ends the module's training, so that the next step begins one for its weights as they are then."""
        self._trainers.pop(module, None)

    def trainer(self, module: nn.Module, *, seed: int | None = None) -> Trainer:
        """The training of a module, begun where it has none yet.

        Args:
            seed: of the order of the data; None takes the run's.
        """
        if module not in self._trainers:
            share, stream = share_of(module), self.stream.again(seed=seed)
            stream.rank, stream.ranks = share.batch, share.batches
            options = replace(self.options, accumulate=self.calls // share.batches)
            self._trainers[module] = Trainer(module, self.objective, stream, options)
        return self._trainers[module]

    def run(self, module: nn.Module) -> Tensor:
        """The next step of the module's training, in place; the mean loss of its batches, without a gradient, shape []."""
        return self.trainer(module).step()

    def once(self, module: nn.Module) -> Tensor:
        """Forward and backward of the first batch, without the update; its share of the loss. Gradients stay on the weights."""
        for parameter in module.parameters():
            parameter.grad = None
        with training.training(module):
            return training.backward(module, self.objective, self.first, 1 / self.calls)

    def probe(self, module: nn.Module) -> Tensor:
        """The norm of each gradient over the first batch, fp32 [weights], without an update: what two forms of one module must
        agree in. A loss that differs shows in them; beside them it would outweigh them."""
        import torch

        self.once(module)
        norms = [torch.zeros((), device=self.device) if p.grad is None else _whole(p.grad.float().norm()) for p in training.trained(module)]
        for parameter in module.parameters():
            parameter.grad = None
        return torch.stack(norms)

    def loss_held_out(self, module: nn.Module) -> float:
        """Mean loss over the batches that are never trained on."""
        return training.held_out(module, self.objective, iter(self.held_out))

    def held_bytes(self, module: nn.Module) -> dict[str, int]:
        """Bytes of a module's weights, gradients and optimizer states."""
        return self.trainer(module).held_bytes()

    def kept(self, module: nn.Module) -> tuple[Tensor, ...]:
        return ()

    def flops(self, module: nn.Module) -> int | None:
        """Operations of one step: each product of the forward pass has two of its size in the backward pass, one for the
        gradient of its input and one for that of its weight. Attention in full; the update is no product, and what is
        computed again in the backward pass is not counted."""
        import torch

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.zeros(value.shape, dtype=compute_dtype(module) if value.is_floating_point() else value.dtype)

        def call(forward: Any) -> Any:
            kwargs = {key: fake(value) for key, value in self.first.kwargs.items() if key != "labels" or self.unit != "tokens"}
            return forward(*(fake(value) for value in self.first.args), **kwargs)

        forward = count_flops(module, call)
        return None if forward is None else 3 * self.calls * forward

    def bytes(self, module: nn.Module) -> int | None:
        """Per batch the weights forward and backward and the gradients written (from the second batch on, read too); then
        the update. Activations are left out, since a device with room enough in its caches would never write them."""
        parameters, settings = training.trained(module), settings_of(module)
        weights = sum(nbytes(parameter) for parameter in parameters)
        states = sum(state_bytes(parameter, self.options.optimizer, settings) for parameter in parameters)
        calls = self.calls // share_of(module).batches
        reads = 2 * calls * read_bytes(module, self.units // self.calls)
        return reads + (2 * calls - 1) * weights + 3 * weights + 2 * states


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor that several devices share."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _at(picked: Sequence[int], like: Tensor) -> Tensor:
    import torch

    return torch.tensor(picked, dtype=torch.int64).to(like.device)
