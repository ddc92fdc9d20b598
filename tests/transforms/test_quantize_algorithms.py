"""What decides stored values: held against references that follow the papers and not the code, on problems small enough for fp64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from optforge.kernels.formats import FNUZ, OCP
from optforge.kernels.quantized import store
from optforge.schemes import SCHEMES
from optforge.spec import Scheme
from optforge.transforms.quantize import gptq, hqq
from optforge.transforms.quantize.algorithms import Algorithm, has_grid
from optforge.transforms.quantize.clip import shrunk
from optforge.transforms.quantize.grids import Grid, error
from optforge.transforms.quantize.scales import searched, smoothing
from optforge.transforms.quantize.solve import Inputs, Known, solve

INT4 = [
    dataclasses.replace(SCHEMES["int4_weight"], group_size=size, granularity="group" if size else "channel", symmetric=symmetric)
    for size, symmetric in itertools.product((32, 64, 128, None), (False, True))
]
TENSOR = dataclasses.replace(SCHEMES["fp8_dynamic"], granularity="tensor", activation_granularity="tensor")
GRIDS = [*INT4, SCHEMES["int8_weight"], SCHEMES["int8_dynamic"], SCHEMES["fp8_weight"], TENSOR]


def name(scheme: Scheme) -> str:
    return f"{scheme.name}-{scheme.granularity}-{scheme.group_size}-{'symmetric' if scheme.symmetric else 'zeros'}"


each_grid = pytest.mark.parametrize("scheme", GRIDS, ids=name)


def problem(outputs: int = 48, columns: int = 256, rows: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight [N, K] and the second moments [K, K], fp64, of inputs that depend on one another and differ in size."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, columns, generator=draw) @ torch.randn(columns, columns, generator=draw) / columns**0.5
    x = (mixed * torch.rand(columns, generator=draw) * 4).double()
    return torch.randn(outputs, columns, generator=draw), x.T @ x / rows


def known(gram: Tensor, x: Tensor | None = None) -> Known:
    sizes = gram.diagonal().sqrt().float() if x is None else x.abs().mean(0)
    low, high = (-sizes, sizes) if x is None else (x.amin(0).clamp(max=0), x.amax(0).clamp(min=0))
    return Known(grams=gram.float()[None], absolute=sizes, low=low, high=high, rows=1000)


def worked_out(change: Tensor, gram: Tensor) -> Tensor:
    """The squared output error of each row, fp64, by the definition: the sum over all pairs of columns."""
    return torch.einsum("nk,kl,nl->n", change.double(), gram.double(), change.double())


def by_elimination(weight: Tensor, gram: Tensor, grid: Grid, order: list[int], damping: float) -> Tensor:
    """GPTQ as optimal brain surgery states it: round one column, move all that are left by the inverse of what is left, remove it.

    Frantar and others 2022, equation 2, with the inverse made anew for every column: no factorization, no blocks.
    """
    values = weight.double().clone()
    result = torch.empty_like(values)
    hessian = gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    scale, zero = (None if each is None else each.double().expand_as(values) for each in grid.spread())
    assert scale is not None
    for index, column in enumerate(order):
        left = order[index:]
        inverse = torch.linalg.inv(hessian[left][:, left])
        rounded = grid.nearest(values[:, column], scale[:, column], None if zero is None else zero[:, column])
        result[:, column] = rounded
        values[:, left] -= (values[:, column] - rounded)[:, None] / inverse[0, 0] * inverse[0][None]
    return result


@each_grid
@pytest.mark.parametrize("fmt", [OCP, FNUZ], ids=["e4m3fn", "e4m3fnuz"])
def test_a_grid_stores_exactly_what_rounding_to_nearest_stores(scheme: Scheme, fmt) -> None:  # type: ignore[no-untyped-def]
    weight, _ = problem()
    weight[3] = 0
    weight[4, 32:96] = 0
    grid = Grid.of(weight, scheme, fmt)
    expected = store(weight, scheme, fmt)
    for found in (grid.store(weight), grid.store(grid.round(weight))):
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert (found[key] is None and tensor is None) or torch.equal(found[key], tensor), key  # type: ignore[arg-type]


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("scheme", [INT4[2], INT4[1], SCHEMES["int8_weight"], SCHEMES["fp8_weight"]], ids=name)
def test_gptq_equals_elimination_column_by_column(scheme: Scheme, act_order: bool) -> None:
    weight, gram = problem(outputs=24, columns=96)
    grid = Grid.of(weight, scheme, OCP)
    order = torch.argsort(gram.diagonal(), descending=True).tolist() if act_order else list(range(96))
    expected = by_elimination(weight, gram, grid, order, damping=0.01)
    nearest = grid.round(weight)
    better = worked_out(expected - weight, gram) <= worked_out(nearest - weight, gram)
    assert bool(better.any())
    for block in (7, 96, 128):
        found = gptq.solve(weight, gram, scheme, OCP, damping=0.01, act_order=act_order, clip=False, block=block)
        torch.testing.assert_close(found.weight, torch.where(better[:, None], expected.float(), nearest), rtol=1e-5, atol=1e-6)
        assert found.damping == 0.01


@each_grid
@pytest.mark.parametrize("rows", [4, 600])
def test_gptq_is_never_further_off_than_rounding_to_nearest(scheme: Scheme, rows: int) -> None:
    weight, gram = problem(rows=rows, seed=rows)
    nearest = worked_out(Grid.of(weight, scheme, OCP).round(weight) - weight, gram)
    for act_order, clip in itertools.product((False, True), (False, True)):
        found = gptq.solve(weight, gram.float(), scheme, OCP, act_order=act_order, clip=clip)
        off = worked_out(found.weight - weight, gram)
        assert bool((off <= nearest * (1 + 1e-4)).all())
        if rows == 600:
            assert float(off.sum()) < 0.75 * float(nearest.sum()), "on inputs that depend on one another it gains a good part"


@each_grid
@pytest.mark.case("B66")
def test_b66_pruned_zeros_stay_exactly_zero(scheme: Scheme) -> None:
    weight, gram = problem()
    pattern = torch.rand(weight.shape[0], weight.shape[1] // 4, 4, generator=torch.Generator().manual_seed(5)).argsort(2).argsort(2) < 2
    kept = pattern.flatten(1)
    weight = weight * kept
    for algorithm in Algorithm:
        if algorithm is Algorithm.hqq and scheme.weight_dtype != "int4":
            continue
        found = solve(weight, known(gram), scheme, OCP, algorithm)
        assert bool((found.weight[~kept] == 0).all()), algorithm
    # what the pattern costs is made up for, as SparseGPT does: better than rounding what is left
    found, nearest = solve(weight, known(gram), scheme, OCP, Algorithm.gptq), solve(weight, None, scheme, OCP, Algorithm.rtn)
    assert float(worked_out(found.weight - weight, gram).sum()) < float(worked_out(nearest.weight - weight, gram).sum())


@each_grid
@pytest.mark.case("B46")
def test_b46_zero_rows_and_blocks_stay_zero_under_finite_scales(scheme: Scheme) -> None:
    weight, gram = problem()
    weight[3], weight[16:, 64:128] = 0, 0
    for algorithm in (Algorithm.gptq, Algorithm.awq, *([Algorithm.hqq] if scheme.weight_dtype == "int4" else [])):
        found = solve(weight, known(gram), scheme, OCP, algorithm)
        assert bool((found.grid.scale > 0).all()) and bool(found.grid.scale.isfinite().all())
        assert bool((found.weight[3] == 0).all()) and bool((found.weight[16:, 64:128] == 0).all())


@pytest.mark.case("B51")
def test_b51_dead_columns_are_rounded_and_nothing_else() -> None:
    weight, gram = problem(columns=64)
    gram[:, 5] = gram[5] = 0
    found = gptq.solve(weight, gram.float(), SCHEMES["int8_weight"], OCP, clip=False)
    assert found.failed is None and found.damping == 0.01
    assert torch.equal(found.weight[:, 5], Grid.of(weight, SCHEMES["int8_weight"], OCP).round(weight)[:, 5])


@pytest.mark.case("B51")
def test_b51_damping_is_raised_until_two_samples_are_enough_and_recorded() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, generator=draw)
    x[:, 7] = 0
    weight = torch.randn(64, 64, generator=draw)
    found = gptq.solve(weight, x.T @ x / 2, INT4[0], OCP, damping=0)
    assert found.failed is None
    assert found.damping in (1e-3, 1e-2, 1e-1, 1.0)
    assert bool(found.weight.isfinite().all())


@pytest.mark.case("B51")
def test_b51_what_cannot_be_factorized_is_rounded_and_says_why() -> None:
    weight, gram = problem(columns=64)
    for broken in (torch.full_like(gram, float("nan")), gram - 100 * gram.diagonal().mean() * torch.eye(64)):
        found = gptq.solve(weight, broken.float(), INT4[0], OCP)
        assert found.failed is not None and "damping 1" in found.failed
        assert torch.equal(found.weight, Grid.of(weight, INT4[0], OCP).round(weight))


@pytest.mark.parametrize("scheme", [INT4[2], INT4[3], INT4[6], SCHEMES["fp8_weight"]], ids=name)
def test_cut_ranges_lessen_each_groups_own_error(scheme: Scheme) -> None:
    weight, gram = problem()
    share = shrunk(weight, gram, scheme, OCP)
    assert isinstance(share, Tensor) and bool(((share >= 0.5) & (share <= 1)).all())
    size = scheme.group_size or weight.shape[1]
    whole, cut = Grid.of(weight, scheme, OCP).round(weight), Grid.of(weight, scheme, OCP, share).round(weight)
    for start in range(0, weight.shape[1], size):
        part = slice(start, start + size)
        before, after = (worked_out((each - weight)[:, part], gram[part, part]) for each in (whole, cut))
        assert bool((after <= before * (1 + 1e-5)).all())


@pytest.mark.parametrize("scheme", [INT4[2], INT4[3], SCHEMES["int8_weight"]], ids=name)
def test_awqs_scales_lessen_the_output_error_where_a_few_inputs_are_large(scheme: Scheme) -> None:
    weight, gram = problem()
    large = torch.ones(256, dtype=torch.float64)
    large[::37] = 30
    gram = gram * large[:, None] * large[None]
    scales = searched([weight, weight[:10] * 2], known(gram), scheme, OCP)
    assert float(scales[::37].mean()) > 1.5 * float(scales.mean())
    scaled = Grid.of(weight * scales, scheme, OCP).round(weight * scales) / scales
    nearest = Grid.of(weight, scheme, OCP).round(weight)
    assert float(worked_out(scaled - weight, gram).sum()) < 0.7 * float(worked_out(nearest - weight, gram).sum())


def test_scales_of_channels_that_several_inputs_share_are_one() -> None:
    weight, gram = problem(columns=64)
    channels = torch.arange(32).repeat(2)
    assert searched([weight], known(gram), INT4[1], OCP, channels).shape in ((32,), (1,))
    found = smoothing([weight], known(gram), 0.5, channels)
    sizes, held = gram.diagonal().sqrt().float(), weight.abs().amax(0)
    expected = (torch.maximum(sizes[:32], sizes[32:]) / torch.maximum(held[:32], held[32:])).sqrt()
    torch.testing.assert_close(found, expected)


def test_smoothing_is_the_papers_equation() -> None:
    """Equation 4 with alpha 0.5 on the numbers of the paper's figure 5: inputs up to 16, weights up to 1 and so on."""
    x = torch.tensor([[1.0, -16.0, 2.0, 6.0], [-2.0, 8.0, -1.0, -9.0]])
    weight = torch.tensor([[2.0, 1.0, -2.0], [1.0, -1.0, -1.0], [2.0, -1.0, -2.0], [-1.0, -1.0, 1.0]]).t()
    found = smoothing([weight], known(x.T @ x, x), 0.5)
    torch.testing.assert_close(found, torch.tensor([1.0, 4.0, 1.0, 3.0]))
    assert torch.equal(smoothing([weight * 0], known(x.T @ x, x), 0.5), torch.ones(4))


