"""The survey of a machine: its clock against known durations, its cases against hand counts and against what PyTorch dispatches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optforge.backends.cpu import CpuBackend
from optforge.measure.machine import attention, convolutions, elementwise, peaks, products, survey
from optforge.measure.machine import point as names
from optforge.measure.machine.case import Case, again, cache_bytes, copies, flows
from optforge.measure.machine.clock import HostClock
from optforge.measure.machine.point import Overheads, Peaks, Point
from optforge.plan import graph, kinds

CPU = torch.device("cpu")
KNOWN = survey.Survey(
    peaks=Peaks(flops={"fp32": 1e11, "bf16": 4e11, "int8": 8e11}, bandwidth_bytes_per_s=3e10, how={}),
    overheads=Overheads(eager_operator=2e-6, compiled_kernel=1e-6, captured_kernel=0.0, compiled_region=2e-5, call=0.0),
)


def product(m: int, n: int, k: int, name: str = "aten.mm", dtype: str = "bf16") -> Case:
    return next(case for case in products.products(CPU, [(n, k)], [m]) if (case.name, case.dtype) == (name, dtype))


def test_the_clock_tells_the_time_of_one_call_of_a_cycle() -> None:
    slow, fast = (lambda: time.sleep(0.004)), (lambda: time.sleep(0.002))
    timed = HostClock(budget_s=0.05).time([slow, fast])
    assert 0.003 <= timed.seconds < 0.006
    assert timed.spread >= 0


def test_kinds_and_phases_are_those_of_the_plans_graph() -> None:
    for name in (
        "PRODUCT",
        "ATTENTION",
        "CONVOLUTION",
        "EMBEDDING",
        "POINTWISE",
        "REDUCTION",
        "COPY",
        "OPTIMIZER",
        "FORWARD",
        "BACKWARD",
        "UPDATE",
    ):
        assert getattr(names, name) == getattr(graph, name)


def test_a_product_is_counted_as_by_hand() -> None:
    case = product(4, 576, 1536)
    assert case.size == (1, 4, 576, 1536)
    assert case.flops == 2 * 4 * 576 * 1536
    assert case.bytes == 2 * (4 * 1536 + 576 * 1536 + 4 * 576)
    assert case.cold == 2 * 576 * 1536


def test_causal_attention_counts_the_half_that_is_needed() -> None:
    case = next(case for case in attention.prefill(CPU) if case.size == (1, 9, 3, 64, 64, 64) and case.name == attention.SDPA)
    assert case.flops == 4 * 9 * 64 * (64 * 65 / 2)  # 2,080 pairs of query and key
    assert case.bytes == 2 * 64 * 64 * (9 + 3 + 3 + 9)


def test_weights_are_cycled_until_the_cache_cannot_hold_them_and_small_activations_are_not() -> None:
    case = product(1, 576, 576)
    assert copies(case, 32 * 1024**2, most=1000) * case.cold == pytest.approx(3 * 32 * 1024**2, rel=0.01)
    small, *_ = convolutions.convolutions(CPU, (1,))
    large, *_ = convolutions.convolutions(CPU, (32,))
    assert [flows(each, CPU) for each in (case, small, large)] == [False, False, True]
    assert not flows(large, torch.device("cuda"))
    assert copies(large, 32 * 1024**2) * large.bytes == pytest.approx(3 * 32 * 1024**2, rel=0.05)
    assert cache_bytes(CPU) > 2**18


def test_each_call_of_a_cycle_has_tensors_of_its_own_in_the_same_layout() -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    calls = again([partial(torch.mul, x, 2.0)], 3)
    tensors = [call.args[0] for call in calls]  # type: ignore[attr-defined]
    assert len({tensor.data_ptr() for tensor in tensors}) == 3
    assert all(torch.equal(tensor, x) and tensor.stride() == x.stride() for tensor in tensors)
    assert len(again([lambda: None], 3)) == 1


class Seen(TorchDispatchMode):
    """What the plan's trace would call each dispatched operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[kinds.Described] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, torch.Tensor)] for side in ((args, kwargs), out)]
        described = None if func.is_view else kinds.describe(func, args, *tensors)
        self.found += [described] if described is not None else []
        return out


def cases() -> list[Case]:
    """One of each sort that is one dispatched operator."""
    some = [product(4, 576, 576, name, dtype) for name, dtype in (("aten.mm", "bf16"), ("aten.mm", "fp32"), ("aten._int_mm", "int8"))]
    some += [product(64, 576, 576, "optforge.int8_packed", "int8")] if products.vnni() else []
    some += [next(products.batched(CPU)), next(products.classifier(CPU, (8,)))]
    some += [next(case for case in attention.prefill(CPU) if case.name == attention.GROUPED and case.dtype == "fp32")]
    some += [case for case in convolutions.convolutions(CPU, (1,)) if case.dtype == "fp32" and case.size[5] in (196, 49)]
    some += [next(case for case in elementwise.eager(CPU) if case.name == name) for name in (*elementwise.SINGLE, "aten._to_copy")]
    return [*some, next(elementwise.batch_norms(CPU)), next(elementwise.lookups(CPU))]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.title)
