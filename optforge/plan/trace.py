"""Runs one pass of a workload on meta tensors and writes down what PyTorch dispatches: the graph that the plan reads.

Nothing is computed and no weight is needed: a meta tensor has a shape, a dtype and a storage of a size, and no content.
The model takes the paths of the target's backend (`kernels.dispatch.traced_for`), so the operators of this package show
up where the target would launch them. Small whole numbers that come from nothing but sizes (positions, masks of positions)
are computed for real beside it, since models ask for them (`if (positions == expected).all()`). Attention is taken as one
operator, before PyTorch picks an implementation, since on meta it would pick the one that no accelerator uses.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optforge.data.base import DataSource
from optforge.kernels import dispatch
from optforge.measure.machine.point import BACKWARD_PRODUCTS
from optforge.models.base import Loaded
from optforge.plan import graph as g
from optforge.plan import memo
from optforge.plan.constants import Constants
from optforge.plan.kinds import Described, access, describe, dtype_name
from optforge.plan.training import with_update
from optforge.spec import Hardware
from optforge.workloads.base import Workload
from optforge.workloads.train import Train

log = logging.getLogger(__name__)

NO_FAKE = "no fake impl registered"
"""In PyTorch's words about an operator that says nothing of its outputs."""
DEPENDS = "has an output whose size depends on values"
"""Of PyTorch's own operators, which have fakes: a mask as an index, `nonzero`."""


def trace(loaded: Loaded, workload: Workload, data: DataSource, hardware: Hardware) -> g.Graph:
    """The operators of one pass of `workload` over the model as it is now, as a `hardware.backend` device would run them.

    Args:
        loaded: the model on meta (a skeleton), quantized and fused or not. Its structure is not changed.
        workload: checked; decode is traced for one token after its prompt, and `Graph.prompt` holds the prompt's own pass.
        data: never read; workloads take it to make inputs, which on meta have no content.
        hardware: the target.

    A model that reads values of its tensors cannot be followed on meta: the graph then ends there and says why in `unknown`.
    """
    work = workload.prepare(loaded, data, torch.device("meta"))
    prompt = None
    with dispatch.traced_for(hardware.backend):
        if workload.uses_cache:
            prompt = _record(loaded.module, lambda: work.ready(loaded.module), ())
            if prompt.unknown:
                return prompt
        else:
            work.ready(loaded.module)
        traced = _record(loaded.module, lambda: work.once(loaded.module), work.kept(loaded.module))
    traced.prompt = prompt
    traced.passes, traced.unit, traced.units = work.calls, work.unit, work.units
    return with_update(traced, workload, loaded.module) if isinstance(workload, Train) else traced


