"""Each operator on inputs that find mistakes, beside what float64 arithmetic makes of the same stored bytes.

`optforge kernels check` and the tests run these, on a GPU or under Triton's interpreter. What is expected is worked out here from the
definitions of the formats and operators, without the package's own arithmetic, which would agree with itself in a mistake. Inputs hold
rows of zeros, large values, sizes that are multiples of nothing, and memory that nothing was written to is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optforge.kernels.configurations import Config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2e-5}
"""Of a result in each dtype: twice its half step in bf16, since the interpreter cuts where hardware rounds."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One call of one operator."""

    operator: str
    label: str
    run: Callable[[Config | None], tuple[Tensor, ...]]
    """Launches the kernel, with a configuration or with the one that would be chosen."""
    expected: tuple[Tensor, ...]
    """float64 or whole numbers, in the order of what `run` gives."""
    tolerance: float
    """Relative error of the whole, and a fourth of what one value may be off by, against itself and the root mean square."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trial."""

    operator: str
    label: str
    error: float
    """Largest relative error of an output, by norm; infinite where something was not written or is not finite."""
    worst: float
    """Largest error of one value, as a share of what is allowed."""
    passed: bool


def judge(trial: Trial, config: Config | None = None) -> Outcome:
    """Runs a trial with all fresh memory poisoned, and holds its outputs against what is expected."""
    with poisoned():
        found = trial.run(config)
    error = worst = 0.0
    for output, expected in zip(found, trial.expected, strict=True):
        if not expected.is_floating_point():
            same = torch.equal(output.cpu().to(expected.dtype), expected)
            error, worst = (error, worst) if same else (float("inf"), float("inf"))
            continue
        exact = expected.to(output.device)
        off = (output.double() - exact).abs()
        if not bool(off.isfinite().all()) or output.shape != exact.shape:
            error = worst = float("inf")
            continue
        size, spread = float(exact.norm()), float(exact.square().mean().sqrt()) if exact.numel() else 0.0
        error = max(error, float(off.norm()) / size if size else float(off.norm()))
        allowed = 4 * trial.tolerance * (exact.abs() + spread) + 1e-30
        worst = max(worst, float((off / allowed).max()) if off.numel() else 0.0)
    return Outcome(operator=trial.operator, label=trial.label, error=error, worst=worst, passed=error <= trial.tolerance and worst <= 1)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it `torch.empty` gives NaN (127 where there is none), so that what a kernel leaves out is seen."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 127)

    torch.empty = lambda *a, **k: fill(empty(*a, **k))
    torch.empty_like = lambda *a, **k: fill(empty_like(*a, **k))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


# Stored numbers by their definitions.


def fp8_value(byte: int, bias: int) -> float:
    """An e4m3 byte by its definition; the bytes of NaN are never stored."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    return sign * (mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias))


BIAS = {"e4m3fn": 7, "e4m3fnuz": 8}


def fp8_bytes(shape: tuple[int, ...], form: str, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random finite bytes and their values in float64."""
    finite = [byte for byte in range(256) if byte != 0x80 and (form == "e4m3fnuz" or byte & 0x7F != 0x7F)]
    stored = torch.tensor(finite, dtype=torch.uint8)[torch.randint(0, len(finite), shape, generator=draw)]
    table = torch.tensor([fp8_value(byte, BIAS[form]) for byte in range(256)], dtype=torch.float64)
    return stored, table[stored.long()]


@dataclass(frozen=True)
class Weight:
    """A stored weight and the float64 [N, K] that it stands for."""

    weight: Tensor
    scale: Tensor | None
    zero: Tensor | None
    value: Tensor


