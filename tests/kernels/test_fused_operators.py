"""The operators of a decoder's pass: what a tracer sees, the float64 checks under the interpreter, and the loss without logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import context

from optforge.kernels import argmax, checking, configurations, decode_attention, dispatch, gates, linear_cross_entropy, norms, rotary  # noqa: F401 - define their operators
from optforge.kernels.configurations import Device, Shape, reasoned, space
from optforge.kernels.fused_linear import fused_linear, in_parts, parts
from optforge.transforms.quantize import Quantize, SchemeName

SLOWER = ("fused_linear", "rotary_append", "decode_attention")
WEIGHTS = {"int8_weight", "int4_weight", "fp8_weight"}
H200, MI300X = Device("sm_90", "NVIDIA H200", 132), Device("gfx942", "MI300X", 304)


def calls() -> dict[str, tuple[Any, ...]]:
    x, by = torch.randn(3, 64), torch.rand(64)
    cache = [torch.zeros(1, 1, 8, 32) for _ in range(2)]
    angle = torch.rand(1, 2, 32)
    return {
        "fused_linear": (x, torch.randn(32, 64), None, None, None, by, torch.randn(3, 16), "plain", 0, 1e-5, 0.0, "silu"),
        "norm": (x, x + 1, by, None, 1e-5, 0.0, False),
        "rounded_norm": (x, None, by, None, 1e-5, 0.0, True, "int8"),
        "gated": (x, "gelu"),
        "rounded_gated": (x, "silu", "e4m3fn"),
        "rotary_append": (
            *(torch.randn(1, 2, 128), angle, angle, torch.tensor([1, 2]), *cache),
            *(None, None, None, None, 2, "plain", 1e-5, 0.0),
        ),
        "decode_attention": (torch.randn(1, 2, 1, 32), *cache, None, None, torch.tensor([3]), 0.2, "plain"),
        "argmax": (x,),
        "linear_cross_entropy": (x, torch.randn(9, 64), torch.tensor([1, -100, 8]), -100, True),
    }


@pytest.mark.parametrize("name", calls())
def test_an_operator_keeps_to_what_tracers_ask(name: str) -> None:
    torch.manual_seed(0)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.optforge, name).default, calls()[name], test_utils=tests)
    assert dispatch.BYTE_FORMULAS[name](*calls()[name]) > 0


def test_every_operator_is_listed_and_checked() -> None:
    assert set(dispatch.BYTE_FORMULAS) == WEIGHTS | set(calls()) == WEIGHTS | set(checking.OPERATORS)


@pytest.mark.parametrize(
    "names", [[n for n in checking.OPERATORS if n not in SLOWER], pytest.param(list(SLOWER[1:]), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.case("B46")
def test_b46_kernels_under_the_interpreter_are_float64s(names: list[str]) -> None:
    """Rows of zeros, large values, 1 and 17 rows, odd sizes, poisoned memory; a wrong value is named."""
    pytest.importorskip("triton")
    found = checking.check(names)[1]
    assert found and not [row for row in found if not row["passed"]]


@pytest.mark.slow
@pytest.mark.case("B33")
def test_b33_few_rows_of_every_storage_and_group() -> None:
    pytest.importorskip("triton")
    found = checking.check(["fused_linear"])[1]
    assert len(found) > 50 and not [row for row in found if not row["passed"]]


@pytest.mark.parametrize("scheme", [SchemeName.int8_weight, SchemeName.int4_weight, SchemeName.fp8_weight], ids=lambda s: s.name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 96), (17, 97), (3, 64)])
@pytest.mark.case("B29")
@pytest.mark.case("B30")
def test_b29_b30_a_fused_product_takes_every_size(scheme: SchemeName, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    columns -= columns % 32 if scheme is SchemeName.int4_weight else 0  # what the step itself asks of a width
    model = nn.Sequential(nn.Linear(columns, 30))
    Quantize(scheme=scheme, group_size=32 if scheme is SchemeName.int4_weight else None).apply(model, context())
    held = parts(model[0])  # type: ignore[arg-type]  # a linear
    assert held is not None
    x, by, kept = torch.randn(rows, columns), torch.rand(columns), torch.randn(rows, 15)
    with torch.no_grad():
        found = fused_linear(x, *held, norm=by, eps=1e-5, gate="silu", residual=kept)
    hidden = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5) * by.double()
    first, second = (hidden @ model[0].dequantize().double().t() + held.bias.double()).chunk(2, 1)  # type: ignore[operator, union-attr]
    expected = first / (1 + torch.exp(-first)) * second + kept.double()
    assert float((found.double() - expected).detach().norm() / expected.norm()) < 1e-5


def test_an_export_holds_no_operator_of_ours() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return fused_linear(norms.rms_norm(x, None, 1e-5), w, gate="silu")

    with dispatch.decompose():
        exported = torch.export.export(Block(), (torch.randn(4, 64), torch.randn(32, 64)))
    assert not [str(node.target) for node in exported.graph.nodes if "optforge" in str(node.target)]


@pytest.mark.parametrize("grads", [True, False])
def test_the_loss_without_logits_is_pytorchs(grads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 5 and fewer tokens, one of them without a token that counts."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 5 * 37 * 8)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 16, dtype=torch.float64) for size in (23, 37))
    targets = torch.randint(0, 37, (23,))
    targets[:6] = -100
    mine = [t.clone().requires_grad_(grads) for t in (hidden, weight)]
    theirs = [t.clone().requires_grad_(grads) for t in (hidden, weight)]
    loss = linear_cross_entropy.linear_cross_entropy(*mine, targets)
    expected = F.cross_entropy(F.linear(*theirs), targets)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    if grads:
        (2 * loss).backward()
        (2 * expected).backward()
        for a, b in zip(mine, theirs, strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("centered", [True, False])
def test_the_norms_backward_is_autograds(centered: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.rand(24)
    bias = torch.randn(24) if centered else None
    results = []
    for call in (torch.ops.optforge.norm, norms._reference):
        given = [None if t is None else t.clone().requires_grad_() for t in (x, residual, weight, bias)]
        y, hidden = call(*given, 1e-5, 0.5, centered)
        (y.square().sum() + hidden.sum()).backward()
        results.append([None if t is None else t.grad for t in given])
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", [H200, MI300X], ids=lambda d: d.arch)
@pytest.mark.parametrize("form", ["plain norm", "e4m3fn norm gate", "int4"])
def test_tuning_spaces_hold_what_fits_and_begin_with_reasoning(form: str, device: Device) -> None:
    group = 128 if form == "int4" else 0
    shape = Shape(operator="fused_linear", form=form, dtype="bf16", rows=1, outputs=4096, columns=4096, group=group)
    tried = list(space(shape, device))
    assert tried[0] == reasoned(shape, device) and len(tried) > 20
    if device.amd:
        assert all(config["PDL"] == 0 and config.get("CONVERT", 0) == 0 and config["num_stages"] <= 3 for config in tried)


def test_what_was_tuned_is_found_and_another_version_does_not_see_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from optforge.kernels import tuned

    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    shape = Shape(operator="argmax", form="plain", dtype="bf16", rows=1, outputs=1, columns=100)
    configurations.forget()
    tuned.kept.cache_clear()
    assert configurations.origin(shape, H200) == "reasoned"
    assert configurations.origin(replace(shape, columns=128256), H200) == "shipped, untuned"
    config = {"SPLIT": 4, "BLOCK": 512, "PDL": 0, "num_warps": 4, "num_stages": 2}
    configurations.forget()
    file = tuned.write(H200, {shape.key: {"config": config, "microseconds": 5.0}})
    assert configurations.chosen(shape, H200) == config and configurations.origin(shape, H200) == "tuned"
    monkeypatch.setattr(tuned, "versions", lambda: {"torch": "another"})
    assert tuned.path(H200) != file
    configurations.forget()
    tuned.kept.cache_clear()


def test_tuning_keeps_the_fastest_that_is_right() -> None:
    """Times and results are made up: one configuration is wrong, one is refused, and the rest take what their tile says."""
    shape = Shape(operator="argmax", form="plain", dtype="bf16", rows=1, outputs=1, columns=128256)
    first = reasoned(shape, H200)

    def run(config: Any) -> Tensor:
        if config["num_warps"] == 8 and config["BLOCK"] == 512:
            raise RuntimeError("out of resource: shared memory")
        return torch.tensor([5 if config["BLOCK"] != 2048 or config == first else 7])

    last: list[Any] = []
    case = checking.Case(label="", shape=shape, run=lambda config: (last.append(config), run(config))[1], moved=1)
    found, tried, refused = checking.best(case, H200, budget_s=60, timed=lambda call: last[-1]["BLOCK"] * 1.0)
    assert found is not None and found["config"]["BLOCK"] == 512 and found["microseconds"] == 512
    assert tried == len(list(space(shape, H200))) and 0 < refused < tried


def test_the_composed_path_is_the_reference() -> None:
    x, w = torch.randn(20, 33), torch.randn(7, 33)
    assert torch.allclose(in_parts(x, w, None, None, None, None, None, "plain", 0, 0.0, 0.0, ""), F.linear(x, w))
