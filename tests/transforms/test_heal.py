"""Healing: the loss falls, zeros stay, the same seed gives the same weights, and what cannot be trained is said."""

from __future__ import annotations

import re
from typing import Any

import llamas
import pytest
import torch
from torch import nn
from toys import FixedSamples, context

from optforge.backends.cpu import CpuBackend
from optforge.config.steps import step
from optforge.errors import PlanError, StepError
from optforge.measure.work import count_flops
from optforge.share import alias
from optforge.transforms.base import Receipt
from optforge.transforms.heal.train import _schedule

IDS = torch.randint(0, llamas.VOCABULARY, (10, 12), generator=torch.Generator().manual_seed(0))
EXAMPLES = [((), {"input_ids": row[None], "use_cache": False}) for row in IDS]
SHORT = {"steps": 25, "batch_size": 2, "held_out": 3, "samples": 7, "learning_rate": 3e-4}


def teacher(**sizes: Any) -> Any:
    """A llama whose logits are far enough apart that there is something to learn."""
    model = llamas.module(**sizes)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return model


def apply(model: nn.Module, use: str, reference: nn.Module | None = None, examples: list[Any] = EXAMPLES, **options: Any) -> Receipt:
    transform = step("heal", {"use": use, **options}).transform
    ctx = context("heal", examples[0], backend=CpuBackend(), samples=FixedSamples(examples), reference=reference)
    with torch.no_grad():
        return transform.apply(model, ctx)


def losses(receipt: Receipt) -> tuple[float, float]:
    (found,) = re.findall(r"from ([\d.]+) to ([\d.]+)", " ".join(receipt.notes))
    return float(found[0]), float(found[1])


@pytest.mark.parametrize("use", ["heal/lora", "heal/full"])
def test_it_learns_back_what_pruning_took_and_keeps_every_zero(use: str) -> None:
    original = teacher()
    model = alias(original)
    apply(model, "prune/magnitude", pattern="2:4", ignore=["lm_head"])
    pruned = alias(model)
    zeros = {name: parameter == 0 for name, parameter in model.named_parameters() if "proj" in name}
    kept = {name: parameter.detach().clone() for name, parameter in original.named_parameters()}
    rate = {"heal/lora": 1e-3, "heal/full": 3e-4}[use]
    before, after = losses(apply(model, use, original, **{**SHORT, "learning_rate": rate}))
    assert after < 0.95 * before
    with torch.no_grad():
        target = original(**EXAMPLES[0][1]).logits
        errors = [float((m(**EXAMPLES[0][1]).logits - target).norm()) for m in (pruned, model)]
    assert errors[1] < errors[0]
    assert all(bool((model.get_parameter(name)[mask] == 0).all()) for name, mask in zeros.items())
    assert all(torch.equal(parameter, kept[name]) for name, parameter in original.named_parameters()), "the teacher is as it was"
    assert not any("lora" in key for key in model.state_dict()) and model.state_dict().keys() == original.state_dict().keys()


def test_the_seed_decides_everything() -> None:
    original, results = llamas.module(), []
    for _ in range(2):
        model = alias(original)
        apply(model, "prune/magnitude", sparsity=0.5)
        apply(model, "heal/lora", original, **SHORT)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_bf16_weights_learn_in_fp32_and_stay_bf16() -> None:
    original = teacher(dtype=torch.bfloat16)
    model = alias(original)
    apply(model, "prune/magnitude", sparsity=0.5)
    before, after = losses(apply(model, "heal/full", original, **SHORT))
    assert after < before
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_next_token_needs_no_teacher_and_packed_and_tied_weights_are_trained_once() -> None:
    torch.manual_seed(0)
    model = llamas.module(tie_word_embeddings=True)
    apply(model, "fuse/decoder", attention="keep")
    one = [((), {"input_ids": torch.arange(12)[None], "use_cache": False})] * 5
    before, after = losses(apply(model, "heal/full", examples=one, loss="next_token", **{**SHORT, "learning_rate": 3e-3}))
    assert after < 0.8 * before
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other = llamas.module(tie_word_embeddings=True)
    receipt = apply(other, "heal/lora", examples=one, loss="next_token", **{**SHORT, "steps": 1})
    assert "lm_head" not in {touched.name for touched in receipt.touched}, "the embedding is no product to change by factors"


def test_classifiers_learn_from_their_own_outputs() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    model = alias(original)
    examples: list[Any] = [((torch.randn(8, 16),), {}) for _ in range(8)]
    apply(model, "prune/magnitude", examples=examples, sparsity=0.6)
    before, after = losses(apply(model, "heal/full", original, examples, **SHORT))
    assert after < before


def test_what_cannot_be_healed_is_said() -> None:
    model = llamas.module()
    with pytest.raises(PlanError, match=r"nothing to distil from; write steps\.heal\.loss=next_token"):
        apply(model, "heal/lora", **SHORT)
    with pytest.raises(StepError, match="the loss of update 1 is nan: lower learning_rate"):
        broken = llamas.module()
        with torch.no_grad():
            broken.model.norm.weight[0] = torch.nan
        apply(broken, "heal/full", llamas.module(), **SHORT)
    apply(model, "heal/lora", llamas.module(), **{**SHORT, "steps": 1})
    with pytest.raises(PlanError, match=r"healed already \(step heal\)"):
        apply(model, "heal/lora", llamas.module(), **SHORT)
    quantized = llamas.module()
    apply(quantized, "quantize/int8_weight")
    with pytest.raises(PlanError, match="integers have no gradient"):
        apply(quantized, "heal/lora", llamas.module(), **SHORT)
    told = [problem.what for problem in step("heal", {"use": "heal/lora", "steps": 0}).transform.check(context("heal"))]
    assert told == ["steps must be at least 1"]


def test_the_rate_rises_then_falls_to_almost_nothing() -> None:
    rates = [_schedule(update, 50) for update in range(50)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert rates[5:] == sorted(rates[5:], reverse=True) and rates[-1] < 0.01


class Twice(nn.Module):
    """A layer under two names, a third that shares its weight, and one apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a
        self.c = nn.Linear(8, 8)
        self.c.weight = self.a.weight
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.c(self.b(self.a(x).relu()).relu()))


def test_a_module_in_two_places_keeps_its_own_weights_after_counting_and_healing() -> None:
    """PyTorch's `functional_call` leaves what it was given in a module that has two names."""
    torch.manual_seed(0)
    original = Twice()
    examples: list[Any] = [((torch.randn(3, 8),), {}) for _ in range(10)]
    before = original.a.weight
    flops = count_flops(original, lambda forward: forward(*examples[0][0]))
    assert flops == 2 * 3 * (3 * 8 * 8 + 8 * 4)
    assert original.a.weight is before and original.b.weight is before and original.c.weight is before
    model = alias(original)
    apply(model, "prune/magnitude", sparsity=0.3, targets=["last"])
    apply(model, "heal/full", original, examples, **{**SHORT, "steps": 2})
    assert isinstance(model.a.weight, nn.Parameter) and model.a.weight is model.b.weight is model.c.weight
    assert not torch.equal(model.a.weight, before) and model.a.weight.is_leaf
    assert torch.equal(original.a.weight, before)


@pytest.mark.parametrize("use", ["heal/lora", "heal/full"])
def test_where_nothing_was_taken_there_is_nothing_to_heal(use: str) -> None:
    original = teacher()
    model = alias(original)
    receipt = apply(model, use, original, **SHORT)
    assert receipt.notes[-1].startswith("0 updates") and "there was nothing to heal" in receipt.notes[-1]
    assert losses(receipt) == (0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
