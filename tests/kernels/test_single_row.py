"""Products of one row as sums: the same numbers as float64 gives, for every form that a decode's graph holds, and nothing else touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from optforge import single_row
from optforge.compiling import compiled_with
from optforge.kernels import int8_weight  # noqa: F401 - defines optforge::int8_few


def rewritten(call: Callable[..., Tensor], *inputs: Tensor) -> tuple[Callable[..., Tensor], int]:
    """The traced call with the pass run over it, and how many products it replaced."""
    module = make_fx(call, tracing_mode="fake")(*inputs)
    count = single_row.rewrite(module.graph)
    module.graph.lint()
    module.recompile()
    return module, count


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    if dtype is torch.int8:
        return torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8)
    return torch.randn(shape, generator=draw).to(dtype)


@pytest.mark.parametrize("columns", [1, 31, 576, 1536])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_of_one_row_is_its_sum_in_fp32(dtype: torch.dtype, columns: int) -> None:
    x, weight = drawn(1, columns, dtype=dtype), drawn(17, columns, dtype=dtype)
    module, count = rewritten(lambda a, b: torch.mm(a, b.t()), x, weight)
    found = module(x, weight)
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    step = torch.finfo(dtype).eps
    assert count == 1 and found.dtype is dtype
    assert bool(((found.double() - exact).abs() <= step * exact.abs() + columns * 2**-24 * size).all())


def test_a_bias_is_added_before_rounding() -> None:
    x, weight, bias = (drawn(*shape, dtype=torch.bfloat16) for shape in ((1, 64), (8, 64), (8,)))
    module, count = rewritten(lambda a, b, c: torch.addmm(c, a, b.t()), x, weight, bias)
    exact = x.double() @ weight.double().t() + bias.double()
    assert count == 1
    torch.testing.assert_close(module(x, weight, bias), exact.bfloat16(), atol=0, rtol=2**-7)


def test_integer_products_are_exact_up_to_the_width_where_fp32_is() -> None:
    a, b = torch.full((1, 1040), -127, dtype=torch.int8), torch.full((3, 1040), 127, dtype=torch.int8)
    module, count = rewritten(lambda x, y: torch._int_mm(x, y.t()), a, b)
    assert count == 1
    assert torch.equal(module(a, b), torch.full((1, 3), -127 * 127 * 1040, dtype=torch.int32))


def test_int8_weights_under_bf16_activations() -> None:
    x, weight = drawn(1, 96, dtype=torch.bfloat16), drawn(5, 96, dtype=torch.int8)
    module, count = rewritten(torch.ops.optforge.int8_few, x, weight)
    assert count == 1
    torch.testing.assert_close(module(x, weight), (x.double() @ weight.double().t()).bfloat16(), atol=0, rtol=2**-7)


@pytest.mark.parametrize("rows", [0, 2, 17])
def test_other_numbers_of_rows_stay_products(rows: int) -> None:
    x, weight = drawn(rows, 32, dtype=torch.float32), drawn(4, 32, dtype=torch.float32)
    assert rewritten(lambda a, b: torch.mm(a, b.t()), x, weight)[1] == 0


def test_only_marked_modules_are_compiled_so() -> None:
    linear, other = nn.Linear(4, 4), nn.Linear(4, 4)
    single_row.mark_(linear, kernels=False)
    assert set(single_row.inductor_options(linear)) == {"post_grad_custom_pre_pass"}
    assert single_row.inductor_options(other) == {} and compiled_with(other) is None
