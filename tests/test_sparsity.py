"""What was pruned stays zero through every later step, and each row of a report says how much is zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toys import FixedSamples, context, tiny_lm, token_ids

import optforge
from optforge.backends.cpu import CpuBackend
from optforge.config.paths import options
from optforge.config.steps import step
from optforge.errors import PlanError, StepError
from optforge.measure.sparsity import Zeros, filled, share, zeros
from optforge.rows import Applied, sparsity, verify
from optforge.transforms.base import Receipt

ROUNDING: list[dict[str, Any]] = [
    {"use": option.name} for option in options("transform") if option.name.startswith("quantize/") and option.name != "quantize/auto"
]
COMPENSATING: list[dict[str, Any]] = [
    {"use": "quantize/int4_weight", "algorithm": algorithm, "symmetric": symmetric}
    for algorithm in ("gptq", "awq", "hqq")
    for symmetric in (True, False)
]


class _Planned:
    def __init__(self, name: str) -> None:
        self.name = name


def applied(name: str, receipt: Receipt, module: nn.Module) -> Applied:
    return Applied(planned=_Planned(name), receipt=receipt, seconds=0.0, zeros=zeros(module, receipt.decisions.get("zeros", ())))  # type: ignore[arg-type]


def test_zeros_are_kept_bit_by_bit() -> None:
    weight = torch.randn(7, 9)
    weight[torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) < 0.4] = 0
    kept = Zeros.of(weight)
    assert kept.bits.numel() == 8 and kept.count == int((weight == 0).sum())
    assert kept.filled(weight) == 0 and kept.filled(torch.zeros(7, 9)) == 0
    changed = weight.clone()
    changed[weight == 0] = 1e-30
    assert kept.filled(changed) == kept.count


@pytest.mark.case("B66")
@pytest.mark.parametrize("rounding", [*ROUNDING, *COMPENSATING], ids=lambda fields: "-".join(map(str, fields.values())))
def test_b66_rounding_keeps_every_pruned_zero(rounding: dict[str, Any]) -> None:
    model = tiny_lm(width=128)
    example = ((token_ids(),), {})
    steps = []
    for name, fields in {
        "fuse": {"use": "fuse/decoder"},
        "sparse": {"use": "prune/magnitude", "pattern": "2:4"},
        "weights": rounding,
    }.items():
        ctx = context(name, example, backend=CpuBackend(), samples=FixedSamples([example]))
        with torch.no_grad():
            receipt = step(name, fields).transform.apply(model, ctx)
        steps.append(applied(name, receipt, model))
        verify(model, steps)
        if name != "fuse":
            assert (sparsity(model, steps) or 0) >= 0.5
    assert len(steps[1].zeros) == 2 * 4 + 1


@pytest.mark.case("B66")
def test_b66_a_step_that_fills_pruned_weights_is_an_error() -> None:
    model = tiny_lm(width=32)
    receipt = step("sparse", {"use": "prune/magnitude"}).transform.apply(model, context("sparse", backend=CpuBackend()))
    steps = [applied("sparse", receipt, model), Applied(planned=_Planned("other"), receipt=Receipt(), seconds=0.0)]  # type: ignore[arg-type]
    verify(model, steps)
    linear = model.layers[0].mlp.up_proj
    at = (linear.weight == 0).nonzero()[0].tolist()
    with torch.no_grad():
        linear.weight[at[0], at[1]] = 1e-3
    with pytest.raises(StepError, match=r"step other: 1 of 1,024 pruned weights of layers\.0\.mlp\.up_proj are no longer zero"):
        verify(model, steps)
    assert filled(model, steps[0].zeros) == {"layers.0.mlp.up_proj": (1, 1024)}


def test_layers_are_followed_when_they_are_numbered_anew_and_dropped_when_they_are_cut() -> None:
    model = tiny_lm(width=32, layers=4)
    example = ((token_ids(),), {})
    steps = []
    for name, fields in {
        "sparse": {"use": "prune/magnitude"},
        "layers": {"use": "prune/layers", "sparsity": 0.5},
        "channels": {"use": "prune/channels", "sparsity": 0.5},
    }.items():
        ctx = context(name, example, backend=CpuBackend(), samples=FixedSamples([example]))
        steps.append(applied(name, step(name, fields).transform.apply(model, ctx), model))
        verify(model, steps)
    assert share(model, ["layers.0.attention.q_proj"]) == 0.5
    with torch.no_grad():
        model.layers[1].attention.q_proj.weight.fill_(1.0)
    with pytest.raises(StepError, match=r"layers\.1\.attention\.q_proj"):
        verify(model, steps)


def _optimize(recipe: str, tmp_path: Any) -> Any:
    path = tmp_path / "own.yaml"
    path.write_text(recipe)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return optforge.optimize(model, str(path), hardware="cpu", example=torch.randn(4, 64), trained=False, overrides=["measure.max_s=0.2"])


def test_each_row_of_a_report_tells_its_zeros_and_the_artifact_loads(tmp_path: Any) -> None:
    recipe = "name: own\ndescription: pruned, then rounded\ngoal: size\nsteps:\n"
    recipe += "  sparse: {use: prune/magnitude, pattern: 2:4}\n  weights: {use: quantize/int8_weight}\n"
    module, report = _optimize(recipe, tmp_path)
    assert report.steps[0].sparsity == 0.5
    assert report.steps[1].sparsity is not None and report.steps[1].sparsity >= 0.5
    assert share(module, ["0", "2"]) == report.steps[1].sparsity
    assert "no sparse kernel on cpu" in " ".join(report.steps[0].receipt["notes"])


@pytest.mark.case("B65")
def test_b65_the_message_says_what_to_write_and_what_to_type(tmp_path: Any) -> None:
    steps = "  weights: {use: quantize/int8_weight}\n  sparse: {use: prune/magnitude%s}\n"
    head = "name: own\ndescription: the wrong way round\ngoal: size\nsteps:\n"
    with pytest.raises(PlanError, match=r"write sparse before weights \(sparse, weights\), or type steps\.sparse\.before=\[weights\]"):
        _optimize(head + steps % "", tmp_path)
    _, report = _optimize(head + steps % ", before: weights", tmp_path)
    assert [row.name for row in report.steps] == ["sparse", "weights"]
