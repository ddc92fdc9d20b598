"""A run whose workload is a training: rows that do not train each other, the loss curve as the gate, the report that shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import llamas
import pytest
import torch
from torch import Tensor, nn

from optforge import config, engine
from optforge.errors import PlanError
from optforge.models.base import Loaded
from optforge.models.given import GivenModel
from optforge.report import losses, store
from optforge.share import alias
from optforge.spec import LossCurve, Measure, Measurement, Part, Quality, Recipe, Report, Run, Step
from optforge.training.curve import LossQuality
from optforge.training.settings import settle_
from optforge.training.trainer import own_
from optforge.training_execution import TrainingRows
from optforge.transforms.base import Context, Phase, Receipt, Touched
from optforge.transforms.compile import Compile
from optforge.workloads.train import Train

QUICK = Measure(warmup=1, min_rounds=3, max_s=0.2)


@dataclass(frozen=True)
class Counting:
    """Tokens that can be learned: each is the one before it plus a fixed number."""

    real: bool = True

    def check(self) -> Iterator[Any]:
        return iter(())

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        return (torch.arange(count) * 5).remainder(llamas.VOCABULARY)

    def prompts(self) -> list[str]:
        return []


@dataclass(frozen=True, kw_only=True)
class Same:
    """Changes nothing that a loss could see, and writes a new parameter, as every transform must."""

    kind: ClassVar[str] = "same"
    phase: ClassVar[Phase] = Phase.FUSE

    def check(self, ctx: Context) -> Iterator[Any]:
        return iter(())

    def lower(self, target: Any) -> None:
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        head = model.lm_head
        head.weight = nn.Parameter(head.weight.detach().clone() * self.factor)
        return Receipt(touched=[Touched(name="lm_head", what="same")])

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        return None

    @property
    def factor(self) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Frozen(Same):
    """All weights but one norm stay as they are: the training learns nothing."""

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "model.norm.weight")
        return Receipt(touched=[Touched(name="model", what="frozen")])


@dataclass(frozen=True, kw_only=True)
class Infinite(Same):
    @property
    def factor(self) -> float:
        return float("inf")


def run_of(*transforms: Any, module: nn.Module | None = None, **fields: Any) -> Run:
    steps = tuple(
        Step(name=f"{one.kind}{index}", use=f"{one.kind}/test", options={}, transform=one) for index, one in enumerate(transforms)
    )
    workload = Train(batch_size=2, sequence=16, steps=8, held_out=2, learning_rate=3e-3, warmup=2)
    settings: dict[str, Any] = {"measure": QUICK, "quality": Quality(generate=0), "hardware": config.hardware("cpu"), **fields}
    return Run(
        recipe=Recipe(name="test", steps=steps, limits=fields.pop("limits", {})),
        model=Part(name="tiny", kind="given", options={}, source=GivenModel(module=module or llamas.module(), trained=False)),
        data=Part(name="counting", kind="counting", options={}, source=Counting()),
        workload=Part(name="train", kind="train", options={}, source=workload),
        **{key: value for key, value in settings.items() if key != "limits"},
    )


def report_of(run: Run, folder: Path | None = None) -> Report:
    return engine.execute(engine.plan(run), folder=folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path, dict[str, Tensor], nn.Module]:
    """A run of one step, its folder, the weights before it, and the caller's module after it."""
    module, folder = llamas.module(), tmp_path_factory.mktemp("run")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return report_of(run_of(Same(), module=module), folder), folder, before, module


def test_a_step_that_changes_nothing_has_the_baselines_losses_to_the_bit(measured: Any) -> None:
    report, *_ = measured
    assert report.status == "complete" and report.verdict in ("no_gain", "ok", "regression")
    for step in report.steps:
        result = step.quality.training
        assert result.own.losses == result.baseline.losses and len(result.own.losses) == 8
        assert result.own.held_out == result.baseline.held_out and result.difference == 0.0
        assert result.other_seed.losses != result.baseline.losses
        assert result.own.losses[-1] < 0.97 * result.own.losses[0], "something is learned"
        assert result.limit == pytest.approx(max(2 * result.band, 0.005 * result.baseline.held_out))
        assert step.measured.tokens_per_s > 0 and step.measured.samples_s and step.measured.baseline_samples_s


def test_the_callers_weights_are_as_they_were(measured: Any) -> None:
    *_, before, module = measured
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not module.training and all(parameter.grad is None for parameter in module.parameters())


def test_the_peak_is_told_in_parts(measured: Any) -> None:
    report, *_ = measured
    weights = 4 * sum(parameter.numel() for parameter in llamas.module().parameters())
    for row in (report.baseline, *(step.measured for step in report.steps)):
        parts = row.memory_parts
        assert parts["gradients"] == weights and parts["optimizer"] == 2 * weights
        assert parts["weights"] + parts["gradients"] + parts["optimizer"] + parts["rest"] == row.peak_memory_bytes


def test_the_report_shows_the_losses_everywhere_and_comes_back_from_its_file(measured: Any) -> None:
    report, folder, *_ = measured
    assert json.loads((folder / "report.json").read_text())["quality"]["training"]["own"]["losses"] == report.quality.training.own.losses
    again = store.read(folder)
    assert again.quality.training == report.quality.training
    loss = f"{report.quality.training.own.held_out:.4f}"
    for text in ((folder / "report.md").read_text(), (folder / "report.html").read_text()):
        assert loss in text and "optimizer states" in text
    assert 'class="loss after"' in (folder / "report.html").read_text()
    assert [row[0] for row in losses.rows(report)] == ["1", "2", "4", "5", "7", "8"]


