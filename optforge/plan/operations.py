"""The operations of one forward pass, read off a module tree: their floating-point operations and fewest bytes.

Only what costs time on an ideal machine is counted: products, convolutions, embedding look-ups and attention. Norms,
activations and residual adds are taken as fused into their neighbours, at no traffic of their own, because the roofline
asks how fast the work could be and not how fast one compiler makes it. Weights are never read, so a model on the meta
device is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from optforge.measure.size import nbytes
from optforge.spec import Scheme

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Bytes of one activation element."""

Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Load:
    """The size of a workload, apart from the model that does it."""

    kind: str
    """`forward`, `prefill` or `decode`."""
    batch: int | None
    """Sequences or items processed together; None: as many as the example holds."""
    tokens_per_call: int = 1
    """Tokens of one sequence in one forward pass: the prompt in prefill, 1 in decode. For `forward`, the tokens that a
    language model would get; other models take items that are no sequences."""
    context: int = 0
    """Tokens in the KV cache before the first forward pass."""
    forwards: int = 1
    """Forward passes in one call of the workload (decode: one per new token)."""

    @property
    def sequence(self) -> bool:
        """Whether the items are sequences of tokens that attend to one another."""
        return self.kind in ("prefill", "decode") or self.tokens_per_call > 1


def sized_for(load: Load, module: nn.Module, example: Example | None = None) -> Load:
    """The load as this model meets it: items without tokens where it is no language model, the example's own batch."""
    items = load.kind == "forward" and _head(module) is None
    first = next(_tensors(example), None) if example is not None else None
    own = first.shape[0] if first is not None and first.dim() else 1
    return replace(load, batch=own if load.batch is None else load.batch, tokens_per_call=1 if items else load.tokens_per_call)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One kernel of an ideal machine, in one forward pass."""

    kind: str
    """`linear`, `head`, `convolution`, `embedding` or `attention`."""
    flops: float
    """A multiply and an add count as two."""
    bytes: float
    """Weights as stored and activations, each read or written once."""
    scheme: Scheme | None = None
    """How a quantized linear stores and multiplies; None for the run's own dtype."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The operations of one forward pass, and what could not be counted."""

    operations: list[Operation]
    notes: list[str]
    unknown: str | None = None
    """Why the sizes cannot be known; then the operations are incomplete."""


def count(
    module: nn.Module, load: Load, *, dtype: str, schemes: Mapping[str, Scheme] | None = None, example: Example | None = None
) -> Counted:
    """The operations of one forward pass of `module` under `load`.

    Args:
        module: any tree, on meta or real; its weights are not read.
        load: batch and tokens of the workload, from `sized_for`.
        dtype: `fp32`, `fp16` or `bf16`, the dtype of activations and KV cache.
        schemes: module name -> the scheme it would have, to ask what quantizing would bring without doing it.
        example: arguments of one forward pass on meta; convolutions and items that are no sequences take their sizes from it.
    """
    batch = load.batch or 1
    counter = _Counter(load.kind, batch, batch * load.tokens_per_call, ELEMENT_BYTES[dtype], schemes or {}, _head(module))
    sizes: dict[nn.Module, tuple[int, int]] = {}
    unknown = None
    if example is not None and not load.sequence:
        sizes, unknown = _traced(module, example, batch)
    operations: list[Operation] = []
    seen: set[int] = set()
    for name, child in module.named_modules():
        operation = counter.operation(name, child, sizes.get(child))
        if isinstance(operation, Operation):
            operations.append(operation)
            seen.update(id(tensor) for tensor in child.parameters(recurse=False))
        elif operation is not None:
            unknown = unknown or operation
    attention, notes = _attention(module, load, ELEMENT_BYTES[dtype])
    return Counted(operations=operations + attention, notes=notes + _uncounted(module, seen), unknown=unknown)