@pytest.mark.parametrize("scheme", INT4, ids=name)
def test_hqq_is_never_further_from_the_weights_than_rounding(scheme: Scheme) -> None:
    weight, _ = problem()
    weight[weight > 2.5] *= 4
    found, nearest = hqq.solve(weight, scheme, OCP), Grid.of(weight, scheme, OCP).round(weight)
    size = scheme.group_size or weight.shape[1]
    before, after = ((each - weight).square().reshape(len(weight), -1, size).sum(2) for each in (nearest, found.weight))
    assert bool((after <= before * (1 + 1e-5)).all()) and float(after.sum()) < float(before.sum())


def test_statistics_are_those_of_all_rows_at_once() -> None:
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    inputs = Inputs(16, 1, torch.device("cpu"))
    for part in (x[:13], x[13:13], x[13:]):
        inputs.add(part[None].bfloat16() if part.numel() == 0 else part[None])
    found = inputs.known
    torch.testing.assert_close(found.gram, x.T @ x / 40)
    torch.testing.assert_close(found.absolute, x.abs().mean(0))
    torch.testing.assert_close(found.largest, x.abs().amax(0))
    assert found.rows == 40
    scales = torch.rand(16) + 0.5
    torch.testing.assert_close(found.divided(scales).gram, (x / scales).T @ (x / scales) / 40)


def test_every_scheme_has_a_grid_or_is_refused() -> None:
    assert {scheme.name for scheme in SCHEMES.values() if has_grid(scheme)} == {
        "int8_weight",
        "int8_dynamic",
        "int8_static",
        "int4_weight",
        "fp8_weight",
        "fp8_dynamic",
        "fp8_static",
    }


def test_error_is_the_mean_square_of_what_the_outputs_change_by() -> None:
    weight, _ = problem(outputs=5, columns=32)
    x = torch.randn(100, 32)
    expected = (x @ weight.T).square().mean(0)
    torch.testing.assert_close(error(weight, x.T @ x / 100), expected)
