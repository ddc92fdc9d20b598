"""The operators: what a tracer and a counter see of them, and that an export holds none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from toys import context

from optforge.kernels import dispatch, fp8_weight, int4_weight, int8_dynamic, int8_weight, rounding
from optforge.kernels.formats import OCP
from optforge.transforms.quantize import Quantize, SchemeName

OPERATORS = ("int8_weight", "int4_weight", "fp8_weight")
ROWS, OUTPUTS, INPUTS = 6, 32, 64


def arguments(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, tuple[Any, ...]]:
    """The dequantized weight and what `optforge::<name>` is called with."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(ROWS, INPUTS), torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
    x, weight, bias = (tensor.to(device=device, dtype=dtype) for tensor in (x, weight, bias))
    if name == "int8_weight":
        stored, scale = rounding.int8_weight(weight)
        return stored.float() * scale, (x, stored, scale, bias)
    if name == "fp8_weight":
        stored, scale = rounding.fp8_weight(weight, OCP, per_channel=True)
        return stored.view(OCP.dtype).float() * scale, (x, stored, scale, bias, OCP.name)
    packed, groups, zero = rounding.int4_weight(weight, 32, symmetric=False)
    return rounding.from_int4(packed, groups, zero, INPUTS, 32, torch.float32), (x, packed, groups, zero, bias, 32)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_keeps_to_what_tracers_ask(name: str) -> None:
    operator = getattr(torch.ops.optforge, name)
    weight, given = arguments(name)
    assert torch.allclose(
        operator(*given), torch.nn.functional.linear(given[0], weight, given[-2 if name != "int8_weight" else -1]), atol=1e-5
    )
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(operator.default, given, test_utils=tests)


@pytest.mark.parametrize("name", OPERATORS)
def test_flops_and_bytes_are_counted(name: str) -> None:
    _, given = arguments(name)
    with FlopCounterMode(display=False) as counter:
        getattr(torch.ops.optforge, name)(*given)
    assert counter.get_flop_counts()["Global"][getattr(torch.ops.optforge, name)] == 2 * ROWS * OUTPUTS * INPUTS
    stored = {"int8_weight": OUTPUTS * INPUTS + 4 * OUTPUTS, "fp8_weight": OUTPUTS * INPUTS + 4 * OUTPUTS}
    stored["int4_weight"] = OUTPUTS * INPUTS // 2 + OUTPUTS * 2 * (4 + 1)
    expected = 4 * ROWS * INPUTS + stored[name] + 4 * OUTPUTS + 4 * ROWS * OUTPUTS
    assert dispatch.BYTE_FORMULAS[name](*(value for value in given if not isinstance(value, int | str))) == expected


def test_every_operator_is_under_these_tests() -> None:
    assert all(module.__name__.rpartition(".")[2] in OPERATORS for module in (fp8_weight, int4_weight, int8_weight))
    assert set(dispatch.BYTE_FORMULAS) >= set(OPERATORS), "test_fused_operators.py has the others"


def test_the_int8_product_is_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        torch._int_mm(torch.ones(3, 8, dtype=torch.int8), torch.ones(8, 5, dtype=torch.int8))
    assert counter.get_total_flops() == 2 * 3 * 8 * 5


@pytest.mark.parametrize("columns", [32, 96, 33, 5, 40])
@pytest.mark.parametrize("rows", [1, 3, 7, 8])
def test_few_rows_of_bf16_on_a_cpu_are_multiplied_with_int8(rows: int, columns: int) -> None:
    """Against float64. Widths that are no multiple of 32 must not reach PyTorch's product, which reads past their end."""
    generator = torch.Generator().manual_seed(rows * columns)
    x, weight = (torch.randn(size, columns, generator=generator).bfloat16() for size in (rows, 17))
    bias = torch.randn(17, generator=generator).bfloat16()
    stored, scale = rounding.int8_weight(weight)
    expected = x.double() @ (stored.double() * scale.double()).T + bias.double()
    with FlopCounterMode(display=False) as counter:
        found = int8_weight.int8_weight(x, stored, scale, bias)
    assert found.dtype is torch.bfloat16
    assert float((found.double() - expected).norm() / expected.norm()) < 0.006, "bf16 rounds by 0.2%, sums and result"
    taken = torch.ops.optforge.int8_few in counter.get_flop_counts()["Global"]
    assert taken == (rows < 8 and columns % 32 == 0)
    assert counter.get_total_flops() == 2 * rows * columns * 17


@pytest.mark.parametrize("scheme", list(SchemeName), ids=lambda s: s.name)
def test_an_export_holds_no_operator_of_ours(scheme: SchemeName) -> None:
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    Quantize(scheme=scheme, group_size=32 if scheme is SchemeName.int4_weight else None).apply(model, context())
    with dispatch.decompose():
        exported = torch.export.export(model, (torch.randn(4, 64),))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert called and not [name for name in called if "optforge" in name]
    x = torch.randn(4, 64)
    assert torch.equal(exported.module()(x), model(x))


def test_decompose_is_left_again_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="stop"), dispatch.decompose():
        assert dispatch._decomposed
        raise RuntimeError("stop")
    assert not dispatch._decomposed


@pytest.mark.skipif(not int8_dynamic._VNNI, reason="this CPU has no VNNI, so nothing is packed")
@pytest.mark.parametrize("rows", [int8_dynamic.PACKED_ROWS, 33])
def test_the_packed_product_is_the_exact_integer_one(rows: int) -> None:
    torch.manual_seed(0)
    a, weight = torch.randint(0, 255, (rows, 576), dtype=torch.uint8), torch.randint(-127, 128, (40, 576), dtype=torch.int8)
    scale = torch.rand(40, 1)
    expected = (a.double() @ weight.double().t()) * scale.double().flatten()
    found = torch.ops.optforge.int8_packed(a, weight, scale).double()
    assert (found - expected).norm() / expected.norm() < 1e-6


@pytest.mark.skipif(not int8_dynamic._VNNI, reason="this CPU has no VNNI, so nothing is packed")
def test_a_weight_is_packed_once_and_again_when_it_changes() -> None:
    weight = torch.nn.Parameter(torch.randint(-127, 128, (16, 32), dtype=torch.int8), requires_grad=False)
    first = int8_dynamic._packed(weight)
    assert int8_dynamic._packed(weight) is first
    a, scale = torch.full((8, 32), 1, dtype=torch.uint8), torch.ones(16, 1)
    with torch.no_grad():
        weight.zero_()
    assert int8_dynamic._packed(weight) is not first
    assert not torch.ops.optforge.int8_packed(a, weight, scale).any()
    weight.data = torch.ones(16, 32, dtype=torch.int8)
    assert torch.equal(torch.ops.optforge.int8_packed(a, weight, scale), torch.full((8, 16), 32.0))


@pytest.mark.skipif(not int8_dynamic._VNNI, reason="this CPU has no VNNI, so nothing is packed")
def test_a_compiled_layer_packs_its_weight_once() -> None:
    weight = torch.nn.Parameter(torch.randint(-127, 128, (16, 32), dtype=torch.int8), requires_grad=False)
    scale, weight_sum = torch.rand(16, 1) / 100, torch.zeros(16)
    compiled = torch.compile(lambda x: int8_dynamic.int8_dynamic(x, weight, scale, weight_sum, None), fullgraph=True)
    with torch.no_grad():
        compiled(torch.randn(16, 32))
        packed = getattr(weight, int8_dynamic._PACKED)[1]
        compiled(torch.randn(16, 32))
    assert getattr(weight, int8_dynamic._PACKED)[1] is packed