def cache_bytes(module: nn.Module, load: Load, dtype: str) -> int | None:
    """Bytes of the KV cache at the end of one call; None where nothing is kept between forward passes."""
    shape = _attention_shape(module)
    if shape is None or load.kind != "decode":
        return None
    layers, _, kv_heads, head_dim, windows = shape
    length = load.context + load.tokens_per_call * load.forwards
    kept = sum(min(length, window) if window else length for window in windows[:layers])
    return 2 * (load.batch or 1) * kv_heads * head_dim * kept * ELEMENT_BYTES[dtype]


@dataclass(frozen=True)
class _Counter:
    """Turns one module into an operation."""

    kind: str
    batch: int
    rows: int
    element: int
    schemes: Mapping[str, Scheme]
    head: nn.Module | None

    def operation(self, name: str, module: nn.Module, size: tuple[int, int] | None) -> Operation | str | None:
        """The module's operation, the reason why its size is unknown, or None for a module without one."""
        if isinstance(module, nn.modules.conv._ConvNd):
            return self._convolution(name, module, size)
        if isinstance(module, nn.Embedding):
            return self._embedding(module)
        shape = linear_shape(module)
        return None if shape is None else self._linear(name, module, shape, size)

    def _linear(self, name: str, module: nn.Module, shape: tuple[int, int], size: tuple[int, int] | None) -> Operation:
        inputs, outputs = shape
        is_head = module is self.head
        rows = self.rows if size is None else size[1] // outputs
        if is_head and self.kind == "prefill":
            rows = self.batch  # only the last position of each prompt asks for logits
        scheme = self.schemes.get(name) or getattr(module, "scheme", None)
        weights = scheme_bytes(module, shape, self.schemes[name]) if name in self.schemes else _stored(module)
        read = ELEMENT_BYTES.get(scheme.activation_dtype, self.element) if scheme and scheme.activation_dtype else self.element
        return Operation(
            kind="head" if is_head else "linear",
            flops=2.0 * rows * inputs * outputs,
            bytes=weights + rows * (inputs * read + outputs * self.element),
            scheme=scheme,
        )

    def _embedding(self, module: nn.Embedding) -> Operation:
        row = module.embedding_dim * module.weight.element_size()
        return Operation(kind="embedding", flops=0.0, bytes=float(self.rows * 2 * row))

    def _convolution(self, name: str, module: nn.modules.conv._ConvNd, size: tuple[int, int] | None) -> Operation | str:
        if size is None:
            return f"the size of {name}'s input is unknown without an example"
        kernel = 1
        for extent in module.kernel_size:
            kernel *= extent
        grown = size[0] if module.transposed else size[1]
        flops = 2.0 * grown * kernel * (module.out_channels if module.transposed else module.in_channels) / module.groups
        return Operation(kind="convolution", flops=flops, bytes=_stored(module) + sum(size) * self.element)


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer: nn.Linear with all subclasses, and transformers' Conv1D (a transposed linear)."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor) and module.weight.dim() == 2:
        inputs, outputs = module.weight.shape
        return int(inputs), int(outputs)
    return None


