"""The verdict of a plan: what it promises, what it warns of, and the command that it gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optforge.plan import recorded, verdict
from optforge.plan.document import Change, Fit, FitRow, Kernels, Recorded, Source, Speed, SpeedRow, StepPlan, Study
from optforge.plan.kernels import KernelReport
from optforge.report import plan_sections as sections
from optforge.report import plan_view as view
from optforge.spec import Downgrade

ROOT = Path(__file__).parents[2]


def planned(
    *,
    before: float | None = 10.0,
    after: float | None = 5.0,
    use: str = "quantize/fp8_dynamic",
    command: str = "optforge plan recipe=llama_fp8 hardware=h100",
    **parts: Any,
) -> Study:
    """A study of one quantize step; bands of a tenth on either side, ideals of half the time."""
    rows = [
        SpeedRow(name="as loaded", mode="eager", **_times(before and 2 * before)),
        SpeedRow(name="compiled baseline", mode="compiled", **_times(before)),
        SpeedRow(name="weights", mode="compiled", bound="memory", **_times(after)),
    ]
    return Study(
        recipe={"name": "llama_fp8"},
        target={"name": "h100", "backend": "nvidia"},
        model={"name": "llama3_8b"},
        workload={"name": "decode", "kind": "decode"},
        weight_bytes=160,
        steps=[StepPlan(name="weights", use=use, requested=use, phase="quantize", weight_bytes=80)],
        speed=Speed(known=after is not None, rows=rows, reference="compiled baseline"),
        command=command,
        **parts,
    )


def _times(latency: float | None) -> dict[str, Any]:
    if latency is None:
        return {}
    return {
        "latency_ms": latency,
        "tokens_per_s": 1e3 / latency,
        "low_ms": 0.9 * latency,
        "high_ms": 1.1 * latency,
        "ideal_ms": 0.5 * latency,
    }


def fit(total: float, memory: float | None, *changes: Change) -> Fit:
    fits = None if memory is None else total <= memory
    rows = [FitRow(name="as loaded", parts={"weights": 2 * total}, total_bytes=2 * total)]
    rows.append(FitRow(name="weights", total_bytes=total, fits=fits, spare_bytes=None if memory is None else memory - total))
    return Fit(
        memory_bytes=memory and int(memory), rows=rows, fits=fits, changes=list(changes), reason=None if memory else "no memory_bytes"
    )


def judged(study: Study, goal: str = "throughput", found: tuple[Recorded, ...] = ()) -> Study:
    study.verdict = verdict.judge(study, goal=goal, found=found)
    return study


def test_a_row_of_several_plans_says_what_its_figures_stand_on() -> None:
    def study(calibration: Source | None) -> Study:
        made = judged(planned())
        assert made.speed is not None
        made.speed = replace(made.speed, calibration=calibration)
        return made

    own = Source(name="h200", device="NVIDIA H200", exact=True, source="measured on 2026-12-01")
    table = view.comparison([study(None), study(own), study(replace(own, exact=False))])
    column = table.head.index("from")
    assert [row[column] for row in table.rows] == ["the peaks", "this device", "borrowed, h200"]


def test_a_gain_carries_its_band_and_its_bound() -> None:
    """By hand: 10 / 5 = 2; 9 / 5.5 = 1.64 and 11 / 4.5 = 2.44; ideals 5 / 2.5 = 2; 10 / 2.5 = 4."""
    said = judged(planned()).verdict
    assert (said.outcome, said.gain) == ("gain", 2.0)
    assert said.sentence == "at the published peaks alone 2.00 times (1.64 to 2.44): faster, against the compiled baseline"
    assert said.bound == "memory bound: 2.00 times at equal efficiency, at most 4.00 times at the peaks"
    assert said.command == "optforge run recipe=llama_fp8 hardware=h100"


@pytest.mark.case("B45")
def test_b45_a_predicted_slow_down_is_a_regression_in_the_table_and_in_the_verdict() -> None:
    study = judged(planned(before=10.0, after=20.0))
    study.speed.rows[2].vs_reference, study.speed.rows[2].outcome = 0.5, "regression"
    assert study.verdict.outcome == "regression"
    assert "0.50 times" in study.verdict.sentence and "slower" in study.verdict.sentence
    assert sections.predicted(study.speed.rows[2], study.speed) == "0.50 times: slower"
    (row,) = view.comparison([study]).rows
    assert "0.50 times: regression" in row and not any("gain" in cell or "faster" in cell for cell in row)


@pytest.mark.case("B45")
def test_b45_a_recipe_that_was_measured_slower_on_this_device_is_no_gain_whatever_the_roofline_says() -> None:
    study = planned()
    study.target, study.model, study.workload = {"name": "h200", "backend": "nvidia"}, {"name": "smollm2_135m"}, {"name": "prefill"}
    found = recorded.recorded(schemes=["quantize/fp8_dynamic"], recipe="llama_fp8", model="smollm2_135m", device="h200", backend="nvidia")
    judged(study, found=tuple(found))
    assert study.verdict.outcome == "regression"
    assert view.headline(study) == "regression, as measured before"
    assert study.verdict.measured.startswith("0.93 times: slower for smollm2_135m on h200 (2026-11-30)")
    assert "1.47 times: faster for llama3_8b on h200" in study.verdict.measured


def test_far_from_the_peaks_no_factor_is_told() -> None:
    study = planned()
    study.speed.rows[2].bound, study.speed.rows[2].ideal_ms = "launch", 0.001
    assert judged(study).verdict.bound.endswith("at equal efficiency, nowhere near the peaks")


@pytest.mark.parametrize("row", [1, 2])
def test_a_gain_that_leaves_operators_out_says_so(row: int) -> None:
    study = planned()
    study.speed.rows[row].partial = True
    assert judged(study).verdict.sentence.endswith(", against the compiled baseline, without the operators whose work is unknown")


@pytest.mark.parametrize("row", [1, 2])
def test_faster_than_the_roofline_leaves_no_bound_to_tell(row: int) -> None:
    study = planned()
    study.speed.rows[row].ideal_ms = 2 * study.speed.rows[row].latency_ms
    said = judged(study).verdict
    assert said.bound == "memory bound; caches serve part of what the roofline takes from memory"
    assert (said.at_most, said.at_equal_efficiency) == (None, None)


def test_what_changes_the_numbers_is_the_quantize_steps_else_the_last_cast() -> None:
    study = planned()
    casts = [StepPlan(name=use, use=use, requested=use, phase="precision") for use in ("precision/fp16", "precision/bf16")]
    study.steps = [*casts, *study.steps]
    assert verdict.changing(study) == ["quantize/fp8_dynamic"]
    study.steps = casts
    assert verdict.changing(study) == ["precision/bf16"]
    study.steps = []
    assert verdict.changing(study) == []


def test_a_model_that_fits_only_after_the_recipe_has_no_baseline_and_the_plan_says_so() -> None:
    found = fit(60.0, 80.0)
    found.rows[0].fits = False  # 120 of 80
    study = judged(planned(fit=found))
    assert study.verdict.outcome == "gain" and study.verdict.command.startswith("optforge run")
    assert study.verdict.why.startswith("the model as loaded does not fit, so the run has no baseline")
    assert not judged(planned(fit=fit(30.0, 80.0))).verdict.why


def test_only_a_calibrated_prediction_is_called_expected() -> None:
    study = planned()
    study.speed.calibration = Source(name="h200", device="NVIDIA H200", exact=False, source="a file")
    assert view.headline(judged(planned())) == "gain at the published peaks"
    assert judged(study).verdict.sentence.startswith("expected 2.00 times")
    assert view.headline(study) == "gain expected"


def test_a_memory_recipe_says_what_it_costs_in_time() -> None:
    study = judged(planned(before=10.0, after=20.0, fit=fit(80.0, 100.0)), goal="memory")
    assert (study.verdict.outcome, study.verdict.gain, study.verdict.unit) == ("gain", 2.0, "memory")
    assert "in time 0.50 times: slower" in study.verdict.sentence


def test_an_unknown_time_is_not_guessed() -> None:
    study = planned(after=None)
    study.speed.reason = "the profile cpu has no published peaks"
    assert judged(study).verdict.outcome == "unknown"
    assert study.verdict.gain is None and study.verdict.sentence == "unknown: the profile cpu has no published peaks"


@pytest.mark.parametrize(
    ("asked", "change", "command"),
    [
        ("workload.batch_size=64", "workload.batch_size=8", "optforge run recipe=a hardware=h100 workload.batch_size=8"),
        (
            "--set weights.use=quantize/int8_weight",
            "steps.weights.use=quantize/int4_weight",
            "optforge run recipe=a hardware=h100 steps.weights.use=quantize/int4_weight",
        ),
        (
            "seed=1",
            "steps.shard={use: shard/fsdp, fsdp: 2}",
            "optforge plan recipe=a hardware=h100 seed=1 'steps.shard={use: shard/fsdp, fsdp: 2}'",
        ),
        ("workload=decode", "hardware=h200", "optforge run recipe=a workload=decode hardware=h200"),
        ("'~steps.y'", "steps.x.tensor=2", "optforge run recipe=a hardware=h100 '~steps.y' steps.x.tensor=2"),
    ],
)
def test_what_does_not_fit_is_run_with_the_smallest_change(asked: str, change: str, command: str) -> None:
    study = planned(
        command=f"optforge plan recipe=a hardware=h100 {asked} --no-kernels --json", fit=fit(80.0, 40.0, Change(override=change, what="it"))
    )
    said = judged(study).verdict
    assert (said.outcome, said.command) == ("does_not_fit", command)
    assert said.fit == "no: 80.0 B of 40.0 B per device, 40.0 B too much; smallest change: it"


def test_a_change_that_can_be_executed_comes_before_one_that_can_only_be_planned() -> None:
    shard = Change(override="steps.shard={use: shard/fsdp, fsdp: 2}", what="2 devices")
    bits = Change(override="steps.weights.use=quantize/int4_weight", what="weights as int4_weight")
    said = judged(planned(fit=fit(80.0, 40.0, shard, bits))).verdict
    assert said.command == "optforge run recipe=llama_fp8 hardware=h100 steps.weights.use=quantize/int4_weight"
    assert "smallest change: 2 devices" in said.fit


def test_what_can_only_be_planned_has_no_command_that_run_would_refuse() -> None:
    study = planned()
    study.steps.append(StepPlan(name="shard", use="shard/fsdp", requested="shard/fsdp", phase="shard"))
    said = judged(study).verdict
    assert said.command == "" and "not executed yet" in said.why


def test_what_cannot_be_made_to_fit_has_no_command_that_would_fail() -> None:
    said = judged(planned(fit=fit(80.0, 40.0))).verdict
    assert (said.outcome, said.command) == ("does_not_fit", "")
    assert "no single change" in said.why


def test_unknown_memory_is_asked_for() -> None:
    said = judged(planned(fit=fit(80.0, None))).verdict
    assert said.fit == "unknown: no memory_bytes"
    assert "hardware.memory_bytes=" in said.why


def test_a_better_alternative_to_a_downgrade_is_a_command() -> None:
    ranked = [{"use": "quantize/int8_dynamic", "predicted_speedup": 1.5}, {"use": "quantize/fp8_weight", "predicted_speedup": 1.1}]
    downgrade = Downgrade(
        step="weights", requested="quantize/fp8_dynamic", runs_as="quantize/fp8_weight", reason="a100 has no fp8", alternatives=ranked
    )
    said = judged(planned(downgrades=[downgrade])).verdict
    assert said.instead == f"{said.command} steps.weights.use=quantize/int8_dynamic"
    assert said.downgrade == "weights: a100 has no fp8; best instead: quantize/int8_dynamic (1.50 times, predicted)"


@pytest.mark.parametrize("own", [1.09, None])
def test_an_alternative_that_is_hardly_better_is_no_command(own: float | None) -> None:
    ranked = [{"use": "quantize/int8_dynamic", "predicted_speedup": 1.1}, {"use": "quantize/fp8_weight", "predicted_speedup": own}]
    downgrade = Downgrade(step="weights", requested="quantize/fp8_dynamic", runs_as="quantize/fp8_weight", reason="r", alternatives=ranked)
    assert judged(planned(downgrades=[downgrade])).verdict.instead == ""


@pytest.mark.parametrize(
    ("scheme", "model", "words"),
    [
        ("quantize/int8_dynamic", "smollm2_135m", "low: perplexity +0.7%"),
        ("quantize/int4_weight", "smollm2_135m", "high: perplexity +33.0%"),
        ("quantize/fp8_dynamic", "smollm2_135m", "moderate: perplexity +2.5%"),
        ("quantize/int8_weight", "smollm2_135m", "unknown: no recorded run of int8_weight"),
        ("quantize/int4_weight", "llama3_70b", "no recorded run on llama3_70b, so yours may differ"),
    ],
)
def test_quality_is_told_from_recorded_runs_and_never_invented(scheme: str, model: str, words: str) -> None:
    found = recorded.recorded(schemes=[scheme], recipe="any", model=model, device="any")
    assert words in recorded.quality(found, schemes=[scheme], model=model)


def test_a_classifier_is_not_judged_by_a_language_model_where_its_own_recipe_was_recorded() -> None:
    found = recorded.recorded(schemes=["quantize/int8_dynamic"], recipe="vision_int8", model="fashion_cnn", device="cpu")
    said = recorded.quality(found, schemes=["quantize/int8_dynamic"], model="fashion_cnn", recipe="vision_int8")
    assert said.startswith("low: top-1 +0.0%, 100.0% of answers agree")
    assert "efficientnet_lite0" in said and "no recorded run on fashion_cnn" in said


def test_every_recorded_figure_is_in_the_file_that_it_names() -> None:
    for run in recorded.runs():
        path = ROOT / str(run["source"])
        if run["words"] is not None:
            assert run["words"] in path.read_text(encoding="utf-8"), run
            assert str(run["date"]) in path.read_text(encoding="utf-8") or str(run["date"]) in path.name
            continue
        report = json.loads(path.read_text(encoding="utf-8"))
        assert (report["recipe"]["name"], report["model"]["name"], report["device"]["name"]) == (run["recipe"], run["model"], run["device"])
        assert run["scheme"] in [step["use"] for step in report["steps"]] and report["started"].startswith(str(run["date"]))
        ratio = report["speedup"]["vs_compiled_baseline"]
        assert run["speedup"] is None or (ratio["unit"] == "latency" and run["speedup"] == pytest.approx(ratio["value"], abs=0.005))
        for key in ("perplexity_increase", "top1_drop", "agreement", "kl"):
            measured = (report["quality"] or {}).get(key)
            assert run[key] is None or run[key] == pytest.approx(measured, rel=0.01, abs=5e-5), (run, key)


@pytest.mark.parametrize("goal", ["throughput", "size"])
@pytest.mark.parametrize("status", ["refused", "over_shared_memory"])
def test_a_kernel_that_cannot_run_leaves_no_gain_to_expect(goal: str, status: str) -> None:
    bad = KernelReport(
        kernel="matvec_kernel", configuration="", modules=8, example="layers.0", arch="sm_90", status=status, reason="no such type"
    )
    said = judged(planned(kernels=Kernels(rows=[bad])), goal).verdict
    assert (said.outcome, said.gain) == ("unknown", None)
    assert "matvec_kernel" in said.sentence and "no such type" in said.sentence
    fine = Kernels(rows=[replace(bad, status="compiled", reason="")])
    assert judged(planned(kernels=fine), goal).verdict.outcome == "gain"
