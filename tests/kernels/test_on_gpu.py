"""The kernels on a CUDA device, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from toys import context

from optforge.kernels.dispatch import decompose
from optforge.kernels.linears import QuantizedLinear
from optforge.transforms.quantize import Activation, Quantize, SchemeName

pytestmark = pytest.mark.gpu
ROWS = (1, 3, 4, 5, 15, 16, 17, 100, 300)
"""Both sides of the matrix-vector limit, of 16, and more than one tile."""


def layer(scheme: SchemeName, dtype: torch.dtype, outputs: int, inputs: int, **fields: object) -> QuantizedLinear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs)).to(device="cuda", dtype=dtype)
    if scheme is SchemeName.int4_weight:
        fields = {"group_size": 32, "symmetric": False} | fields
    Quantize(scheme=scheme, **fields).apply(model, context())  # type: ignore[arg-type]  # fields of several types
    assert isinstance(model[0], QuantizedLinear)
    return model[0]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", [SchemeName.int8_weight, SchemeName.int4_weight, SchemeName.fp8_weight], ids=lambda s: s.name)
def test_a_weight_only_product_is_that_of_the_dequantized_weight(scheme: SchemeName, dtype: torch.dtype) -> None:
    for outputs, inputs in ((48, 96), (1000, 544), (33, 4096)):
        linear = layer(scheme, dtype, outputs, inputs)
        for rows in ROWS:
            x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
            x[0] *= 100
            with torch.no_grad():
                y = linear(x)
            expected = x.double() @ linear.dequantize().double().t() + linear.bias.double()
            assert relative(y, expected) < {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}[dtype], (outputs, inputs, rows)


@pytest.mark.parametrize(
    "fields", [{}, {"symmetric": True}, {"group_size": None}, {"group_size": 96}, {"group_size": 192}, {"group_size": 16}], ids=str
)
def test_int4_in_every_form(fields: dict[str, object]) -> None:
    linear = layer(SchemeName.int4_weight, torch.bfloat16, 64, 192, **fields)
    for rows in ROWS:
        x = torch.randn(rows, 192, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            expected = x.double() @ linear.dequantize().double().t() + linear.bias.double()
            assert relative(linear(x), expected) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", [SchemeName.int8_dynamic, SchemeName.fp8_dynamic], ids=lambda s: s.name)
@pytest.mark.case("B30")
def test_b30_a_dynamic_product_takes_every_number_of_rows(scheme: SchemeName, dtype: torch.dtype) -> None:
    for outputs, inputs in ((48, 96), (1008, 544)):
        linear = layer(scheme, dtype, outputs, inputs)
        for rows in (0, *ROWS):
            x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
            with torch.no_grad():
                y = linear(x)
                with decompose():
                    reference = linear(x)
            assert y.shape == (rows, outputs) and y.dtype is dtype and bool(y.isfinite().all())
            assert not rows or relative(y, reference.double()) < 6e-3
            expected = x.double() @ linear.dequantize().double().t() + linear.bias.double()
            assert not rows or relative(y, expected) < {SchemeName.int8_dynamic: 0.015, SchemeName.fp8_dynamic: 0.05}[scheme]


@pytest.mark.case("B30")
def test_b30_one_scale_for_the_whole_input() -> None:
    linear = layer(SchemeName.fp8_dynamic, torch.bfloat16, 64, 96, activation=Activation.tensor)
    for rows in ROWS:
        x = torch.randn(rows, 96, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            expected = x.double() @ linear.dequantize().double().t() + linear.bias.double()
            assert relative(linear(x), expected) < 0.06


@pytest.mark.parametrize("scheme", list(SchemeName), ids=lambda s: s.name)
def test_a_compiled_layer_gives_what_the_eager_one_does(scheme: SchemeName) -> None:
    torch._dynamo.reset()  # the layers of all schemes share one code object and its recompile limit
    linear = layer(scheme, torch.bfloat16, 64, 96)
    with torch.no_grad():
        for rows in (1, 40):
            x = torch.randn(rows, 96, device="cuda", dtype=torch.bfloat16)
            assert relative(torch.compile(linear, fullgraph=True)(x), linear(x).double()) < 6e-3