def scheme_bytes(module: nn.Module, shape: tuple[int, int], scheme: Scheme) -> int:
    """Bytes that a linear of this shape would hold under `scheme`, as `kernels.linears` stores it.

    Packed weights row by row, fp32 scales, a byte of zero point beside each scale of an asymmetric scheme, int32 row sums
    where int8 activations are multiplied, and the bias as it is.
    """
    inputs, outputs = shape
    weights = outputs * -(-inputs * scheme.weight_bits // 8)
    scales = {"tensor": 1, "channel": outputs, "group": outputs * -(-inputs // (scheme.group_size or inputs))}[scheme.granularity]
    zero_points = 0 if scheme.symmetric else scales
    sums = 4 * outputs if scheme.activation_dtype == "int8" else 0
    bias = getattr(module, "bias", None)
    return weights + 4 * scales + zero_points + sums + (nbytes(bias) if isinstance(bias, Tensor) else 0)


def _stored(module: nn.Module) -> int:
    """Bytes of the module's own parameters and buffers, as they lie in memory."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(nbytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _head(module: nn.Module) -> nn.Module | None:
    """The layer that makes logits over the vocabulary."""
    getter = getattr(module, "get_output_embeddings", None)
    found = getter() if callable(getter) else None
    if isinstance(found, nn.Module):
        return found
    return next((child for name, child in module.named_modules() if name.rsplit(".", 1)[-1] == "lm_head"), None)


def _attention_shape(module: nn.Module) -> tuple[int, int, int, int, list[int | None]] | None:
    """Layers, heads, key-value heads, head dimension and each layer's window, from a transformers config."""
    config = getattr(module, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    if not (layers and heads and width):
        return None
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return (
        layers,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or width // heads,
        windows,
    )


def _attention(module: nn.Module, load: Load, element: int) -> tuple[list[Operation], list[str]]:
    """One operation a layer: both products over the causal half of the positions, the KV cache read once."""
    if not load.sequence:
        return [], []
    shape = _attention_shape(module)
    if shape is None:
        return [], ["attention is not counted: the model carries no config with its heads"]
    layers, heads, kv_heads, head_dim, windows = shape
    batch, found = load.batch or 1, []
    for window in windows[:layers]:
        pairs, kept = _attended(load, window)
        moved = 2 * batch * head_dim * (load.tokens_per_call * heads + kept * kv_heads)
        found.append(Operation(kind="attention", flops=4.0 * batch * heads * head_dim * pairs, bytes=float(moved * element)))
    return found, []


def _attended(load: Load, window: int | None) -> tuple[float, float]:
    """Query-key pairs and cached positions of one sequence in one forward pass, the mean over the passes of a call."""
    start = load.context + (load.forwards - 1) * load.tokens_per_call / 2
    if window is None:
        return load.tokens_per_call * start + load.tokens_per_call * (load.tokens_per_call + 1) / 2, start + load.tokens_per_call
    pairs = sum(min(start + position, window) for position in range(1, load.tokens_per_call + 1))
    return pairs, min(start + load.tokens_per_call, window + load.tokens_per_call - 1)


def _uncounted(module: nn.Module, seen: set[int]) -> list[str]:
    """Says which share of the parameters lies in modules that the roofline does not know, when it matters (above 1%)."""
    own = {id(parameter): nbytes(parameter) for parameter in module.parameters()}
    total = sum(own.values())
    left = sum(size for key, size in own.items() if key not in seen)
    return [f"{left / total:.0%} of the parameter bytes lie in modules that are not counted"] if total and left > 0.01 * total else []


def _traced(module: nn.Module, example: Example, batch: int) -> tuple[dict[nn.Module, tuple[int, int]], str | None]:
    """Input and output elements of every leaf for `batch` items, seen by running the example on meta."""
    sizes: dict[nn.Module, tuple[int, int]] = {}

    def record(child: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            sizes[child] = (inputs[0].numel(), output.numel())

    args, kwargs = example
    first = next(_tensors((args, kwargs)), None)
    if first is None or first.dim() == 0:
        return {}, "the example holds no tensor with a batch dimension"
    computes = next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), None)
    state = {name: tensor.to("meta") for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    handles = [child.register_forward_hook(record) for child in module.modules() if not list(child.children())]
    try:
        with torch.no_grad():
            torch.func.functional_call(module, state, _on_meta(args, computes), _on_meta(kwargs, computes))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {}, f"the model does not run on meta tensors: {str(error).splitlines()[0]}"
    finally:
        for handle in handles:
            handle.remove()
    return {child: (into * batch // first.shape[0], out * batch // first.shape[0]) for child, (into, out) in sizes.items()}, None


def _tensors(tree: Any) -> Iterator[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def _on_meta(tree: Any, computes: torch.dtype | None) -> Any:
    """The example on meta; its floating-point tensors in the dtype of the model, which a step may have changed."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("meta", computes if leaf.is_floating_point() and computes is not None else leaf.dtype)

    return torch.utils._pytree.tree_map(move, tree)
