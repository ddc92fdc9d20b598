"""One token through a decoder layer by the operators of `optforge.kernels`: six launches in place of transformers' dozens.

    qkv = product(norm(x));  q = rotary embedding, keys and values into the cache;  a = attention over the cache
    x = x + product(a);      h = gate(product(norm(x)));                            x = x + product(h)

A layer is taken by its structure: what its children are, the order in which they run, and what its norms and its activation make of
numbers that are tried on them, never by its class's name. It keeps its own forward for everything but a step of a decode loop
(`workloads/greedy.py`), which says so by a keyword, since a step knows that nothing is padded and each sequence stands at the same place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.errors import StepError
from optforge.kernels import dispatch, kv_cache
from optforge.kernels.decode_attention import decode_attention
from optforge.kernels.fused_linear import ROWS, fused_linear, parts
from optforge.kernels.gates import gated
from optforge.kernels.norms import rms_norm
from optforge.kernels.quantized import Quantized
from optforge.kernels.rotary import rotary_append
from optforge.select import repeated_blocks
from optforge.single_row import STEP
from optforge.spec import Json
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.fuse.attention import one_row_attention
from optforge.transforms.fuse.flow import TOLERANCE, outputs
from optforge.transforms.fuse.packing import PackedPart
from optforge.transforms.mixed import Mixed, mix_

ORDERS = {("norm", "attention", "norm", "mlp"), ("norm", "attention", "norm", "norm", "mlp", "norm")}
"""How a layer's children run: norms before attention and MLP (Llama), or before and after each (Gemma 2 and 3)."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the parts of a layer are, by their names in it."""

    norms: tuple[str, ...]
    """Two, or four, in the order of their calls."""
    attention: str
    qkv: str
    out: str
    head_norms: tuple[str, ...]
    """Of queries and keys, or none."""
    mlp: str
    gate_up: str
    down: str
    gate: str
    """One of `gates.GATES`."""
    eps: float
    offset: float
    """What an RMSNorm adds to its weight (Gemma: 1)."""


class Unfit(Exception):
    """Why a layer keeps its own forward."""


class StepLayer(Mixed):
    """Mixed into a layer's class: a step of a decode loop takes the operators, every other call the layer's own forward."""

    _optforge_roles: Roles

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop(STEP, False):
            place = _place(self, kwargs.get("past_key_values"))  # type: ignore[arg-type]  # it is mixed into a module's class
            if place is not None and hidden_states.shape[1] == 1 and not dispatch.decomposing():
                return _step(self, hidden_states, kwargs["position_embeddings"], place)  # type: ignore[arg-type]  # as above
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]  # the class it is mixed into has it


def _place(layer: nn.Module, cache: Any) -> Any:
    """The layer's place in a cache that keeps every position at a fixed address; None for any other."""
    roles: Any = layer._optforge_roles
    index: int = getattr(layer, roles.attention).layer_idx
    found: Any = cache.layers[index] if cache is not None and index < len(cache.layers) else None
    return found if type(found).__name__ in ("StaticLayer", "QuantizedStaticLayer") and found.is_initialized else None


def _step(layer: nn.Module, x: Tensor, rotations: tuple[Tensor, Tensor], place: Any) -> Tensor:
    """x [B, 1, K] to [B, 1, K]; the token is written at the place where the cache ends."""
    roles: Any = layer._optforge_roles
    norms = [getattr(layer, name) for name in roles.norms]
    attention, mlp = getattr(layer, roles.attention), getattr(layer, roles.mlp)
    qkv, out, gate_up, down = (
        getattr(attention, roles.qkv),
        getattr(attention, roles.out),
        getattr(mlp, roles.gate_up),
        getattr(mlp, roles.down),
    )
    mixed = _attention(attention, roles, _product(x, qkv, roles, norm=norms[0]), rotations, place)
    if len(norms) == 2:
        x = _product(mixed, out, roles, residual=x)
        return _product(_product(x, gate_up, roles, norm=norms[1], gate=roles.gate), down, roles, residual=x)
    x = x + _normed(_product(mixed, out, roles), norms[1], roles)
    return x + _normed(_product(_product(x, gate_up, roles, norm=norms[2], gate=roles.gate), down, roles), norms[3], roles)