def weight(storage: str, outputs: int, columns: int, group: int, dtype: torch.dtype, draw: torch.Generator, *, zero: bool = True) -> Weight:
    """Random storage with a row of zeros."""
    scale = torch.rand(outputs, 1, generator=draw) * 0.01 + 1e-3
    if storage == "plain":
        plain = (torch.randn(outputs, columns, generator=draw) * 0.05).to(dtype)
        plain[0] = 0
        return Weight(plain, None, None, plain.double())
    if storage == "int8":
        stored = torch.randint(-127, 128, (outputs, columns), dtype=torch.int8, generator=draw)
        stored[0] = 0
        return Weight(stored, scale, None, stored.double() * scale.double())
    if storage != "int4":
        stored, value = fp8_bytes((outputs, columns), storage, draw)
        stored[0], value[0] = 0, 0
        return Weight(stored, scale, None, value * scale.double())
    groups = -(-columns // group)
    scale = torch.rand(outputs, groups, generator=draw) * 0.05 + 1e-3
    nibbles = torch.randint(0, 16, (outputs, columns + columns % 2), dtype=torch.uint8, generator=draw)
    zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8, generator=draw) if zero else None
    offset = torch.full((outputs, groups), 8.0, dtype=torch.float64) if zeros is None else zeros.double()
    at = torch.arange(columns) // group
    value = (nibbles[:, :columns].double() - offset[:, at]) * scale.double()[:, at]
    return Weight(nibbles[:, 0::2] + 16 * nibbles[:, 1::2], scale, zeros, value)


def activations(rows: int, columns: int, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Normal numbers; the first of several rows is zero, the last a hundred times as large."""
    x = torch.randn(rows, columns, generator=draw)
    x[-1:] *= 100
    if rows > 1:
        x[0] = 0
    return x.to(dtype)


def act(values: Tensor, gate: str) -> Tensor:
    """The gates by their definitions."""
    if gate == "silu":
        return values / (1 + torch.exp(-values))
    if gate == "gelu":
        return values * 0.5 * (1 + torch.erf(values / 2**0.5))
    return values * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (values + 0.044715 * values**3)))


def linear(
    storage: str,
    rows: int,
    outputs: int,
    columns: int,
    *,
    dtype: str = "bf16",
    group: int = 64,
    zero: bool = True,
    norm: bool = False,
    gate: str = "",
    bias: bool = False,
    residual: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Trial:
    """A trial of `fused_linear`; `outputs` are the result's."""
    from optforge.kernels import few_rows

    launch: Any = few_rows.launch

    draw = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype]
    held = weight(storage, outputs * (2 if gate else 1), columns, group, kind, draw, zero=zero)
    x = activations(rows, columns, kind, draw)
    by = (torch.randn(columns, generator=draw) * 0.2 + 1).to(kind) if norm else None
    plus = torch.randn(held.weight.shape[0], generator=draw).to(kind) if bias else None
    kept = torch.randn(rows, outputs, generator=draw).to(kind) if residual else None
    values = x.double()
    if by is not None:
        values = values / (values.square().mean(1, keepdim=True) + 1e-5).sqrt() * by.double()
    expected = values @ held.value.t() + (0 if plus is None else plus.double())
    if gate:
        first, second = expected.chunk(2, 1)
        expected = act(first, gate) * second
    if kept is not None:
        expected = expected + kept.double()
    tensors = [None if t is None else t.to(device) for t in (x, held.weight, held.scale, held.zero, plus, by, kept)]
    words = [storage + (f" group {group}" * (storage == "int4")), f"{rows} x {outputs} x {columns}", dtype]
    words += [word for word, there in (("norm", norm), (gate, gate), ("bias", bias), ("residual", residual)) if there]
    return Trial(
        operator="fused_linear",
        label=", ".join(words),
        run=lambda config: (launch(*tensors, storage, group, 1e-5, 0.0, gate, config),),
        expected=(expected,),
        tolerance=TOLERANCE[dtype] * (2 if gate else 1),
    )


def linears(device: str = "cpu") -> Iterator[Trial]:
    """Every storage with 1 to 16 rows, everything around it, odd sizes."""
    rows = (1, 2, 3, 5, 16)
    for place, storage in enumerate(("plain", "int8", "e4m3fn", "e4m3fnuz", "int4")):
        for count in rows:
            yield linear(storage, count, 40, 256 + 32, device=device, bias=True, seed=place)
            yield linear(storage, count, 36, 320, device=device, norm=True, gate="silu", seed=place + 10)
        yield linear(storage, 3, 33, 192, device=device, dtype="fp16", residual=True, group=32, zero=False, seed=place + 20)
        yield linear(storage, 1, 17, 160, device=device, norm=True, gate="gelu_tanh", bias=True, residual=True, seed=place + 30)
    yield linear("e4m3fn", 1, 24, 128, device=device, gate="gelu", seed=40)


GROUPS: dict[str, Callable[[str], Iterator[Any]]] = {"fused_linear": linears}
"""Operator -> its trials on a device."""
