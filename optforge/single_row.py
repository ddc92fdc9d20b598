"""Products with one row, as they stand in a decode at batch 1, become loops that Inductor writes itself.

One row reads each weight once, so the product is bound by memory, and what a library call costs besides (its dispatch, a layout
chosen for many rows, results that go through memory) is lost. Written as a sum of products the compiler makes a loop of it that
streams the weight, and joins what stands behind: bias, residual, scales. On a CPU a pass over Inductor's graph does so for
float and int8 weights; on a GPU Inductor itself does it when told to (`coordinate_descent_tuning`), for the unquantized ones, where
the steps do not call kernels of this package anyway.

`mark_` says it of a model or block; `compiling` asks `inductor_options` for what is marked. Nothing else changes: with more rows,
uncompiled, and in other models of the process every product runs as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx, nn

MARK = "optforge_single_row"
"""Attribute of a marked module."""
STEP = "optforge_step"
"""Keyword by which a decode loop tells a layer that this call is one of its steps; see `transforms/fuse/steps.py`."""
_VERSION = 2
"""Of the pass, for Inductor's cache of compiled graphs."""


def mark_(module: nn.Module, *, kernels: bool) -> None:
    """Lets products of one row in `module`, whenever it is compiled, run as loops.

    Args:
        kernels: its decode steps call kernels of this package, where there are some, so that on a GPU Inductor need not search for
            good loops.
    """
    setattr(module, MARK, "kernels" if kernels else "loops")


def marked(module: nn.Module) -> bool:
    """Whether `mark_` was called on this module."""
    return hasattr(module, MARK)


def has_kernels(module: nn.Module) -> bool:
    """What `mark_` was told of kernels."""
    return getattr(module, MARK, None) == "kernels"


def inductor_options(module: nn.Module) -> dict[str, Any]:
    """What Inductor is told when it compiles `module`; nothing for one that is not marked."""
    if not marked(module):
        return {}
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    if device == "cuda" and not has_kernels(module):
        return {"coordinate_descent_tuning": True}
    return {"post_grad_custom_pre_pass": _pass()} if device == "cpu" else {}


def _pass() -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class SingleRow(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            rewrite(graph)

        def uuid(self) -> Any:
            return f"optforge.single_row {_VERSION}"

    return SingleRow()


def rewrite(graph: fx.Graph) -> int:
    """Replaces every product of one row by a sum over products, and says how many there were.

    Sums run in fp32 whatever the factors are. Of int8 factors each product is exact in fp32, and so is their sum below 2^24 (any K
    up to 1,040); above it a sum rounds by 6e-8 of itself a step.
    """
    products = [(node, found) for node in graph.nodes if (found := _operands(node)) is not None]
    for node, (x, weight_NK, bias) in products:
        with graph.inserting_before(node):
            new = _sum(graph, x, weight_NK, bias, node.meta["val"].dtype)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    if products:
        _keep_small_results(graph)
    return len(products)


def _keep_small_results(graph: fx.Graph) -> None:
    """Has results computed once that loops read again and again: the smaller factor of each sum over products (a rotated query
    would be rotated anew for every key), cosines and sines, and sums that are read twice (residuals)."""
    import torch

    aten = torch.ops.aten
    for node in graph.nodes:
        if node.target is aten.sum.dim_IntList and getattr(node.args[0], "target", None) is aten.mul.Tensor:
            factors = [_seen_through(one) for one in node.args[0].args if isinstance(one, torch.fx.Node)]
            if len(factors) == 2:
                _realize(min(factors, key=lambda one: one.meta["val"].numel()))
        elif node.target in (aten.cos.default, aten.sin.default) or (node.target is aten.add.Tensor and len(node.users) > 1):
            _realize(node)


def _realize(node: fx.Node) -> None:
    """Tells Inductor to write the result out instead of computing it where it is read."""
    if node.op == "call_function":
        node.meta["inductor_realize_to_strides"] = True


def _seen_through(node: fx.Node) -> fx.Node:
    """What a chain of views shows."""
    import torch

    aten = torch.ops.aten
    views = (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.permute.default, aten.expand.default, aten.squeeze.dim)
    while node.target in views and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


Operands = tuple["fx.Node", "fx.Node", "fx.Node | None"]


def _operands(node: fx.Node) -> Operands | None:
    """x [1, K], weight [N, K] and bias of a product of one row; None for every other node. A node may be added for the weight."""
    import torch

    aten, few = torch.ops.aten, getattr(torch.ops.optforge, "int8_few", None)
    arguments: tuple[Any, ...] = node.args
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.addmm.default:
        bias, x, weight = arguments
    elif node.target in (aten.mm.default, aten._int_mm.default) or (few is not None and node.target is few.default):
        (x, weight), bias = arguments, None
    else:
        return None
    rows = x.meta["val"].shape[0]
    if not isinstance(rows, int) or rows != 1:
        return None
    if few is None or node.target is not few.default:
        with node.graph.inserting_before(node):
            weight = _call(node.graph, aten.permute.default, weight, [1, 0])
    return x, weight, bias


def _sum(graph: fx.Graph, x: fx.Node, weight_NK: fx.Node, bias: fx.Node | None, dtype: Any) -> fx.Node:
    """The product as [1, N] in `dtype`."""
    import torch

    aten, cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
    _realize(x)  # or what computes x would be computed again for every output
    factors = (_call(graph, cast, one, torch.float32) for one in (x, weight_NK))
    sums = _call(graph, aten.unsqueeze.default, _call(graph, aten.sum.dim_IntList, _call(graph, aten.mul.Tensor, *factors), [1]), 0)
    if bias is not None:
        sums = _call(graph, aten.add.Tensor, sums, bias)
    return _call(graph, cast, sums, dtype)


def _call(graph: fx.Graph, function: Any, *arguments: Any) -> fx.Node:
    """A node of the graph, with what Inductor wants to know of its result."""
    import torch

    node = graph.call_function(function, arguments)
    node.meta["val"] = function(*(one.meta["val"] if isinstance(one, torch.fx.Node) else one for one in arguments))
    return node
