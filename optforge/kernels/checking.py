"""What `optforge kernels` does: lists the operators, checks their kernels against float64, times them, and tunes their configurations.

Checks run on the GPU at hand, or on a CPU under Triton's interpreter in a process of its own, because the interpreter is chosen when
Triton is imported. Timing and tuning need the GPU. A configuration is timed only after its result was right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from optforge import isolate

if TYPE_CHECKING:
    from torch import Tensor

    from optforge.kernels.configurations import Config, Device, Shape

LIMIT_S = 600.0
"""Seconds that the checks may take under the interpreter; they take about 20."""

FLOATS, HALVES = "bf16 fp16 fp32", "bf16 fp16"
OPERATORS: dict[str, tuple[str, str]] = {
    "fused_linear": (HALVES, "1 to 16 rows times a bf16, fp8, int8 or int4 weight, with norm, bias, gate and residual"),
    "norm": (FLOATS, "RMSNorm or LayerNorm with the residual sum before it"),
    "rounded_norm": (FLOATS, "the same, rounded to int8 or fp8 per row"),
    "gated": (FLOATS, "SwiGLU and GEGLU"),
    "rounded_gated": (FLOATS, "the same, rounded to int8 or fp8 per row"),
    "rotary_append": (FLOATS, "rotary embedding, keys and values written to a plain, int8 or fp8 cache"),
    "decode_attention": (FLOATS, "one token over a plain, int8 or fp8 cache, split over the context"),
    "argmax": (FLOATS, "the most likely token"),
    "linear_cross_entropy": (FLOATS, "a head's loss and gradients in chunks, without its logits"),
}
"""Operator -> dtypes of activations, and what it does."""
ARCHES = "sm_80 and later, gfx942, gfx950"
TUNED = ("fused_linear", "decode_attention", "argmax")
"""Operators whose configurations are looked up."""


def check(operators: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """Where it ran (a GPU's name, or the interpreter), and the outcome of every trial of these operators.

    Raises:
        ChildFailed: the interpreter's process ended without a result.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), outcomes(operators, "cuda")
    env = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found: list[dict[str, Any]] = isolate.call(outcomes, list(operators), "cpu", timeout_s=LIMIT_S, env=env)
    return "Triton's interpreter on the CPU", found


def outcomes(operators: Sequence[str], device: str) -> list[dict[str, Any]]:
    """Runs in this process: on `cuda`, or on `cpu` where the interpreter was chosen before Triton was imported."""
    import warnings

    from optforge.kernels import trials, trials_more

    groups = trials.GROUPS | trials_more.GROUPS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's of exp(88), which is meant
        return [asdict(trials.judge(trial)) for name in operators for trial in groups[name](device)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of a decoder to time."""

    label: str
    shape: Shape
    run: Callable[[Config | None], Tensor]
    moved: int
    """The fewest bytes that it reads and writes."""


def cases(operators: Sequence[str], rows: int, context: int) -> Iterator[Case]:
    """Llama-3-8B's shapes on the GPU, one after another; `rows` sequences, `context` tokens in the cache."""
    import torch

    from optforge.kernels import argmax_kernel, few_rows, split_attention
    from optforge.kernels.dispatch import BYTE_FORMULAS

    if "fused_linear" in operators:
        for storage in ("plain", "e4m3fn", "int8", "int4"):
            for outputs, columns, gate, norm in (
                (6144, 4096, "", True),
                (4096, 4096, "", False),
                (14336, 4096, "silu", True),
                (4096, 14336, "", False),
                (128256, 4096, "", True),
            ):
                if (storage != "plain") and outputs == 128256:
                    continue
                given = _linear(storage, rows, outputs, columns, gate, norm)
                shape = few_rows.shape_of(given[0], given[1], storage, 128, gate, norm)
                yield Case(
                    label=f"fused_linear {shape.form} {outputs} x {columns}",
                    shape=shape,
                    run=partial(_with, few_rows.launch, given),
                    moved=BYTE_FORMULAS["fused_linear"](*given),
                )
    if "decode_attention" in operators:
        for storage in ("plain", "e4m3fn", "int8"):
            caches = _caches(storage, rows, context)
            q = torch.randn(rows, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
            arguments = (q, *caches, torch.tensor([context], device="cuda"), 128**-0.5, storage)
            yield Case(
                label=f"decode_attention {storage} {context} tokens",
                shape=split_attention.shape_of(q, caches[0], storage),
                run=partial(_with, split_attention.launch, arguments),
                moved=BYTE_FORMULAS["decode_attention"](*arguments),
            )
    if "argmax" in operators:
        logits = torch.randn(rows, 128256, device="cuda", dtype=torch.bfloat16)
        yield Case(
            label="argmax 128256",
            shape=argmax_kernel.shape_of(logits),
            run=lambda config: argmax_kernel.launch(logits, config),
            moved=BYTE_FORMULAS["argmax"](logits),
        )


def _with(launch: Any, given: tuple[Any, ...], config: Config | None) -> Tensor:
    found: Tensor = launch(*given, config)
    return found


def _linear(storage: str, rows: int, outputs: int, columns: int, gate: str, norm: bool) -> tuple[Any, ...]:
    """The arguments of `few_rows.launch` without a configuration, random."""
    import torch

    outputs *= 2 if gate else 1
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    by = torch.rand(columns, device="cuda", dtype=torch.bfloat16) if norm else None
    scale: Tensor | None = torch.rand(outputs, columns // 128 if storage == "int4" else 1, device="cuda") * 0.01
    zero = None
    if storage == "plain":
        weight, scale = torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16), None
    elif storage == "int8":
        weight = torch.randint(-127, 128, (outputs, columns), device="cuda", dtype=torch.int8)
    else:  # fp8 without its NaN
        weight = torch.randint(0, 126, (outputs, columns // (2 if storage == "int4" else 1)), device="cuda", dtype=torch.uint8)
        zero = torch.randint(0, 16, (outputs, columns // 128), device="cuda", dtype=torch.uint8) if storage == "int4" else None
    return x, weight, scale, zero, None, by, None, storage, 128 if storage == "int4" else 0, 1e-5, 0.0, gate


def _caches(storage: str, rows: int, context: int) -> tuple[Any, ...]:
    import torch

    place = (rows, 8, context)
    if storage == "plain":
        return (*(torch.randn(*place, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)), None, None)
    kind = torch.int8 if storage == "int8" else torch.uint8
    stored = tuple(torch.randint(0, 100, (*place, 128), device="cuda", dtype=kind) for _ in range(2))
    return stored + tuple(torch.rand(*place, 1, device="cuda") * 0.01 for _ in range(2))


CALLS, ROUNDS = 10, 9
"""Calls in a captured graph, and replays of it, of which the median counts."""


def microseconds(run: Callable[[], Any]) -> float:
    """One call's time on the device from a cold cache, launched from a CUDA graph.

    Before each call 256 MB are read, which the device's cache cannot hold beside; a graph of those reads alone is taken off.
    """
    import torch

    filler = torch.ones(2**26, device="cuda")

    def cold() -> None:
        filler.sum()
        run()

    return max(_replayed(cold) - _replayed(filler.sum), 1e-3)


def _replayed(call: Callable[[], Any]) -> float:
    """Microseconds of one call of a graph that holds `CALLS`."""
    import statistics

    import torch

    cuda: Any = torch.cuda  # PyTorch leaves its streams and events untyped
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and makes what is made once
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    spent: list[float] = []
    for _ in range(ROUNDS):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(end) / CALLS * 1e3)
    return statistics.median(spent)


def best(
    case: Case, device: Device, *, budget_s: float, timed: Callable[[Callable[[], Any]], float] = microseconds
) -> tuple[dict[str, Any] | None, int, int]:
    """The fastest configuration within the time, how many were tried, and how many were wrong or refused.

    Each result is compared with that of the configuration by reasoning, which `check` holds against float64.
    """
    import random

    import torch

    from optforge.kernels.configurations import reasoned, space

    first, *others = space(case.shape, device)
    random.Random(0).shuffle(others)  # what time allows is a fair part of the whole
    end = time.monotonic() + budget_s
    expected = case.run(reasoned(case.shape, device)).double()
    found: dict[str, Any] | None = None
    tried = refused = 0
    for config in (first, *others):
        if tried and time.monotonic() > end:
            break
        tried += 1
        try:
            y = case.run(config).double()
        except Exception as error:  # a compiler's or a launch's refusal is an answer; a lost device is not
            if "illegal" in str(error) or "unspecified launch" in str(error):
                raise
            refused += 1
            continue
        if not torch.allclose(y, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()), equal_nan=False):
            refused += 1
            continue
        spent = timed(lambda config=config: case.run(config))  # type: ignore[misc]  # bound now
        if found is None or spent < found["microseconds"]:
            found = {"config": dict(config), "microseconds": spent}
    return found, tried, refused
