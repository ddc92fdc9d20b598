"""Trials of the operators around a decoder's products: norms, gates, rotary embedding with cache, attention, argmax, loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from optforge.kernels.trials import BIAS, DTYPES, TOLERANCE, Trial, act, activations, fp8_bytes, fp8_value

MAXIMUM = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}


def rounding_steps(stored: Tensor, scale: Tensor, shift: Tensor, exact: Tensor, form: str) -> Tensor:
    """How far what is stored lies from `exact`, in units of what rounding to nearest may be off by; 1 is right, more is wrong."""
    if form == "int8":
        back, allowed = stored.double() * scale.double() + shift.double(), 0.5 * scale.double()
    else:
        table = torch.tensor([fp8_value(byte, BIAS[form]) for byte in range(256)], dtype=torch.float64)
        back = table[stored.cpu().long()].to(exact.device) * scale.double() + shift.double()
        allowed = torch.maximum(exact.abs() / 16, scale.double() * 2.0 ** (-3 - BIAS[form]))
    off = (back - exact).abs()
    return off / (allowed * 1.001 + 1e-5 * exact.abs() + 1e-30)  # fp32 arithmetic decides ties


def norm(rows: int, columns: int, dtype: str, device: str, *, residual: bool, centered: bool, form: str = "", seed: int = 0) -> Trial:
    """Of `norm`, or of `rounded_norm` where a form is given: then what counts is that each value is the nearest there is."""
    from optforge.kernels import row_kernels as kernels

    row_kernels: Any = kernels

    draw = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype]
    x = activations(rows, columns, kind, draw)
    plus = torch.randn(rows, columns, generator=draw).to(kind) if residual else None
    weight = (torch.randn(columns, generator=draw) * 0.2 + 1).to(kind)
    bias = torch.randn(columns, generator=draw).to(kind) if centered else None
    hidden = x if plus is None else (x.float() + plus.float()).to(kind)
    values = hidden.double()
    if centered:
        values = values - values.mean(1, keepdim=True)
    exact = values / (values.square().mean(1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 0.5)
    exact = exact if bias is None else exact + bias.double()
    given = [None if t is None else t.to(device) for t in (x, plus, weight, bias)]
    words = ["LayerNorm" if centered else "RMSNorm", f"{rows} x {columns}", dtype, *(["residual"] * residual), *([form] if form else [])]

    def run(config: Any) -> tuple[Tensor, ...]:
        if not form:
            y, kept = row_kernels.norm(*given, 1e-5, 0.5, centered=centered)
            return (y, kept) if residual else (y,)
        stored, scale, shift, kept = row_kernels.rounded_norm(*given, 1e-5, 0.5, centered=centered, form=form)
        return rounding_steps(stored, scale, shift, exact.to(stored.device), form).clamp(min=1), kept

    whole: tuple[Tensor, ...] = (torch.ones_like(exact) if form else exact,)
    tolerance = 1e-3 if form else TOLERANCE[dtype]
    sums = (hidden.double(),) if residual or form else ()
    return Trial(
        operator="rounded_norm" if form else "norm", label=", ".join(words), run=run, expected=whole + sums, tolerance=max(tolerance, 2e-5)
    )


def gate(rows: int, half: int, dtype: str, device: str, kind: str, form: str = "", seed: int = 0) -> Trial:
    """Of `gated`, or of `rounded_gated` where a form is given."""
    from optforge.kernels import row_kernels as kernels

    row_kernels: Any = kernels

    draw = torch.Generator().manual_seed(seed)
    x = activations(rows, 2 * half, DTYPES[dtype], draw)
    first, second = x.double().chunk(2, 1)
    exact = act(first, kind) * second
    there = x.to(device)

    def run(config: Any) -> tuple[Tensor, ...]:
        if not form:
            return (row_kernels.gated(there, kind),)
        stored, scale, shift = row_kernels.rounded_gated(there, kind, form)
        return (rounding_steps(stored, scale, shift, exact.to(there.device), form).clamp(min=1),)

    label = ", ".join([kind, f"{rows} x {half}", dtype, *([form] if form else [])])
    expected = torch.ones_like(exact) if form else exact
    return Trial(
        operator="rounded_gated" if form else "gated",
        label=label,
        run=run,
        expected=(expected,),
        tolerance=1e-3 if form else TOLERANCE[dtype],
    )


def norms(device: str) -> Iterator[Trial]:
    for seed, (rows, columns) in enumerate(((1, 40), (17, 129), (3, 576))):
        for dtype in DTYPES:
            yield norm(rows, columns, dtype, device, residual=bool(seed), centered=False, seed=seed)
            yield norm(rows, columns, dtype, device, residual=not seed, centered=True, seed=seed)


def rounded_norms(device: str) -> Iterator[Trial]:
    for seed, form in enumerate(("int8", "e4m3fn", "e4m3fnuz")):
        yield norm(17, 129, "fp32", device, residual=True, centered=False, form=form, seed=seed)
        yield norm(17, 129, "bf16", device, residual=False, centered=False, form=form, seed=seed)
        yield norm(3, 40, "fp32", device, residual=False, centered=True, form=form, seed=seed)


def gates(device: str) -> Iterator[Trial]:
    for seed, kind in enumerate(("silu", "gelu", "gelu_tanh")):
        yield gate(17, 33, "bf16", device, kind, seed=seed)
        yield gate(1, 1500, "fp32", device, kind, seed=seed)


def rounded_gates(device: str) -> Iterator[Trial]:
    for seed, form in enumerate(("int8", "e4m3fn", "e4m3fnuz")):
        yield gate(17, 130, "bf16", device, "silu", form, seed=seed)


def rotary(
    batch: int,
    tokens: int,
    heads: int,
    groups: int,
    width: int,
    rotary: int,
    device: str,
    *,
    storage: str,
    normed: bool = False,
    seed: int = 0,
) -> Trial:
    """Of `rotary_append`: the queries, and what the cache gives back at the new places and keeps at the others."""
    from optforge.kernels import rotary_kernel

    launch: Any = rotary_kernel.launch

    draw = torch.Generator().manual_seed(seed)
    length, start = tokens + 5, 3
    qkv = activations(batch * tokens, (heads + 2 * groups) * width, torch.bfloat16, draw).view(batch, tokens, -1)
    angles = torch.rand(1, tokens, rotary // 2, generator=draw) * 6
    cos, sin = (torch.cat((part, part), -1).bfloat16() for part in (angles.cos(), angles.sin()))
    scaled = [(torch.rand(width, generator=draw) + 0.5).bfloat16() for _ in range(2)] if normed else [None, None]
    apart = qkv.double().view(batch, tokens, heads + 2 * groups, width).transpose(1, 2)
    q, k, v = apart[:, :heads], apart[:, heads : heads + groups], apart[:, heads + groups :]
    q, k = (_turned(_head_normed(states, by), cos, sin) for states, by in ((q, scaled[0]), (k, scaled[1])))
    positions = torch.arange(tokens) + start
    kind = torch.bfloat16 if storage == "plain" else torch.int8 if storage == "int8" else torch.uint8
    given = [None if t is None else t.to(device) for t in (qkv, cos, sin, positions, *scaled)]

    def run(config: Any) -> tuple[Tensor, ...]:
        caches = [torch.full((batch, groups, length, width), 3, dtype=kind, device=device) for _ in range(2)]
        plain = storage == "plain"
        scales = [None if plain else torch.full((batch, groups, length, 1), 0.5, device=device) for _ in range(2)]
        found = launch(*given[:4], *caches, *scales, *given[4:], heads, storage, 1e-5, 0.0)
        untouched = torch.cat([cache[:, :, [0, 1, 2, -1, -2]].double().flatten() for cache in caches])
        if storage == "plain":
            return found, caches[0][:, :, 3:-2], caches[1][:, :, 3:-2], untouched
        steps = [
            rounding_steps(cache[:, :, 3:-2], scale[:, :, 3:-2], torch.zeros(1, device=device), exact.to(device), storage).clamp(min=1)  # type: ignore[index]  # scales are there
            for cache, scale, exact in zip(caches, scales, (k, v), strict=True)
        ]
        return found, *steps, untouched

    three = torch.full((2 * batch * groups * 5 * width,), 3.0, dtype=torch.float64)
    written = (k, v) if storage == "plain" else (torch.ones_like(k), torch.ones_like(v))
    label = f"{batch} x {tokens}, {heads} heads, {groups} groups, {rotary} of {width}, {storage}{', normed' * normed}"
    return Trial(operator="rotary_append", label=label, run=run, expected=(q, *written, three), tolerance=TOLERANCE["bf16"])


def _head_normed(states: Tensor, by: Tensor | None) -> Tensor:
    if by is None:
        return states
    return states / (states.square().mean(-1, keepdim=True) + 1e-5).sqrt() * by.double()


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pair by pair: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    size = cos.shape[-1]
    half = size // 2
    out = states.clone()
    a, b = states[..., :half], states[..., half:size]
    c, s = cos.double()[:, None, :, :half], sin.double()[:, None, :, :half]
    out[..., :half], out[..., half:size] = a * c - b * s, b * c + a * s
    return out


def rotaries(device: str) -> Iterator[Trial]:
    for seed, storage in enumerate(("plain", "int8", "e4m3fn", "e4m3fnuz")):
        yield rotary(2, 3, 4, 2, 16, 16, device, storage=storage, seed=seed)
        yield rotary(1, 1, 3, 1, 40, 20, device, storage=storage, normed=True, seed=seed + 10)


def attention(
    batch: int,
    heads: int,
    groups: int,
    width: int,
    places: int,
    length: int,
    device: str,
    *,
    storage: str,
    dtype: str,
    config: Any,
    seed: int,
) -> Trial:
    """Of `decode_attention`; what lies beyond the length is NaN, or the byte of one."""
    from optforge.kernels import split_attention

    launch: Any = split_attention.launch

    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, 1, width, generator=draw).to(DTYPES[dtype])
    stored, values, scales = [], [], []
    for _ in range(2):
        one, value, scale = _cache((batch, groups, places, width), storage, DTYPES[dtype], draw)
        if length < places:
            one[:, :, length:] = float("nan") if one.is_floating_point() else 127
        stored.append(one)
        values.append(value[:, :, :length])
        scales.append(scale)
    queries = q.double().reshape(batch, groups, heads // groups, width)
    weights = torch.softmax(queries @ values[0].transpose(2, 3) * width**-0.5, -1)
    exact = (weights @ values[1]).reshape(batch, 1, heads * width)
    given = [None if t is None else t.to(device) for t in (q, *stored, *scales, torch.tensor([length]))]
    label = f"{batch} x {heads} heads, {groups} groups of {width}, {length} of {places}, {storage}, {dtype}"
    return Trial(
        operator="decode_attention",
        label=label,
        run=lambda other: (launch(*given, width**-0.5, storage, other or config),),
        expected=(exact,),
        tolerance=TOLERANCE[dtype] * 2,
    )


def _cache(shape: tuple[int, ...], storage: str, dtype: torch.dtype, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stored, float64 values, scales."""
    if storage == "plain":
        plain = torch.randn(shape, generator=draw).to(dtype)
        return plain, plain.double(), None
    scale = torch.rand((*shape[:-1], 1), generator=draw) * 0.02 + 1e-3
    if storage == "int8":
        stored = torch.randint(-127, 128, shape, dtype=torch.int8, generator=draw)
        return stored, stored.double() * scale.double(), scale
    stored, value = fp8_bytes(shape, storage, draw)
    scale = scale / 4
    return stored, value * scale.double(), scale


