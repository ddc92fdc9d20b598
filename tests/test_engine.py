"""The engine end to end on small models: rows, verdicts, what is dropped, and a report that is true after every failure."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from optforge import config, engine
from optforge.errors import PlanError, Problem, StepError
from optforge.models.given import GivenModel
from optforge.spec import Hardware, Measure, Part, Quality, Recipe, Run, Step
from optforge.transforms.base import Context, Lowered, Phase, Receipt, Touched
from optforge.transforms.compile import Compile
from optforge.workloads.forward import Forward

QUICK = Measure(warmup=1, min_rounds=12, max_s=1.0)


class Heavy(nn.Module):
    """One product repeated `times`, so that a step can make it faster or slower by a known factor."""

    def __init__(self, times: int = 8) -> None:
        super().__init__()
        self.times = times
        self.linear = nn.Linear(256, 256)
        self.head = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Sets how often the product is repeated; changes the output too, unless `quality` is off."""

    kind: ClassVar[str] = "repeat"
    phase: ClassVar[Phase] = Phase.FUSE
    times: int

    def check(self, ctx: Context) -> Iterator[Problem]:
        return iter(())

    def lower(self, target: Hardware) -> Lowered | None:
        return None

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        model.times = self.times
        return Receipt(touched=[Touched(name="linear", what=f"repeated {self.times} times")])

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        model.times = self.times


@dataclass(frozen=True, kw_only=True)
class Corrupt(Repeat):
    """One scale wrong by 100 times."""

    times: int = 8

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        model.head.weight = nn.Parameter(model.head.weight * 100)
        return Receipt(touched=[Touched(name="head", what="corrupted")])


@dataclass(frozen=True, kw_only=True)
class Idle(Repeat):
    times: int = 8

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        return Receipt(skipped={"linear": "too small"})


@dataclass(frozen=True, kw_only=True)
class Liar(Repeat):
    times: int = 8

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        return Receipt(touched=[Touched(name="linear", what="int8", dtypes={"weight": "int8"})])


class Big:
    """Stands for the tensors of a frame."""


SEEN: list[weakref.ref[Big]] = []


@dataclass(frozen=True, kw_only=True)
class OutOfRoom(Repeat):
    times: int = 8

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        big = Big()
        SEEN.append(weakref.ref(big))
        if not ctx.planning:
            raise MemoryError("no room for 40 GB")
        return Receipt(touched=[Touched(name="linear", what="grown")])


@dataclass(frozen=True, kw_only=True)
class Interrupted(Repeat):
    times: int = 8

    def apply(self, model: nn.Module, ctx: Context) -> Receipt:
        if not ctx.planning:
            raise KeyboardInterrupt
        return Receipt(touched=[Touched(name="linear", what="half done")])


@dataclass(frozen=True)
class Nothing:
    """A data set for models that bring their own example."""

    real: bool = True

    def check(self) -> Iterator[Problem]:
        return iter(())

    def prompts(self) -> list[str]:
        return []


def run_of(*steps: tuple[str, Any], model: nn.Module | None = None, goal: str = "throughput", limits: Any = None, **fields: Any) -> Run:
    torch.manual_seed(0)
    module = (model or Heavy()).eval()
    example = ((torch.randn(64, 256),), {})
    made = tuple(
        Step(name=name, use=f"{transform.kind}/test", options={}, transform=transform, keep=fields.pop(f"keep_{name}", "always"))
        for name, transform in steps
    )
    recipe = Recipe(name="test", goal=goal, steps=made, limits=limits or {"max_relative_error": 10.0})
    settings: dict[str, Any] = {"measure": QUICK, "quality": Quality(generate=0), "hardware": config.hardware("cpu"), **fields}
    return Run(
        recipe=recipe,
        model=Part(name="heavy", kind="given", options={}, source=GivenModel(module=module, example=example)),
        data=Part(name="inputs", kind="inputs", options={}, source=Nothing()),
        workload=Part(name="forward", kind="forward", options={}, source=Forward()),
        **settings,
    )


