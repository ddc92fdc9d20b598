"""KV caches that hold keys and values in 8 bits: a scale per token and head, and a byte per number.

A model says so itself: a `kv_cache` step marks its attention modules, and whoever makes a cache for the model (the decode workload,
quality, a user with `new_cache`) gets layers that round what is written and bring back what is read. So the same model runs with any
cache, and one that is not marked is untouched.

The attention reads keys and values in its own dtype, and no kernel here reads 8 bits: each step brings back the whole layer's cache first.
That saves the memory of all layers but the one at work, and costs time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optforge.kernels.formats import FORMATS
from optforge.kernels.rounding import TINY, to_fp8
from optforge.select import original_name

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "optforge_kv_cache"
"""Attribute of a marked attention module: its `Format` as a dict."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class Format:
    """How one layer's keys and values are kept."""

    dtype: str
    """`int8` or `fp8`."""
    fp8_format: str
    """Key of `formats.FORMATS`."""

    @property
    def stored(self) -> torch.dtype:
        """int8; the bits of an fp8 in uint8, since more operators take them."""
        return torch.int8 if self.dtype == "int8" else torch.uint8

    def round(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """[..., width] to what is stored, and fp32 scales [..., 1]: the largest absolute value of each token and head is exact."""
        exact = values.float()
        largest = exact.abs().amax(-1, keepdim=True)
        if self.dtype == "int8":
            scale = (largest / 127).clamp_min(TINY)
            return torch.round(exact / scale).clamp(-127, 127).to(torch.int8), scale
        form = FORMATS[self.fp8_format]
        scale = (largest / form.maximum).clamp_min(TINY)
        return to_fp8(exact / scale, form).view(torch.uint8), scale

    def back(self, stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """What is stored, in `dtype`; places that nothing was written to are zero."""
        values = stored.float() if self.dtype == "int8" else stored.view(FORMATS[self.fp8_format].dtype).float()
        return (values * scale).to(dtype)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that write to a cache of transformers, by original name: those that know their layer's place in it."""
    for path, module in model.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "head_dim"):
            yield original_name(path), module


def mark_(module: nn.Module, form: Format) -> None:
    """Makes caches of the model keep this attention's keys and values in `form`."""
    setattr(module, MARK, asdict(form))


def formats(model: nn.Module) -> dict[int, Format]:
    """Place in the cache -> format, of the marked attention modules."""
    found: dict[int, Format] = {}
    for _, module in attention_modules(model):
        if hasattr(module, MARK):
            found[int(module.layer_idx)] = Format(**getattr(module, MARK))  # type: ignore[arg-type]  # an int, as `attention_modules` saw
    return found


def new_cache(model: nn.Module, length: int) -> Any:
    """transformers' static cache of `length` positions for this model, in the formats that its steps asked for.

    Its tensors are made by the first pass, in that pass's dtype.
    """
    from transformers import StaticCache

    config: Any = model.config
    cache = StaticCache(config=config, max_cache_len=length)
    marked = formats(model)
    if marked:
        from optforge.kernels.kv_layers import QuantizedStaticLayer  # it needs transformers at import

        for place, form in marked.items():
            cache.layers[place] = QuantizedStaticLayer(length, form)
    return cache


def tensors(cache: Any) -> tuple[Tensor, ...]:
    """Everything that a filled cache keeps: keys and values of every layer, and their scales."""
    names = ("keys", "values", "key_scales", "value_scales")
    return tuple(getattr(layer, name) for layer in cache.layers for name in names if getattr(layer, name, None) is not None)


def same_kind(cache: Any, model: nn.Module) -> bool:
    """Whether a cache that was made for the model earlier has the formats that it asks for now."""
    return {place: layer.form for place, layer in enumerate(cache.layers) if hasattr(layer, "form")} == formats(model)


def position_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes that one token of one sequence takes in the cache of all layers."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    marked = len(formats(model))
    each: int = marked * (width + SCALE_BYTES) + (text.num_hidden_layers - marked) * width * dtype.itemsize
    return 2 * int(heads) * each