def test_a_case_runs_the_operator_that_it_is_named_after(case: Case) -> None:
    """Otherwise the plan would not find its point. The operator's own call is the last: what comes before fills it."""
    with Seen() as seen, torch.no_grad():
        call = case.make(1)[0]
        seen.found.clear()
        call()
    found = seen.found[0]
    if case.kind == names.COPY and case.name == "aten._to_copy":
        assert (found.kind, found.name, found.size) == (case.kind, case.name, case.size)
        return
    assert (found.kind, found.name) == (case.kind, case.name.removeprefix("fused "))  # the same operator in the compiler's layout
    if case.kind != names.REDUCTION:
        assert found.size == case.size
    assert found.dtype == case.dtype
    touched = sum(size for _, size in (*found.reads, *found.writes))
    assert touched == pytest.approx(case.bytes, rel=0.05)


def test_a_product_of_the_survey_is_the_right_product() -> None:
    call = product(4, 576, 576, dtype="fp32").make(1)[0]
    x, w = call.args  # type: ignore[attr-defined]  # calls are partials of the operator on its tensors
    assert torch.allclose(call().double(), x.double() @ w.double().T, atol=1e-3)


def test_a_point_is_the_time_less_its_launch() -> None:
    surveyor = survey._Surveyor(CPU, KNOWN)
    case = product(64, 576, 576)
    point = surveyor.measured(case)
    if isinstance(point, str):
        assert "busy" in point  # on a loaded machine nothing is better than a wrong figure
        return
    assert (point.kind, point.name, point.size) == ("product", "aten.mm", (1, 64, 576, 576))
    assert case.flops / 20e12 < point.seconds < 0.5  # no CPU core makes 20 TFLOP/s


def test_what_cannot_be_measured_says_why() -> None:
    surveyor = survey._Surveyor(CPU, KNOWN)
    assert "at the peak" in str(surveyor.measured(product(2048, 28672, 4096)))
    broken = replace(product(1, 576, 576), make=lambda copies: [lambda: torch.mm(torch.ones(1), torch.ones(1))])
    assert "must be a matrix" in str(surveyor.measured(broken))


def test_cases_that_run_apart_have_a_kernel_between_any_two_calls() -> None:
    ran: list[str] = []

    class Between(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    surveyor, calls = survey._Surveyor(CPU, KNOWN), [lambda: ran.append("first"), lambda: ran.append("second")]
    together = product(1, 576, 576)
    assert surveyor._spaced(replace(together, apart=False), calls) is calls
    spaced = surveyor._spaced(replace(together, apart=True), calls)
    with Between():
        for call in spaced:
            call()
    assert ran == ["first", "aten.add_.Tensor", "second", "aten.add_.Tensor"]


def test_measured_peaks_are_physically_possible() -> None:
    """One core of 2026 moves 1 to 500 GB/s and makes 1 GFLOP/s to 20 TFLOP/s; int8 units are not slower than fp32 ones."""
    with CpuBackend().session(0):
        found = peaks.peaks(CPU, lambda text: None)
    assert 1e9 < found.bandwidth_bytes_per_s < 1e12
    assert set(found.flops) == {"fp32", "bf16", "int8"} == set(found.how) - {"bandwidth_bytes_per_s"}
    assert all(1e9 < rate < 1e14 for rate in found.flops.values())
    assert found.flops["int8"] > 0.3 * found.flops["fp32"]


def test_every_case_of_a_cpu_has_a_size_of_the_right_length() -> None:
    lengths = {"product": 4, "attention": 6, "convolution": 6, "embedding": 2}
    found = list(survey.cases(CPU))
    assert len(found) > 500
    assert all(len(case.size) == lengths.get(case.kind, len(case.size)) and case.bytes > 0 for case in found)


@pytest.mark.slow
def test_overheads_of_the_host_are_microseconds() -> None:
    from optforge.measure.machine.overheads import overheads

    with CpuBackend().session(0):
        found = overheads(CPU)
    assert 1e-7 < found.eager_operator < 1e-4
    assert 1e-7 < found.compiled_kernel < 1e-4
    assert found.captured_kernel == found.call == 0.0


@pytest.mark.gpu
def test_on_cuda_points_are_captured_and_come_near_the_memory_bandwidth() -> None:
    from optforge.backends.nvidia import NvidiaBackend

    backend = NvidiaBackend()
    with backend.session(0):
        device = backend.torch_device()
        surveyor = survey._Surveyor(device, survey.quick(device, lambda text: None))
        case = next(case for case in products.products(device, [(14336, 4096)], [1]) if case.name == "aten.mm")
        point = surveyor.measured(case)
    assert isinstance(point, Point)
    assert 0.3 < case.bytes / point.seconds / surveyor.known.peaks.bandwidth_bytes_per_s < 1.3