def report_of(run: Run, folder: Path | None = None) -> engine.Report:
    return engine.execute(engine.plan(run), folder=folder)


@pytest.mark.alone
def test_a_faster_step_is_ok_and_a_slower_one_a_regression() -> None:
    faster = report_of(run_of(("less", Repeat(times=2))))
    assert (faster.status, faster.verdict) == ("complete", "ok")
    assert faster.speedup["vs_baseline"].low > 1.5
    assert faster.speedup.get("vs_compiled_baseline") is None, "nothing was compiled, so nothing was compared with it"
    slower = report_of(run_of(("more", Repeat(times=64))))
    assert slower.verdict == "regression"
    assert slower.speedup["vs_baseline"].high < 0.7


@pytest.mark.alone
def test_each_step_is_judged_against_the_row_before_it() -> None:
    report = report_of(run_of(("less", Repeat(times=2)), ("more", Repeat(times=32))))
    less, more = report.steps
    assert (less.verdict, more.verdict) == ("ok", "regression")
    assert more.vs_previous.value < 0.5
    assert more.vs_baseline.value == pytest.approx(less.vs_baseline.value * more.vs_previous.value, rel=0.35)
    assert report.optimized is more.measured


@pytest.mark.alone
@pytest.mark.case("B104")
@pytest.mark.case("B45")
def test_b104_fail_on_regression_sets_the_exit_code() -> None:
    run = run_of(("more", Repeat(times=64)), fail_on=("regression",))
    report = report_of(run)
    assert report.verdict == "regression"
    assert engine.exit_code(report, run) == 3
    assert engine.exit_code(report, replace(run, fail_on=())) == 0


@pytest.mark.alone
def test_if_faster_drops_a_step_without_gain_and_builds_the_rest_afresh() -> None:
    run = run_of(("less", Repeat(times=2)), ("more", Repeat(times=64)), keep_more="if_faster")
    outcome = engine.run(engine.plan(run))
    less, more = outcome.report.steps
    assert (less.kept, more.kept, more.verdict) == (True, False, "regression")
    assert outcome.module.times == 2
    assert outcome.report.optimized is less.measured
    assert any("step more was dropped" in warning for warning in outcome.report.warnings)


@pytest.mark.alone
def test_ends_measures_the_whole_recipe_only() -> None:
    report = report_of(run_of(("less", Repeat(times=4)), ("least", Repeat(times=2)), measure=replace(QUICK, attribution="ends")))
    less, least = report.steps
    assert (less.measured, less.verdict) == (None, None)
    assert "attribution: ends" in less.reason
    assert least.measured is report.optimized
    assert report.verdict == "ok"


@pytest.mark.alone
def test_leave_one_out_says_what_each_step_is_worth_within_the_whole() -> None:
    run = run_of(("less", Repeat(times=2)), ("head", Corrupt()), measure=replace(QUICK, attribution="leave_one_out"))
    less, head = report_of(run).steps
    assert less.without.low > 1.3
    assert 0.7 < head.without.value < 1.4


@pytest.mark.alone
def test_the_compiled_baseline_is_what_a_compiling_recipe_is_held_against() -> None:
    run = run_of(("less", Repeat(times=2)), ("compile", Compile()))
    report = report_of(run)
    compiled, less = report.steps
    assert (compiled.name, less.name) == ("compile", "less")
    assert report.compiled_baseline is compiled.measured
    assert compiled.measured.compile_time_s > 0
    assert report.speedup["vs_compiled_baseline"].low > 1.3
    assert report.reason.startswith(f"{report.speedup['vs_compiled_baseline'].value:.2f}x faster than the compiled baseline")
    assert [step["name"] for step in report.plan["order"]] == ["less", "compile"]


