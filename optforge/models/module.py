"""A module of the user's own: a factory to call, and optionally a checkpoint to fill it with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optforge import callables, checkpoint
from optforge.errors import ModelError, Problem
from optforge.models.base import FAMILIES, Companions, Loaded, Tell, as_example
from optforge.pretrained import check_dtype, torch_dtype

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class FactoryModel:
    """What `factory(**arguments)` returns: an nn.Module, or an nn.Module and an example of its arguments."""

    factory: str
    """package.module:callable that returns the module, or the module and an example (a tensor, tuple or dict)."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    checkpoint: str | None = None
    """.safetensors, .pt, .pth, .bin or .ckpt with the weights; null keeps those that the factory made."""
    family: str = "module"
    """module (runs on its example), image_classifier (images to logits), causal_lm (input_ids to logits)."""
    image_shape: tuple[int, ...] | None = None
    """Channels, height and width, for image_classifier."""
    tokenizer: str | None = None
    """Folder of a transformers tokenizer, for causal_lm on text."""
    dtype: str = "fp32"
    """fp32, fp16 or bf16: floating-point weights are cast to it."""
    trust: bool = False
    """true: a pickled checkpoint may run code while it is read."""
    allow_nonfinite: bool = False
    """true: NaN or Inf in the weights is noted instead of refused."""

    def check(self) -> Iterator[Problem]:
        yield from check_dtype(self.dtype)
        if ":" not in self.factory:
            what = f"{self.factory!r} is no callable's name" if self.factory else "is required and has no value"
            yield Problem(where="model.factory", what=what, fix="write package.module:callable")
        if self.family not in FAMILIES:
            yield Problem(where="model.family", what=f"unknown family {self.family!r}", fix=f"one of {', '.join(FAMILIES)}")
        if self.family == "image_classifier" and (self.image_shape is None or len(self.image_shape) != 3):
            yield Problem(where="model.image_shape", what="is required for image_classifier", fix="write model.image_shape=[3,224,224]")
        if self.checkpoint is not None and not Path(self.checkpoint).expanduser().is_file():
            yield Problem(where="model.checkpoint", what=f"{self.checkpoint} is not a file")

    def skeleton(self) -> Loaded:
        import torch

        callables.resolve(self.factory, "model.factory")  # before meta: tensors that its module makes on import stay real for `load`
        with torch.device("meta"):
            loaded = self._built()
        loaded.module = loaded.module.to("meta")
        loaded.example = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), loaded.example)
        return loaded

    def load(self, seed: int = 0, tell: Tell | None = None) -> Loaded:
        """Calls the factory under the seed, fills in the checkpoint, and checks that every weight has finite values."""
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loaded = self._built()
        where = self.factory
        if self.checkpoint is not None:
            path = Path(self.checkpoint).expanduser()
            where = str(path)
            checkpoint.fill_(loaded.module, checkpoint.read(path, trust=self.trust), where)
            loaded.module.to(torch_dtype(self.dtype))
        else:
            loaded.notes.append("the weights are those that the factory made")
        checkpoint.require_materialised(loaded.module, where)
        loaded.notes += checkpoint.require_finite(loaded.module.state_dict().items(), where, allow=self.allow_nonfinite)
        loaded.digest = checkpoint.module_digest(loaded.module)
        loaded.tokenizer = self.companions().tokenizer
        return loaded

    def companions(self) -> Companions:
        """The tokenizer that the user named."""
        if self.tokenizer is None:
            return Companions()
        from transformers import AutoTokenizer

        return Companions(tokenizer=AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True))

    def _built(self) -> Loaded:
        """The factory's module in the run's dtype, in eval mode."""
        import torch

        from optforge.masks import fold_masks_, said

        made = callables.resolve(self.factory, "model.factory")(**self.arguments)
        module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(module, torch.nn.Module):
            raise ModelError(Problem(where="model.factory", what=f"{self.factory} returned {type(module).__name__}, not an nn.Module"))
        notes = said(fold_masks_(module))
        shape = self.image_shape
        return Loaded(
            module=module.to(torch_dtype(self.dtype)).eval(),
            family=self.family,
            name=self.factory.rpartition(":")[2],
            vocab_size=_vocab_size(module) if self.family == "causal_lm" else None,
            image_shape=(shape[0], shape[1], shape[2]) if shape is not None else None,
            example=as_example(example),
            notes=notes,
        )


def _vocab_size(module: nn.Module) -> int | None:
    """The vocabulary that a config names, else the number of rows of the first embedding."""
    import torch

    size = getattr(getattr(module, "config", None), "vocab_size", None)
    if isinstance(size, int):
        return size
    return next((each.num_embeddings for each in module.modules() if isinstance(each, torch.nn.Embedding)), None)
