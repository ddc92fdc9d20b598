"""A metric of the user's own: what it may return, how its faults are told, and where its figures go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toys import tiny_lm

import optforge
from optforge.errors import ConfigError, UserError
from optforge.gate import figures as gate_figures
from optforge.measure import limits
from optforge.measure.own import OwnMetric, drop, figure, record
from optforge.models.base import Loaded
from optforge.report import view
from optforge.spec import QualityResult, Report

HERE = Path(__file__).name
RETURNS: dict[str, Any] = {}


def returns(model: nn.Module, loaded: Loaded) -> Any:
    """What the test put into RETURNS."""
    assert not model.training and not torch.is_grad_enabled()
    return RETURNS["value"]


def alone(model: nn.Module) -> float:
    """Takes the model alone."""
    return 0.25


def fails(model: nn.Module, loaded: Loaded) -> float:
    return {}["f1"]  # the line that the error names


def breaks_later(model: nn.Module) -> float:
    """Fine with the model as loaded, and not with its quantized one."""
    if any(not p.is_floating_point() for p in model.parameters()):
        raise RuntimeError("no int8 here")
    return 1.0


def called(value: Any, function: str = "returns") -> Any:
    RETURNS["value"] = value
    return OwnMetric(f"test_own_metric:{function}")(tiny_lm().train(), Loaded(module=tiny_lm(), family="causal_lm", name="toy"))


def test_a_number_of_any_make_is_a_figure_and_higher_is_better() -> None:
    for value in (1, 0.5, np.float32(0.5), torch.tensor([0.5]), np.array([0.5])):
        assert called(value) == {"": (np.asarray(value).item(), "higher")}
    assert called(None, "alone") == {"": (0.25, "higher")}


def test_named_figures_have_a_direction() -> None:
    found = called({"f1": 0.91, "wer": (0.12, "lower"), "bleu": (torch.tensor(30.0), "higher")})
    assert found == {"f1": (0.91, "higher"), "wer": (0.12, "lower"), "bleu": (30.0, "higher")}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("0.9", "returned str '0.9', which is no number"),
        (None, "returned None, which is no number"),
        (True, "returned bool True, which is no number"),
        ([0.9], r"returned list \[0.9\], which is no number"),
        (torch.zeros(2), "returned Tensor tensor"),
        ({"f1": "high"}, "returned str 'high' for f1, which is no number"),
        ({"f1": float("nan")}, "returned nan for f1"),
        ({"f1": (0.9, "up")}, "gave f1 the direction 'up'"),
        ({"f 1": 0.9}, "named a figure 'f 1'"),
        ({3: 0.9}, "named a figure 3"),
        ({}, "returned no figure"),
    ],
)
def test_what_is_no_figure_is_told_with_the_key_and_what_to_return(value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        called(value)
    (problem,) = raised.value.problems
    assert problem.where == "quality.metric" and problem.what.startswith("test_own_metric:returns ")
    assert problem.fix and raised.value.exit_code == 2
    if "no number" in told:
        assert HERE in problem.what, "where the function stands"


def test_an_exception_of_the_function_names_its_line() -> None:
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "the line that the error names" in text)
    with pytest.raises(ConfigError, match=rf"test_own_metric:fails raised KeyError: 'f1', at .*{HERE} line {line}; correct it"):
        called(None, "fails")


def result(**own: tuple[float, str]) -> QualityResult:
    found, baseline = QualityResult(), {"f1": (0.80, "higher"), "wer": (0.10, "lower")}
    record(found, own, baseline)
    return found


def test_limits_hold_named_figures_in_their_direction() -> None:
    found = result(f1=(0.76, "higher"), wer=(0.11, "lower"))
    assert drop(found.metrics["f1"]) == pytest.approx(0.05), "0.04 of 0.80"
    assert drop(found.metrics["wer"]) == pytest.approx(0.10), "0.01 of 0.10, and lower is better"
    asked = limits.flat({"min_metric": {"f1": 0.77}, "max_metric": {"wer": 0.105}, "max_metric_drop": {"f1": 0.06, "wer": 0.05}})
    assert limits.missed(found, asked) == [
        "f1 0.76 is under min_metric.f1 0.77",
        "wer 0.11 is over max_metric.wer 0.105",
        "wer's drop 10.0% is over max_metric_drop.wer 5.0%",
    ]
    assert limits.missed(found, {"min_metric.bleu": 1.0}) == [
        "bleu could not be measured here, and min_metric.bleu is set (recipe.limits.min_metric.bleu=null drops it)"
    ]
    better = result(f1=(0.9, "higher"), wer=(0.05, "lower"))
    assert limits.missed(better, limits.flat({"max_metric_drop": {"f1": 0.0, "wer": 0.0}})) == []


def test_flat_and_nested_are_each_others_reverse() -> None:
    written = {"max_kl": 0.1, "min_metric": {"f1": 0.9, "acc": 0.8}, "max_metric_drop": 0.02}
    flat = limits.flat(written)
    assert flat == {"max_kl": 0.1, "min_metric.f1": 0.9, "min_metric.acc": 0.8, "max_metric_drop": 0.02}
    assert limits.nested(flat) == written


def test_a_bare_figure_keeps_its_place_and_its_limits() -> None:
    found = QualityResult()
    record(found, {"": (0.5, "higher")}, {"": (0.6, "higher")})
    assert (found.metric, found.baseline_metric, found.metrics) == (0.5, 0.6, {})
    assert figure(found, "") == {"value": 0.5, "baseline": 0.6, "better": "higher"}
    assert limits.missed(found, {"min_metric": 0.55, "max_metric_drop": 0.1}) == [
        "metric 0.5 is under min_metric 0.55",
        "metric's drop 16.7% is over max_metric_drop 10.0%",
    ]


def test_reports_and_gates_find_the_named_figures() -> None:
    report = Report(quality=result(f1=(0.76, "higher"), wer=(0.09, "lower")))
    lines = {line.name: (line.baseline, line.optimized, line.difference) for line in view.quality_lines(report.quality)}
    assert lines["f1 (higher is better)"] == ("0.8", "0.76", "-5.0% (worse)")
    assert lines["wer (lower is better)"] == ("0.1", "0.09", "+10.0% (better)")
    assert "f1 -5.0% (worse)" in view.quality_phrases(report.quality)
    found = gate_figures.plain(report, "quality.metric.f1")
    assert found is not None and found.value == 0.76
    assert {"quality.metric.f1", "quality.metric.wer"} <= set(gate_figures.known(report))
    assert gate_figures.plain(report, "quality.metric.bleu") is None


RECIPE = """
name: own
steps: {weights: {use: quantize/int8_weight}}
limits: {max_metric_drop: {score: 0.01}}
"""


def optimized(tmp_path: Path, metric: str, recipe: str = RECIPE) -> Report:
    (tmp_path / "own.yaml").write_text(recipe)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    overrides = [f"quality.metric={metric}", "measure.max_s=0.05", "measure.warmup=1"]
    folder = tmp_path / "run"
    return optforge.optimize(model, tmp_path / "own.yaml", hardware="cpu", example=torch.randn(4, 64), overrides=overrides, folder=folder)[
        1
    ]


def scored(model: nn.Module) -> dict[str, Any]:
    return {"score": 1.0 if all(p.is_floating_point() for p in model.parameters()) else 0.9, "size": (2.0, "lower")}


def test_a_run_measures_holds_and_reports_it(tmp_path: Path) -> None:
    report = optimized(tmp_path, "test_own_metric:scored")
    assert report.quality is not None
    assert report.quality.metrics == {
        "score": {"value": 0.9, "baseline": 1.0, "better": "higher"},
        "size": {"value": 2.0, "baseline": 2.0, "better": "lower"},
    }
    assert report.verdict == "failed_quality"
    assert report.quality.missed == ["score's drop 10.0% is over max_metric_drop.score 1.0%"]
    text = (tmp_path / "run" / "report.md").read_text()
    assert "score" in text and "higher is better" in text
    assert report.settings["recipe"]["limits"] == {"max_metric_drop": {"score": 0.01}}, "as a recipe writes it"


def test_a_wrong_name_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"quality.metric: cannot import 'no_such_module:f'"):
        optimized(tmp_path, "no_such_module:f")
    assert not (tmp_path / "run" / "report.json").exists(), "the plan refused it"


def test_a_fault_in_a_later_row_loses_nothing(tmp_path: Path) -> None:
    """The rows before it stand in the report, with the key and the line of the fault."""
    with pytest.raises(ConfigError, match=r"breaks_later raised RuntimeError: no int8 here, at .* line \d+"):
        optimized(tmp_path, "test_own_metric:breaks_later", RECIPE.replace("limits", "#"))
    from optforge.report import store

    report = store.read(tmp_path / "run" / "report.json")
    assert report.status == "failed" and report.error is not None and "quality.metric" in report.error["message"]
    assert report.baseline is not None and report.baseline.latency_ms["p50"]