def _attention(attention: Any, roles: Roles, qkv: Tensor, rotations: tuple[Tensor, Tensor], place: Any) -> Tensor:
    """[B, 1, H D]. Rotates, writes the cache, advances its length and attends."""
    heads = getattr(attention, roles.out).in_features // attention.head_dim
    q_norm, k_norm = (getattr(attention, name).weight for name in roles.head_norms) if roles.head_norms else (None, None)
    form, scales = getattr(place, "form", None), (getattr(place, "key_scales", None), getattr(place, "value_scales", None))
    storage = "plain" if form is None else ("int8" if form.dtype == "int8" else form.fp8_format)
    at = place.cumulative_length.reshape(1) + 0  # a copy, since the length moves on
    place.cumulative_length.add_(1)
    cached: Any = (place.keys, place.values, *scales)
    around: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": roles.eps, "norm_offset": roles.offset}
    q = rotary_append(qkv, *rotations, at, *cached, heads=heads, storage=storage, **around)
    if not dispatch.on_cpu(q) or not torch.compiler.is_compiling():
        keys, values, key_scales, value_scales = cached
        length, scale = place.cumulative_length, attention.scaling
        return decode_attention(q, keys, values, key_scales, value_scales, length, scale=scale, storage=storage)
    keys, values = place.keys, place.values
    if form is not None:
        keys, values = (form.back(one, by, q.dtype) for one, by in zip((keys, values), scales, strict=True))
    seen = (torch.arange(keys.shape[2], device=q.device) <= at).view(1, 1, 1, -1)
    return one_row_attention(q, keys, values, seen, attention.scaling).reshape(q.shape[0], 1, -1)


def _product(
    x: Tensor, linear: nn.Linear, roles: Roles, *, norm: nn.Module | None = None, gate: str = "", residual: Tensor | None = None
) -> Tensor:
    """The linear with what stands around it, in one operator where its storage and the rows allow, else one after another."""
    plain = type(linear) is nn.Linear or isinstance(linear, Quantized)  # others (sparse, adapters) multiply in a way of their own
    held = parts(linear) if plain and x.shape[0] <= ROWS else None
    if held is not None:
        weight = None if norm is None else norm.get_parameter("weight")
        return fused_linear(x, *held, norm=weight, eps=roles.eps, norm_offset=roles.offset, gate=gate, residual=residual)
    y: Tensor = linear(x if norm is None else _normed(x, norm, roles))
    y = gated(y, gate) if gate else y
    return y if residual is None else y + residual


def _normed(x: Tensor, norm: nn.Module, roles: Roles) -> Tensor:
    return rms_norm(x, norm.get_parameter("weight"), roles.eps, offset=roles.offset)


# --- which layers, and what their parts are ---------------------------------------------------------------------------


