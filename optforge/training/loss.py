"""The loss of a batch, by the kind of model: next token, class, or what the model itself calls its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from optforge.measure.work import compute_dtype
from optforge.models.base import Loaded
from optforge.training.stream import Batch

if TYPE_CHECKING:
    from torch import Tensor, nn

Objective = Callable[["nn.Module", Batch], "Tensor"]
"""The mean loss of a batch in nats, shape []."""


def objective_of(loaded: Loaded) -> Objective:
    """How a model of this family is judged: a language model on the next token, a classifier on its labels, any other
    module on the loss that it returns."""
    if loaded.family == "causal_lm":
        return own if takes_labels(loaded.module) else next_token
    return classes if loaded.family == "image_classifier" else own


def takes_labels(module: nn.Module) -> bool:
    """Whether the model's forward computes the loss itself, as those of transformers do."""
    return "labels" in inspect.signature(type(module).forward).parameters


def own(module: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model returns.

    Raises:
        ValueError: it returns none.
    """
    loss = found(module(*batch.args, **batch.kwargs))
    if loss is None:
        raise ValueError(f"{type(module).__name__} returns no loss")
    return loss


def found(output: Any) -> Tensor | None:
    """The loss in an output: its attribute or key `loss`, or the output itself where it is a single number."""
    import torch

    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def next_token(module: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each token after the first, in fp32, of a model that gives logits [batch, tokens, vocabulary]."""
    import torch.nn.functional as F

    (ids,) = batch.args or (batch.kwargs["input_ids"],)
    output = module(*batch.args, **batch.kwargs)
    logits: Tensor = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def classes(module: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of logits [items, classes] in fp32; the images follow the module's dtype."""
    import torch.nn.functional as F

    assert batch.labels is not None, "a classifier's batches have labels"
    images = batch.args[0].to(compute_dtype(module))
    output = module(images)
    logits: Tensor = getattr(output, "logits", output)
    return F.cross_entropy(logits.float(), batch.labels)
