"""Counts what a call must do at least: floating-point operations and bytes moved, from the module itself.

Both are counted on structure alone, so they also work on a meta skeleton and copy no weight. They are the denominators
of MFU and MBU; a figure that cannot be counted is None, never estimated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from optforge.measure.size import nbytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

log = logging.getLogger(__name__)


def count_flops(module: nn.Module, call: Callable[[Callable[..., Any]], Any]) -> int | None:
    """Floating-point operations of `call(forward)`, where `forward` is the module over fake tensors.

    A multiply-add counts as two; only products and convolutions are counted, attention in full (causal or not), as
    PyTorch's `FlopCounterMode` does. Fake tensors live on the CPU and hold no data. Returns None, and logs why, for a
    model that reads values of its tensors.
    """
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = _fakes(module)
    counter = FlopCounterMode(display=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, fakes, args, kwargs, tie_weights=False)  # every tie has its tensor already

    try:
        # the fused attention of the CPU has no flop formula; the plain one is made of products, which have
        with torch.no_grad(), mode, sdpa_kernel(SDPBackend.MATH), counter:
            call(forward)
    except (DataDependentOutputException, NotImplementedError, RuntimeError) as error:
        log.info("operations of %s cannot be counted without running it: %s", type(module).__name__, error)
        return None
    return int(counter.get_total_flops())


def refusal(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a pass over these arguments fails, in one line, tried on structure alone; None where it does not, or nothing can be said."""
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.utils._pytree import tree_map_only

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        fakes = _fakes(module)
        args, kwargs = tree_map_only(torch.Tensor, lambda each: mode.from_tensor(each.detach().cpu()), (args, kwargs))
        try:
            torch.func.functional_call(module, fakes, args, kwargs, tie_weights=False)
        except (DataDependentOutputException, NotImplementedError):
            return None
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def _fakes(module: nn.Module) -> dict[str, Tensor]:
    """An empty tensor for each parameter and buffer, one for each tie; under a FakeTensorMode they hold no data.

    A module that stands in two places has one of its names only: PyTorch would put a tensor back once for each name, and the second
    time the empty one.
    """
    import torch

    made: dict[int, Tensor] = {}
    names: dict[str, Tensor] = {}
    for path, child in module.named_modules():
        for key, tensor in (*child.named_parameters(recurse=False, remove_duplicate=False), *child.named_buffers(recurse=False)):
            if id(tensor) not in made:
                made[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            names[f"{path}.{key}" if path else key] = made[id(tensor)]
    return names


def read_bytes(module: nn.Module, tokens: int) -> int:
    """Fewest bytes of weights that one forward pass over `tokens` tokens reads, as they are stored.

    Every parameter and buffer counts once, quantized ones in their integer storage with their scales. An embedding
    counts with the rows that are looked up, unless another module (a tied head) reads the whole of it. Experts of a
    mixture all count.
    """
    from torch import nn

    read_whole: dict[int, Tensor] = {}
    looked_up: dict[int, tuple[Tensor, int]] = {}
    for child in module.modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if isinstance(child, nn.Embedding):
            looked_up.update({id(tensor): (tensor, min(tokens, child.num_embeddings)) for tensor in own})
        else:
            read_whole.update({id(tensor): tensor for tensor in own})
    whole = sum(nbytes(tensor) for tensor in read_whole.values())
    rows = sum(count * nbytes(tensor) // tensor.shape[0] for key, (tensor, count) in looked_up.items() if key not in read_whole)
    return whole + rows


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors among `tensors`; anything else counts nothing."""
    import torch

    return sum(nbytes(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))


_NOT_COMPUTED = ("_scale", "_zero_point")
"""Ends of the names of parameters of a quantized layer that stay fp32 whatever dtype the layer computes in."""


def compute_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype that the module computes in: that of its first floating-point weight.

    Vectors count only where there is nothing else: norms and scales may stay fp32 whatever the module computes in.
    """
    floating = [
        parameter for name, parameter in module.named_parameters() if parameter.is_floating_point() and not name.endswith(_NOT_COMPUTED)
    ]
    chosen = next((parameter for parameter in floating if parameter.ndim > 1), None)
    if chosen is None and floating:
        chosen = floating[0]
    return None if chosen is None else chosen.dtype