def fuse_(model: nn.Module, receipt: Receipt, ctx: Context, example: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Gives every layer whose structure is known its step, and says in the receipt which it left and why."""
    layers = {name: layer for name, layer in repeated_blocks(model).items() if any(True for _ in kv_cache.attention_modules(layer))}
    orders = _orders(model, layers, example, ctx)
    found: dict[str, Roles] = {}
    for name, layer in layers.items():
        try:
            found[name] = roles_of(layer, orders[name])
        except Unfit as why:
            receipt.skipped.setdefault(name, f"a step runs its own forward: {why}")
    for name, roles in found.items():
        use_(layers[name], roles)
    if found and not ctx.planning and not model.training:
        _verify(model, ctx)
    receipt.decisions["steps"] = [[name, asdict(roles)] for name, roles in found.items()]
    receipt.touched += [Touched(name=name, what="decode step by fused operators") for name in found]
    for operator, each in (("fused_linear", 4), ("rotary_append", 1), ("decode_attention", 1)) if found else ():
        receipt.kernels[f"optforge::{operator}"] = each * len(found)


def replay(model: nn.Module, steps: list[list[Json]]) -> None:
    """Gives the layers that a receipt names their steps."""
    for name, roles in steps:
        known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in roles.items()}
        use_(model.get_submodule(name), Roles(**known))


def use_(layer: nn.Module, roles: Roles) -> None:
    """Mixes the step into this layer alone."""
    layer.__dict__["_optforge_roles"] = roles
    mix_(layer, StepLayer)


def taken(model: nn.Module) -> bool:
    """Whether any layer of the model has a step of its own."""
    return any(isinstance(module, StepLayer) for module in model.modules())


def _orders(model: nn.Module, layers: Mapping[str, nn.Module], example: Any, ctx: Context) -> dict[str, list[str]]:
    """The names of each layer's children in the order in which one pass calls them."""
    orders: dict[str, list[str]] = {name: [] for name in layers}
    handles = []
    for name, layer in layers.items():
        for child_name, child in layer.named_children():
            note = orders[name].append
            handles.append(child.register_forward_pre_hook(lambda *_, note=note, child=child_name: note(child)))
    try:
        outputs(model, example, ctx)
    finally:
        for handle in handles:
            handle.remove()
    return orders


def roles_of(layer: nn.Module, order: list[str]) -> Roles:
    """What the layer's parts are.

    Raises:
        Unfit: the structure is another, with the reason.
    """
    kinds = {name: _kind(layer.get_submodule(name)) for name in order}
    order = [name for name in order if kinds[name] != "dropout"]
    if tuple(kinds[name] for name in order) not in ORDERS:
        raise Unfit(f"its parts run as {', '.join(kinds[name] for name in order)}")
    norms = [name for name in order if kinds[name] == "norm"]
    attention, mlp = (next(name for name in order if kinds[name] == kind) for kind in ("attention", "mlp"))
    read = {_norm_form(layer.get_submodule(name)) for name in norms}
    if len(read) > 1:
        raise Unfit("its norms differ from one another")
    eps, offset = read.pop()
    qkv, out, head_norms = _attention_parts(layer.get_submodule(attention), eps, offset)
    gate_up, down, gate = _mlp_parts(layer.get_submodule(mlp))
    return Roles(
        norms=tuple(norms),
        attention=attention,
        qkv=qkv,
        out=out,
        head_norms=head_norms,
        mlp=mlp,
        gate_up=gate_up,
        down=down,
        gate=gate,
        eps=eps,
        offset=offset,
    )


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Dropout):
        return "dropout"
    if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "head_dim"):
        return "attention"
    if not any(True for _ in module.children()):
        return "norm"
    return "mlp"


def _attention_parts(attention: nn.Module, eps: float, offset: float) -> tuple[str, str, tuple[str, ...]]:
    linears = {name: one for name, one in attention.named_children() if isinstance(one, nn.Linear)}
    others = [name for name, one in attention.named_children() if name not in linears and not isinstance(one, PackedPart | nn.Dropout)]
    width = attention.head_dim
    if len(linears) != 2 or not isinstance(width, int):
        raise Unfit("its attention holds no packed projection of queries, keys and values")
    pairs = [(a, b) for a, b in permutations(linears) if _feeds(linears[a], linears[b], width)]
    if not pairs:
        raise Unfit("the sizes of its attention's projections are not those of queries, keys and values")
    qkv, out = pairs[0]
    if getattr(attention, "attn_logit_softcapping", None) is not None:
        raise Unfit("its attention caps its scores")
    if not isinstance(getattr(attention, "scaling", None), float):
        raise Unfit("its attention does not say how it scales")
    if others not in ([], ["q_norm", "k_norm"]):
        raise Unfit(f"its attention has parts of other kinds: {', '.join(others)}")
    for name in others:
        norm = attention.get_submodule(name)
        if tuple(norm.get_parameter("weight").shape) != (width,) or _norm_form(norm) != (eps, offset):
            raise Unfit("its norms of queries and keys are not RMSNorms of each head")
    return qkv, out, tuple(others)