def _record(module: nn.Module, call: Any, kept: Iterable[Tensor]) -> g.Graph:
    """The graph of one call; whatever ends it early is told in `unknown`."""
    recorder = _Recorder(module, kept)
    with ExitStack() as stack:
        stack.enter_context(_names(module, recorder))
        stack.enter_context(recorder)
        stack.enter_context(_Attention(recorder))
        try:
            recorder.finish(call())
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
            where = f" in {recorder.path}" if recorder.path not in ("", g.OUTSIDE) else ""
            recorder.graph.unknown = f"the model cannot be followed on meta tensors{where}: {str(error).strip().splitlines()[0]}"
            log.info("trace ended early", exc_info=error)
    recorder.close()
    return recorder.graph


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves its metaclass hook untyped
    """Writes down every dispatched operator."""

    def __init__(self, module: nn.Module, kept: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        self.graph = g.Graph()
        self.path = g.OUTSIDE
        self._module = module
        self._living: dict[int, tuple[int, Any]] = {}  # address of a storage -> its key, and what tells when it dies
        self._constants = Constants()
        for name, parameter in module.named_parameters():
            self.value(parameter, "parameter", name)
        for name, buffer in module.named_buffers():
            self.value(buffer, "buffer", name)
        for tensor in kept:
            self.value(tensor, "cache")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = memo.leaves((args, kwargs))
        inputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        for tensor in inputs:
            self.value(tensor, "input")
        known, found = self._constants.computed(func, args, kwargs, inputs)
        if known and func is torch.ops.aten._local_scalar_dense.default:
            return found
        key = None if known else memo.key(func, args, kwargs, flat)
        if (remembered := memo.found(key)) is not None:
            outputs = remembered.outputs()
            if remembered.described is not None:
                self._add(remembered.described.of(inputs, outputs))
            else:
                self.accesses(outputs)
            return outputs[0] if remembered.single else remembered.wrap(outputs)
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:  # a RuntimeError: one made by `torch.library.custom_op`
            if not isinstance(error, NotImplementedError) and NO_FAKE not in str(error):
                raise
            return self._unknown(func, inputs, error)
        outputs = [leaf for leaf in memo.leaves(out) if isinstance(leaf, Tensor)]
        if known:
            self._constants.keep(outputs, found)
        described = self._note(func, args, inputs, outputs)
        memo.keep(key, func, inputs, out, described)
        return out

    def value(self, tensor: Tensor, role: str, name: str = "") -> int:
        """The key of the tensor's storage, which is registered on first sight."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._living:
            key = len(self.graph.values)
            self.graph.values[key] = g.Value(key=key, bytes=storage.nbytes(), role=role, name=name)
            self._living[address] = key, weakref.ref(storage, lambda _: self._died(address))
        return self._living[address][0]

    def _died(self, address: int) -> None:
        """Notes when the last reference to a storage went, as it would on the device; the address may be given out anew."""
        key, _ = self._living.pop(address)
        self.graph.freed[key] = len(self.graph.operators)

    def close(self) -> None:
        """Stops listening: what dies from now on lived to the end of the pass."""
        self._living.clear()

    def add(self, operator: g.Operator) -> None:
        self.graph.operators.append(operator)

    @property
    def phase(self) -> str:
        return g.BACKWARD if torch._C._current_autograd_node() is not None else g.FORWARD

    def accesses(self, tensors: Iterable[Tensor], role: str = "value") -> tuple[g.Access, ...]:
        return tuple(g.Access(key=self.value(tensor, role), bytes=access(tensor)) for tensor in tensors)

    def finish(self, result: Any) -> None:
        """Marks what outlives the pass."""
        outputs = [leaf for leaf in tree_leaves(_plain(result)) if isinstance(leaf, Tensor)]
        self.graph.outputs = tuple(dict.fromkeys(self.value(tensor, "value") for tensor in outputs))
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                key = self.value(parameter.grad, "gradient")
                self.graph.values[key] = g.Value(key=key, bytes=self.graph.values[key].bytes, role="gradient", name=name)
                self.graph.training = True

    def _note(self, func: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> Described | None:
        """Writes the operator down, where it did something; None for a view, and for memory without content."""
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        mutates = func._schema.is_mutable
        made = [tensor for tensor in outputs if mutates or tensor.untyped_storage()._cdata not in known]
        described = describe(func, args, inputs, outputs) if made or mutates else None
        if described is None:
            for tensor in outputs:
                self.value(tensor, "value")
            return None
        self._add(described)
        return described

    def _add(self, described: Described) -> None:
        reads = tuple(g.Access(key=self.value(tensor, "input"), bytes=size) for tensor, size in described.reads)
        writes = tuple(g.Access(key=self.value(tensor, "value"), bytes=size) for tensor, size in described.writes)
        self.add(
            g.Operator(
                name=described.name,
                kind=described.kind,
                module=self.path if self.phase == g.FORWARD else "",
                phase=self.phase,
                dtype=described.dtype,
                size=described.size,
                detail=described.detail,
                flops=described.flops,
                reads=reads,
                writes=writes,
            )
        )

    def _unknown(self, func: Any, inputs: list[Tensor], error: Exception) -> Any:
        """An operator that says nothing of its output on meta: named, its output taken to look like its first input."""
        name = f"{func.namespace}.{func._schema.name.partition('::')[2]}"
        returns = func._schema.returns
        if not inputs or len(returns) != 1 or str(returns[0].type) != "Tensor":
            raise error
        out = torch.empty_like(inputs[0])
        own = func.namespace != "aten"
        self.graph.notes.append(
            f"{name} {'has no fake implementation (torch.library.register_fake)' if own else DEPENDS}: its work is unknown, "
            f"and its output is taken to have the shape of its first input, {list(inputs[0].shape)}"
        )
        self.add(
            g.Operator(
                name=name,
                kind=g.UNKNOWN,
                module=self.path,
                phase=self.phase,
                dtype=dtype_name(out.dtype),
                size=tuple(out.shape),
                reads=self.accesses(inputs, "input"),
                writes=self.accesses([out]),
                why="no fake implementation" if own else DEPENDS,
            )
        )
        return out


class _Attention(TorchFunctionMode):
    """Takes `scaled_dot_product_attention` as one operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"), args, strict=False)) | kwargs
        query, key, value, mask = named["query"], named["key"], named["value"], named.get("attn_mask")
        return _Attend.apply(query, key, value, mask, bool(named.get("is_causal")), self.recorder)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped


class _Attend(torch.autograd.Function):
    """softmax(q k^T) v with its backward pass, as two entries of the graph. q [B, H, Q, D], k and v [B, G, K, D]."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd hands arguments over by position
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, recorder: _Recorder
    ) -> Tensor:
        batch, heads, queries, _ = query.shape
        out = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
        ctx.recorder, ctx.causal = recorder, causal
        ctx.save_for_backward(query, key, value, out)
        reads = [query, key, value, *([mask] if mask is not None else [])]
        detail = "causal" if causal else "" if mask is None else "masked"
        recorder.add(_attention(recorder, reads, [out], detail=detail, path=recorder.path))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out = ctx.saved_tensors
        made = [torch.empty_like(tensor) for tensor in (query, key, value)]
        detail = "causal" if ctx.causal else ""
        ctx.recorder.add(_attention(ctx.recorder, [query, key, value, out, *grads], made, detail=detail, products=BACKWARD_PRODUCTS))
        return (*made, None, None, None)


def _attention(
    recorder: _Recorder, reads: list[Tensor], writes: list[Tensor], *, detail: str, path: str = "", products: float = 1.0
) -> g.Operator:
    """One attention; `reads` begins with query and key. `products` counts pairs of products: 1 forward."""
    query, key = reads[:2]
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    pairs = queries * keys - (queries * (queries - 1) / 2 if detail == "causal" and queries <= keys else 0)
    return g.Operator(
        name="aten.scaled_dot_product_attention",
        kind=g.ATTENTION,
        module=path,
        phase=recorder.phase,
        dtype=dtype_name(query.dtype),
        size=(batch, heads, kv_heads, queries, keys, width),
        detail=detail,
        flops=products * 4.0 * batch * heads * width * pairs,
        reads=recorder.accesses(reads, "input"),
        writes=recorder.accesses(writes),
    )


@contextmanager
def _names(module: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Keeps `recorder.path` at the innermost module whose forward runs."""
    names = {id(child): name for name, child in reversed(list(module.named_modules(remove_duplicate=False)))}
    stack: list[str] = []

    def enter(child: nn.Module, *_: Any) -> None:
        stack.append(recorder.path)
        recorder.path = names.get(id(child), recorder.path)

    def leave(child: nn.Module, *_: Any) -> None:
        recorder.path = stack.pop()

    hooks = nn.modules.module
    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plain(result: Any) -> Any:
    """A transformers output as the tensors in it; pytrees know it only where transformers registered it."""
    return list(result.values()) if isinstance(result, Mapping) else result