def test_a_training_that_learns_less_fails_by_the_band_of_two_seeds() -> None:
    run = run_of(Frozen())
    report = report_of(run)
    assert report.verdict == "failed_quality" and engine.exit_code(report, run) == 3
    (missed,) = report.quality.missed
    assert "nats above the baseline's" in missed and "two seeds of the baseline" in missed


def test_a_loss_that_is_not_finite_fails_with_its_step() -> None:
    report = report_of(run_of(Infinite()))
    assert report.verdict == "failed_quality"
    assert any(line.startswith("the loss of step 1 is nan") for line in report.quality.missed)


def test_ends_and_random_data() -> None:
    run = run_of(Same(), Same(), measure=replace(QUICK, attribution="ends"))
    random = replace(run, data=replace(run.data, source=Counting(real=False)))
    report = report_of(random)
    assert [step.measured is None for step in report.steps] == [True, False] and report.quality is None
    assert any("no loss curves were compared: data=counting is random" in line for line in report.warnings)


def test_a_training_is_not_saved() -> None:
    with pytest.raises(PlanError, match="keeps no weights"):
        engine.plan(replace(run_of(Same()), save=True))


def test_a_baseline_that_does_not_fit_is_left_out_and_said() -> None:
    plan = engine.plan(run_of(Same()))
    plan.device = replace(plan.device, memory_bytes=1000)
    report = engine.execute(plan)
    assert report.status == "complete" and report.baseline is None and report.quality is None
    assert "weights, gradients and optimizer states" in report.baseline_reason
    assert report.steps[-1].measured.tokens_per_s > 0 and report.verdict == "incomplete"


def test_two_trainings_that_do_not_fit_together_are_timed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = TrainingRows.measure

    def measure(rows: TrainingRows, module: nn.Module, reference: nn.Module | None, name: str) -> Measurement:
        if reference is not None:
            raise MemoryError("no room for two")
        return alone(rows, module, reference, name)

    monkeypatch.setattr(TrainingRows, "measure", measure)
    report = report_of(run_of(Same()))
    assert report.status == "complete" and report.speedup["vs_baseline"] is not None
    (step,) = report.steps
    count = len(step.measured.samples_s)
    assert step.measured.baseline_samples_s == report.baseline.samples_s[:count]
    assert any("does not hold two trainings at once" in line for line in report.warnings)


@pytest.mark.slow
def test_compiled_rows_train_as_uncompiled_ones_do() -> None:
    report = report_of(run_of(Same(), Compile()))
    assert report.compiled_baseline is not None and report.steps[0].kind == "compile"
    assert abs(report.quality.training.difference) <= report.quality.training.limit
    assert not any("differs from the uncompiled" in line for line in report.warnings)


class Judged:
    """A judge with curves written by hand."""

    def __new__(cls, other: float, **limits: float) -> LossQuality:  # type: ignore[misc]
        quality = LossQuality(begin=None, held_out=None, steps=4, seed=0, data_name="x", limits=limits)  # type: ignore[arg-type]
        quality.baseline = LossCurve(losses=[4.0, 3.0, 2.5, 2.0], held_out_before=4.0, held_out=2.0)
        quality.other = LossCurve(seed=1, losses=[4.0, 3.1, 2.4, 2.1], held_out_before=4.0, held_out=other)
        return quality


@pytest.mark.parametrize(
    ("other", "own", "held"),
    [
        (2.1, 2.19, True),  # twice the band of 0.1
        (2.1, 2.21, False),
        (2.0, 2.009, True),  # the floor of half a percent
        (2.0, 2.011, False),
        (1.9, 1.5, True),  # a lower loss is no fault
    ],
)
def test_the_limit_by_hand(other: float, own: float, held: bool) -> None:
    found = Judged(other).judged(LossCurve(losses=[4.0, 3.0, 2.5, 2.0], held_out=own))
    assert (found.missed == []) is held
    assert found.loss_increase == pytest.approx(own / 2.0 - 1)


def test_a_recipes_own_limit_replaces_the_band() -> None:
    found = Judged(2.0, max_loss_increase=0.2).judged(LossCurve(losses=[4.0, 3.0, 2.5, 2.0], held_out=2.3))
    assert found.missed == []
    found = Judged(2.5, max_loss_increase=0.1).judged(LossCurve(losses=[4.0, 3.0, 2.5, 2.0], held_out=2.3))
    assert len(found.missed) == 1 and "max_loss_increase" in found.missed[0]


def test_the_share_of_the_peak_is_that_of_the_products_dtype() -> None:
    """bf16 products of a model that was loaded in fp32 are not held against the fp32 peak."""
    rows = TrainingRows.__new__(TrainingRows)
    plain, cast, low = llamas.module(), llamas.module(), llamas.module(dtype=torch.bfloat16)
    settle_(cast, autocast="bf16")
    assert [rows.product_dtype(module) for module in (plain, cast, low)] == ["fp32", "bf16", "bf16"]


def test_storage_of_its_own_keeps_ties() -> None:
    module = llamas.module(tie_word_embeddings=True)
    copy = own_(alias(module))
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    with torch.no_grad():
        copy.lm_head.weight.zero_()
        copy.model.rotary_emb.inv_freq.zero_()
    assert module.lm_head.weight.abs().sum() > 0 and module.model.rotary_emb.inv_freq.abs().sum() > 0
