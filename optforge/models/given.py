"""A model that already lives in the caller's process: what `optforge.optimize(model, ...)` is given.

It has no YAML and no entry point, since a live module cannot be written in a file. The caller's own module is never
changed by a run: the plan works on its structure on meta, the run on an alias of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from optforge.checkpoint import module_digest, require_finite, require_materialised
from optforge.errors import ModelError, Problem
from optforge.masks import fold_masks_, said
from optforge.models.base import Example, Loaded, Tell
from optforge.share import alias, on_meta


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenModel:
    """A live module, and one example of its arguments where they cannot be told from its config."""

    module: nn.Module
    example: Example | None = None
    tokenizer: Any = None
    trained: bool = True
    name: str = field(default="")

    @property
    def dtype(self) -> str:
        """`bf16`, `fp16` or `fp32`: the dtype of the first floating-point parameter."""
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        return next((names[p.dtype] for p in self.module.parameters() if p.dtype in names), "fp32")

    @property
    def family(self) -> str:
        """causal_lm for a transformers decoder with a language-model head, else module."""
        head = getattr(self.module, "get_output_embeddings", None)
        is_decoder = head is not None and head() is not None and hasattr(self.module, "config")
        return "causal_lm" if is_decoder and self.example is None else "module"

    def check(self) -> Iterator[Problem]:
        if self.family == "module" and self.example is None:
            yield Problem(
                where="example",
                what=f"{type(self.module).__name__} needs one example of its arguments",
                fix="pass example=tensor, example=(args...), or example={'name': tensor}",
            )
        try:
            require_materialised(self.module, "model")
        except ModelError as error:
            yield from error.problems

    def skeleton(self) -> Loaded:
        """The structure in eval mode, as a run measures it."""
        return self._loaded(on_meta(self.module).eval(), None)

    def live(self) -> Loaded:
        """The caller's own module, to be rewritten in place."""
        return self._loaded(self.module, None)

    def load(self, seed: int = 0, tell: Tell | None = None) -> Loaded:
        require_finite(self.module.named_parameters(), "model")
        return self._loaded(alias(self.module), module_digest(self.module))

    def _loaded(self, module: nn.Module, digest: str | None) -> Loaded:
        notes = said(fold_masks_(module))
        vocabulary = getattr(getattr(self.module, "config", None), "vocab_size", None)
        return Loaded(
            module=module,
            family=self.family,
            name=self.name or type(self.module).__name__,
            tokenizer=self.tokenizer,
            vocab_size=vocabulary,
            example=self.example,
            weights="trained" if self.trained else "random",
            digest=digest,
            notes=notes,
        )