@pytest.mark.case("B61")
def test_b61_a_corrupted_scale_fails_quality_and_exits_3(tmp_path: Path) -> None:
    run = run_of(("bad", Corrupt()), limits={"min_sqnr_db": 20.0})
    report = report_of(run, tmp_path)
    assert report.verdict == "failed_quality"
    assert report.steps[0].verdict == "failed_quality"
    assert engine.exit_code(report, run) == 3
    assert any("SQNR" in sentence and "20.0" in sentence for sentence in report.quality.missed)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "failed_quality"


def test_the_model_that_was_given_is_never_changed() -> None:
    model = Heavy().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report_of(run_of(("less", Repeat(times=2)), ("bad", Corrupt()), model=model))
    assert model.times == 8
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_step_that_changes_nothing_is_a_plan_error_with_its_reason() -> None:
    with pytest.raises(PlanError, match=r"step idle: repeat/test would change nothing \(too small\); drop it with '~steps.idle'"):
        engine.plan(run_of(("idle", Idle())))


def test_a_receipt_that_is_not_true_stops_the_run(tmp_path: Path) -> None:
    plan = engine.plan(run_of(("liar", Liar())))
    with pytest.raises(StepError, match=r"step liar: linear.weight should be int8 and is float32"):
        engine.execute(plan, folder=tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["status"], written["verdict"]) == ("failed", "failed")
    assert written["error"]["type"] == "StepError"
    assert written["baseline"]["latency_ms"]["n"] > 0, "what was measured before the failure is kept"


@pytest.mark.case("B108")
def test_b108_out_of_memory_is_recorded_and_holds_nothing(tmp_path: Path) -> None:
    SEEN.clear()
    run = run_of(("grow", OutOfRoom()))
    report = report_of(run, tmp_path)
    gc.collect()
    assert (report.status, report.verdict) == ("oom", "oom")
    assert report.error["memory"]["process"] > 0
    assert engine.exit_code(report, run) == 1
    assert all(reference() is None for reference in SEEN)


def test_an_interrupt_leaves_an_incomplete_report(tmp_path: Path) -> None:
    plan = engine.plan(run_of(("stop", Interrupted())))
    with pytest.raises(KeyboardInterrupt):
        engine.execute(plan, folder=tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["status"], written["reason"]) == ("incomplete", "interrupted")


def test_a_baseline_that_does_not_fit_is_null_with_the_reason() -> None:
    plan = engine.plan(run_of(("less", Repeat(times=2))))
    plan.device = replace(plan.device, memory_bytes=1000)
    report = engine.execute(plan)
    assert report.baseline is None
    assert "does not fit" in report.baseline_reason
    assert report.optimized.latency_ms["p50"] > 0
    assert report.speedup["vs_baseline"] is None
    assert report.status == "complete"


@pytest.mark.case("B77")
def test_b77_parameters_on_meta_are_refused_before_the_first_step() -> None:
    with torch.device("meta"):
        model = Heavy()
    with pytest.raises(PlanError, match=r"linear.weight"):
        engine.plan(run_of(("less", Repeat(times=2)), model=model))


@pytest.mark.alone
def test_a_recipe_without_steps_is_the_baseline_itself() -> None:
    report = report_of(run_of())
    assert (report.status, report.verdict) == ("complete", "no_gain")
    assert report.optimized is report.baseline


@pytest.mark.alone
def test_budget_is_shared_out_over_the_rows() -> None:
    run = run_of(("less", Repeat(times=2)), ("least", Repeat(times=1)), measure=Measure(warmup=1, min_rounds=2, budget_s=0.9))
    report = report_of(run)
    timed = [sum(step.measured.samples_s) + sum(step.measured.baseline_samples_s) for step in report.steps]
    assert all(seconds < 3.0 for seconds in timed)


@pytest.mark.alone
def test_a_recipe_for_size_says_what_it_costs_in_time() -> None:
    report = report_of(run_of(("more", Repeat(times=64)), goal="size"))
    assert report.verdict == "no_gain"
    assert any(
        "the goal is size: one call takes" in warning and "times as long as with the model as loaded" in warning
        for warning in report.warnings
    )
