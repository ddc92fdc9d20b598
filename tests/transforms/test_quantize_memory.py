"""B76: quantizing takes memory for the layer at work beside what it leaves, however many layers there are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import GPU, context

from optforge.backends.cpu import CpuBackend
from optforge.transforms.quantize import Quantize, SchemeName

WIDTH = 128
LAYER = 2 * WIDTH * WIDTH
"""Bytes of a layer in bf16."""
OPTIONS: dict[str, dict[str, Any]] = {"int8_weight": {}, "int4_weight": {"group_size": 64, "symmetric": False}, "fp8_weight": {}}


class Counting(TorchDispatchMode):
    """Bytes of the storages that are made under it and are still there, and the most there were at once: an allocator's counters.

    Those of `known` are there already and count nothing.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.made = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.made:
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata)
        return out

    def _gone(self, key: int) -> None:
        self.live -= self.made.pop(key, 0)


def linears(count: int, width: int = WIDTH, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device) for _ in range(count)))


def counted(scheme: str, layers: int) -> tuple[int, int, int]:
    """Bytes that were made at most, bytes that are left, and bytes of the quantized weights."""
    model = linears(layers)
    kept = [each.weight for each in model]  # the baseline's, which a run holds all the time
    with Counting(kept) as counter:
        receipt = Quantize(scheme=SchemeName[scheme], **OPTIONS[scheme]).apply(model, context(backend=CpuBackend()))
    assert len(kept) == layers
    gc.collect()
    return counter.peak, counter.live, receipt.bytes_after


@pytest.mark.case("B76")
@pytest.mark.parametrize("scheme", OPTIONS)
def test_b76_more_layers_cost_their_quantized_bytes_and_no_more(scheme: str) -> None:
    few, live, stored = counted(scheme, 2)
    many, live_of_many, stored_of_many = counted(scheme, 8)
    assert live == stored and live_of_many == stored_of_many, "nothing but the quantized weights is left"
    assert stored_of_many == 4 * stored
    assert many - few <= stored_of_many - stored, "what is at work at once does not grow with the number of layers"
    assert many - stored_of_many < 20 * LAYER, "copies of one layer in fp32 and float64, for the rounding and its check"


@pytest.mark.gpu
@pytest.mark.case("B76")
@pytest.mark.parametrize("scheme", OPTIONS)
def test_b76_the_peak_on_a_gpu_is_the_quantized_weights_and_one_layer_at_work(scheme: str) -> None:
    from optforge.backends.nvidia import NvidiaBackend

    width = 4096
    model = linears(8, width, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = Quantize(scheme=SchemeName[scheme], **OPTIONS[scheme])
    ctx = context(backend=NvidiaBackend())
    receipt = step.apply(model, type(ctx)(step="weights", target=GPU, device=GPU, backend=ctx.backend))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < receipt.bytes_after + 20 * 2 * width * width
    moved = linears(8, width)
    Quantize(scheme=SchemeName[scheme], **OPTIONS[scheme]).apply(moved, context(backend=CpuBackend()))
    del model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    NvidiaBackend().place(moved)  # a model that does not fit is quantized before it is brought to the device
    assert torch.cuda.max_memory_allocated() - before <= 1.02 * receipt.bytes_after + 2 * width * width
