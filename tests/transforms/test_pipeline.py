"""The transforms one after the other, as a recipe applies them: the result is what all receipts together say."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn
from toys import FixedSamples, context, tiny_lm, token_ids

from optforge.backends.base import CompileOptions
from optforge.backends.cpu import CpuBackend
from optforge.compiling import compile_
from optforge.config.paths import options
from optforge.config.steps import step
from optforge.measure.size import weight_bytes
from optforge.select import repeated_blocks
from optforge.share import on_meta
from optforge.transforms.base import Receipt

QUANTIZE = [option.name for option in options("transform") if option.name.startswith("quantize/") and option.name != "quantize/auto"]
"""auto puts the others' layers in; what it chooses depends on what it measures (tests/transforms/test_choose.py)."""


def toy() -> nn.Module:
    return tiny_lm(width=128)


def applied(model: nn.Module, uses: list[str]) -> list[Receipt]:
    """Applies the options in order, in place; on meta as the plan does."""
    meta = next(model.parameters()).is_meta
    example = ((token_ids(device="meta" if meta else "cpu"),), {})
    receipts = []
    for use in uses:
        samples = FixedSamples([((row[None],), {}) for row in token_ids()])
        ctx = context(use.replace("/", "_"), example, backend=None if meta else CpuBackend(), samples=None if meta else samples)
        transform = step(ctx.step, {"use": use}).transform
        with torch.no_grad():
            receipts.append(transform.apply(model, ctx))
    return receipts


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(token_ids())
    return output


@pytest.fixture(scope="module", params=QUANTIZE)
def uses(request: pytest.FixtureRequest) -> list[str]:
    return ["precision/bf16", "fuse/decoder", request.param]


def test_the_plan_on_meta_foresees_every_receipt_and_size(uses: list[str]) -> None:
    model, planned = toy(), on_meta(toy())
    foreseen, done = applied(planned, uses), applied(model, uses)
    for receipt in done:
        receipt.notes = [note for note in receipt.notes if not note.startswith("calibrated on")]
    assert [dataclasses.asdict(receipt) for receipt in foreseen] == [dataclasses.asdict(receipt) for receipt in done]
    assert weight_bytes(planned) == weight_bytes(model)


def test_packed_linears_are_quantized_and_norms_stay_in_fp32(uses: list[str]) -> None:
    model = toy()
    *_, weights = applied(model, uses)
    assert "layers.0.attention.qkv_proj" in {touched.name for touched in weights.touched}
    assert model.layers[0].attention.qkv_proj.weight.dtype in (torch.int8, torch.uint8)
    assert model.layers[0].norm1.weight.dtype == torch.float32
    blocks = "fp4" in uses[-1] or "mxfp8" in uses[-1]  # their scales are bits of e8m0 or e4m3
    assert model.layers[0].attention.qkv_proj.weight_scale.dtype == (torch.uint8 if blocks else torch.float32)
    error = (run(model).float() - run(toy())).norm() / run(toy()).norm()
    assert error < 0.5, "4 bits on random weights lose a good part; wrong wiring loses all"


def test_the_receipts_rebuild_it_bit_for_bit(uses: list[str]) -> None:
    model = toy()
    receipts = applied(model, uses)
    rebuilt = on_meta(toy())
    for use, receipt in zip(uses, receipts, strict=True):
        decisions = json.loads(json.dumps(receipt.decisions))
        step("replay", {"use": use}).transform.replay(rebuilt, dataclasses.replace(receipt, decisions=decisions))
    rebuilt.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(run(rebuilt), run(model))


def test_it_exports_and_compiles_once_for_all_blocks(uses: list[str], fresh_compiler: None) -> None:
    from torch._dynamo.testing import CompileCounter

    model = toy()
    applied(model, uses)
    expected = run(model)
    program = torch.export.export(copy.deepcopy(model), (token_ids(),), strict=False)
    torch.testing.assert_close(run(program.module()), expected, atol=3e-2, rtol=3e-2)
    counter = CompileCounter()
    for block in repeated_blocks(model).values():
        block.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(run(model), expected, atol=3e-2, rtol=3e-2)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_inductor_agrees(uses: list[str], fresh_compiler: None) -> None:
    """Fused kernels round to bf16 less often than eager ones, which alone moves activations of 4 bits by whole steps: here as often."""
    model = toy()
    applied(model, uses)
    expected = run(model).float()
    for block in repeated_blocks(model).values():
        compile_(block, CompileOptions(fullgraph=True))
    four_bits = uses[-1] in ("quantize/mxfp4", "quantize/nvfp4")
    with torch._inductor.config.patch(emulate_precision_casts=four_bits):
        assert (run(model).float() - expected).norm() / expected.norm() < 3e-2