def _feeds(qkv: nn.Linear, out: nn.Linear, width: int) -> bool:
    """Whether these can be the projections before and after attention with heads of `width`."""
    rest = qkv.out_features - out.in_features
    return qkv.in_features == out.out_features and rest > 0 and rest % (2 * width) == 0 and out.in_features % width == 0


def _mlp_parts(mlp: nn.Module) -> tuple[str, str, str]:
    linears = {name: one for name, one in mlp.named_children() if isinstance(one, nn.Linear)}
    others = [one for _, one in mlp.named_children() if not isinstance(one, nn.Linear | PackedPart | nn.Dropout)]
    pairs = [(a, b) for a in linears for b in linears if a != b and linears[a].out_features == 2 * linears[b].in_features]
    if len(linears) != 2 or not pairs or len(others) != 1:
        raise Unfit("its MLP is not a packed gate and up projection, an activation and a down projection")
    x = torch.linspace(-6, 6, 49)
    try:
        made = others[0](x)
    except (RuntimeError, TypeError) as error:
        raise Unfit(f"its activation cannot be tried: {str(error).splitlines()[0]}") from error
    gate = next((name for name, known in ACTIVATIONS.items() if torch.allclose(made, known(x), atol=1e-6)), None)
    if gate is None:
        raise Unfit("its gate has another activation than SiLU or GELU")
    return (*pairs[0], gate)


def _norm_form(norm: nn.Module) -> tuple[float, float]:
    """eps, and what is added to the weight, of an RMSNorm, found by trying a copy of it on numbers.

    Raises:
        Unfit: it is another norm.
    """
    eps = next((value for name in ("variance_epsilon", "eps") if isinstance(value := getattr(norm, name, None), float)), None)
    weight = norm._parameters.get("weight")
    if eps is None or weight is None or norm._parameters.get("bias") is not None or norm._forward_hooks or norm._forward_pre_hooks:
        raise Unfit("its norms are not RMSNorms with one weight")
    tried = copy.copy(norm)
    draw = torch.Generator().manual_seed(0)
    tried._parameters = {"weight": nn.Parameter(torch.rand(weight.shape, generator=draw), requires_grad=False)}
    x = torch.randn(3, weight.shape[0], generator=draw) + 0.5
    with torch.no_grad(), dispatch.decompose():
        made = tried(x)
        for offset in (0.0, 1.0):
            if torch.allclose(made, rms_norm(x, tried._parameters["weight"], eps, offset=offset), atol=1e-5):
                return eps, offset
    raise Unfit("its norms are not RMSNorms with one weight")


def _verify(model: nn.Module, ctx: Context) -> None:
    """Decodes one token with and without the steps, over caches of their own.

    Raises:
        StepError: the logits differ.
    """
    config: Any = model.config
    device = next(model.parameters()).device
    ids = torch.arange(1, 13, device=device).remainder(config.get_text_config(decoder=True).vocab_size).reshape(2, 6)
    found = []
    with torch.inference_mode(False), torch.no_grad():
        for more in ({}, {STEP: True}):
            cache = kv_cache.new_cache(model, 8)
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            found.append(model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, **more).logits.double())
    change = float((found[1] - found[0]).norm() / found[0].norm().clamp_min(1e-30))
    # in 16 bits a step rounds in other places than the layers do, and what comes after amplifies that; a wrong step changes all
    if not change <= 3 * TOLERANCE.get(next(model.parameters()).dtype, 5e-2):
        raise StepError(f"step {ctx.step}: a decode step by fused operators changed the logits by {change:.1e} of their norm")