def attentions(device: str) -> Iterator[Trial]:
    small = {"BLOCK_L": 32, "CONVERT": 0, "PDL": 0, "num_warps": 4, "num_stages": 2}
    for seed, storage in enumerate(("plain", "int8", "e4m3fn", "e4m3fnuz")):
        for split, length in ((1, 70), (4, 200), (8, 33), (4, 0), (2, 1)):
            dtype = "fp16" if split == 2 else "bf16"
            yield attention(2, 4, 2, 32, 200, length, device, storage=storage, dtype=dtype, config=small | {"SPLIT": split}, seed=seed)
    yield attention(1, 6, 2, 40, 130, 129, device, storage="plain", dtype="fp32", config=small | {"SPLIT": 2}, seed=9)
    yield attention(1, 34, 2, 16, 64, 64, device, storage="plain", dtype="bf16", config=None, seed=10)


def argmaxes(device: str) -> Iterator[Trial]:
    from optforge.kernels.argmax_kernel import launch

    for seed, (rows, vocabulary, split, block) in enumerate(((1, 5000, 4, 512), (3, 1000, 1, 512), (17, 70, 2, 64), (2, 2049, 8, 256))):
        draw = torch.Generator().manual_seed(seed)
        logits = torch.randn(rows, vocabulary, generator=draw).bfloat16()  # with many equal ones
        logits[0] = -float("inf")
        if rows > 1:
            logits[1, vocabulary // 2] = float("nan")
            logits[-1] = -1.5
        wanted = torch.tensor([int(torch.nonzero(row.isnan() if row.isnan().any() else row == row.max())[0]) for row in logits.float()])
        there = logits.to(device)
        config = {"SPLIT": split, "BLOCK": block, "PDL": 0, "num_warps": 4, "num_stages": 2}
        yield Trial(
            operator="argmax",
            label=f"{rows} x {vocabulary}, {split} parts",
            run=lambda other, there=there, config=config: (launch(there, other or config),),  # type: ignore[misc]  # bound now
            expected=(wanted,),
            tolerance=0.0,
        )


def losses(device: str) -> Iterator[Trial]:
    """The row step on logits; with a row that does not count."""
    from optforge.kernels.cross_entropy_kernel import step

    for seed, (rows, vocabulary) in enumerate(((1, 33), (17, 1000), (3, 5000))):
        draw = torch.Generator().manual_seed(seed)
        logits = torch.randn(rows, vocabulary, generator=draw) * 4
        logits[-1] *= 30
        targets = torch.randint(0, vocabulary, (rows,), generator=draw)
        if rows > 1:
            targets[1] = -100
        counted = targets != -100
        exact = logits.double()
        normalizer = torch.logsumexp(exact, 1, keepdim=True)
        one_hot = torch.nn.functional.one_hot(targets.clamp(min=0), vocabulary)
        lost = torch.where(counted, normalizer[:, 0] - (exact * one_hot).sum(1), 0.0)
        gradient = torch.where(counted[:, None], (torch.exp(exact - normalizer) - one_hot) / int(counted.sum()), 0.0)
        given = (logits.to(device), targets.to(device), (1 / counted.sum().float()).to(device))

        def run(config: Any, given: tuple[Tensor, Tensor, Tensor] = given) -> tuple[Tensor, ...]:
            work = given[0].clone()
            return step(work, given[1], given[2], -100, True), work

        yield Trial(operator="linear_cross_entropy", label=f"{rows} x {vocabulary}", run=run, expected=(lost, gradient), tolerance=2e-5)


GROUPS = {
    "norm": norms,
    "rounded_norm": rounded_norms,
    "gated": gates,
    "rounded_gated": rounded_gates,
    "rotary_append": rotaries,
    "decode_attention": attentions,
    "argmax": argmaxes,
    "linear_cross_entropy": losses,
}
