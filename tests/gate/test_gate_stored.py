"""A run against a stored baseline: what is missed, what passes, what is undecided, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from runs import BF16, INT8, ON_H200, run

from optforge.errors import ConfigError, UserError
from optforge.gate import baseline, documents, judge, limits, stored
from optforge.gate.judge import MISSED, PASSED, UNDECIDED, Judgement
from optforge.report import store
from optforge.spec import Report

STEADY = [run(candidate=factor) for factor in (0.995, 1.0, 1.005)]
"""Three runs that differ by half a percent."""


def gate(new: Report, *texts: str, base: list[Report] | None = None, run_to_run: float = 0.01, strict: bool = False) -> Judgement:
    rules = limits.Rules(limits=tuple(map(limits.parse, texts)), run_to_run=run_to_run)
    return stored.gate([new], STEADY if base is None else base, rules, strict=strict)


def verdict(new: Report, text: str, **options: object) -> str:
    (finding,) = gate(new, text, **options).findings
    return finding.verdict


@pytest.mark.parametrize(("candidate", "expected"), [(1.0, PASSED), (1.02, PASSED), (1.05, UNDECIDED), (1.2, MISSED), (0.8, PASSED)])
def test_a_verdict_needs_the_whole_interval(candidate: float, expected: str) -> None:
    """+5%, one run against three that differ by half a percent: by hand the interval is about 2% to either side."""
    assert verdict(run(candidate=candidate), "latency_ms.p50 <= +5%") == expected


@pytest.mark.parametrize("path", ["latency_ms.p50", "latency_ms.p90", "latency_ms.mean"])
def test_every_time_sees_a_slow_down(path: str) -> None:
    assert verdict(run(candidate=1.25), f"{path} <= +5%") == MISSED


def test_a_rate_is_the_time_turned_round() -> None:
    assert verdict(run(candidate=1.25), "tokens_per_s >= -5%") == MISSED
    (finding,) = gate(run(candidate=1.25), "tokens_per_s >= -5%").findings
    assert finding.change is not None and finding.change.value == pytest.approx(1 / 1.25 - 1, abs=0.005)
    assert verdict(run(candidate=0.8), "tokens_per_s >= -5%") == PASSED


def test_a_busy_machine_cancels_and_is_told() -> None:
    busy = gate(run(machine=2.0), "latency_ms.p50 <= +5%")
    assert busy.findings[0].verdict == PASSED
    assert any("the reference itself takes 2.00 times as long" in note for note in busy.notes)
    assert not gate(run(), "latency_ms.p50 <= +5%").notes


def test_what_slows_the_reference_too_can_be_made_a_limit() -> None:
    assert verdict(run(machine=2.0), "reference_ms.p50 <= +25%") == MISSED


def test_counts_are_decided_by_one_run() -> None:
    assert verdict(run(memory=1.04), "peak_memory_bytes <= +5%", base=[run()]) == PASSED
    assert verdict(run(memory=1.06), "peak_memory_bytes <= +5%", base=[run()]) == MISSED


def test_absolute_limits_need_no_baseline() -> None:
    p50 = json.loads(INT8.read_text())["optimized"]["latency_ms"]["p50"]
    assert verdict(run(), f"latency_ms.p50 <= {1.2 * p50:.3f}") == PASSED
    assert verdict(run(), f"latency_ms.p50 <= {0.8 * p50:.3f}") == MISSED
    assert verdict(run(), f"latency_ms.p50 <= {p50:.6f}") == UNDECIDED
    assert verdict(run(), "speedup.vs_compiled_baseline >= 1.2") == PASSED
    assert verdict(run(), "speedup.vs_compiled_baseline >= 1.33") == UNDECIDED  # its interval is 1.31 to 1.34
    assert verdict(run(), "speedup.vs_compiled_baseline >= 1.5") == MISSED


def test_quality_in_percent_and_as_a_difference() -> None:
    tree = json.loads(INT8.read_text())
    worse = {**tree["quality"], "perplexity": tree["quality"]["perplexity"] * 1.02, "kl": tree["quality"]["kl"] + 0.02}
    assert verdict(run(quality=worse), "quality.perplexity <= +1%") == MISSED
    assert verdict(run(quality=worse), "quality.perplexity <= +3%") == PASSED
    assert verdict(run(quality=worse), "quality.kl <= +0.01") == MISSED
    assert verdict(run(quality=worse), "quality.kl <= +0.03") == PASSED


def test_a_recipes_own_limit_that_was_missed_is_missed() -> None:
    quality = {**json.loads(INT8.read_text())["quality"], "missed": ["KL 0.20 is above max_kl 0.05"]}
    found = gate(run(quality=quality), "latency_ms.p50 <= +50%")
    assert [finding.found for finding in found.failed] == ["KL 0.20 is above max_kl 0.05"]
    assert found.exit_code == 3


def test_undecided_fails_only_where_strict() -> None:
    text = "latency_ms.p50 <= +5%"
    assert gate(run(candidate=1.05), text).exit_code == 0
    assert gate(run(candidate=1.05), text, strict=True).exit_code == 3


def test_different_experiments_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        gate(store.read(ON_H200), "latency_ms.p50 <= +5%")
    assert {problem.where for problem in caught.value.problems} >= {"device", "workload"}


def test_an_upgrade_is_noted_and_judged() -> None:
    environment = json.loads(INT8.read_text())["environment"]
    upgraded = run(environment={**environment, "versions": {**environment["versions"], "torch": "2.99.0"}}, candidate=1.3)
    found = gate(upgraded, "latency_ms.p50 <= +5%")
    assert found.findings[0].verdict == MISSED
    assert any("2.99.0" in note for note in found.notes)


def test_a_new_checkpoint_is_noted_and_another_model_is_refused() -> None:
    model = json.loads(INT8.read_text())["model"]
    assert any("digest" in note for note in gate(run(model={**model, "digest": "0" * 64}), "weight_bytes <= +1%").notes)
    with pytest.raises(ConfigError, match="model: differs"):
        gate(run(model={**model, "name": "other"}), "weight_bytes <= +1%")


def test_a_shared_device_is_noted() -> None:
    environment = {**json.loads(INT8.read_text())["environment"], "contended": True}
    assert any("something else used the device" in note for note in gate(run(environment=environment), "weight_bytes <= +1%").notes)


def test_runs_that_shared_their_device_are_left_out_where_others_remain() -> None:
    shared = run(candidate=1.4, environment={**json.loads(INT8.read_text())["environment"], "contended": True})
    found = gate(run(candidate=1.2), "latency_ms.p50 <= +5%", base=[*STEADY, shared])
    assert found.findings[0].verdict == MISSED and "1 run against 3 runs" in found.findings[0].detail
    assert "1 of 4 baselines are left out: something else used the device during them" in found.notes


def test_a_shared_device_widens_the_interval_of_a_time_and_of_nothing_else() -> None:
    """By hand: 10% assumed with 4 degrees of freedom, one run against one: 2.776 x 10% x 1.414 = 39% on the logarithm."""
    shared = {**json.loads(INT8.read_text())["environment"], "contended": True}
    slow, slower = run(candidate=1.3, memory=1.1, environment=shared), run(candidate=2.0, environment=shared)
    assert verdict(run(candidate=1.3), "latency_ms.p50 <= +5%", base=[run()]) == MISSED
    assert verdict(slow, "latency_ms.p50 <= +5%", base=[run()]) == UNDECIDED
    assert verdict(slower, "latency_ms.p50 <= +5%", base=[run()]) == MISSED
    assert verdict(slow, "peak_memory_bytes <= +5%", base=[run()]) == MISSED


def test_a_stand_in_is_refused_unless_allowed() -> None:
    stood_in = run(device={**json.loads(INT8.read_text())["device"], "is_target": False}, target={"name": "a100"})
    with pytest.raises(UserError, match="stood in for a100"):
        gate(stood_in, "weight_bytes <= +1%")
    rules = limits.Rules(limits=(limits.parse("weight_bytes <= +1%"),), require_target=False)
    assert stored.gate([stood_in], STEADY, rules).exit_code == 0


def test_unfinished_runs_and_unknown_figures_are_refused() -> None:
    with pytest.raises(UserError, match="is not finished"):
        gate(run(status="oom", reason="cpu ran out of memory"), "weight_bytes <= +1%")
    with pytest.raises(ConfigError, match=r"the run has no figure latency\.p50; did you mean latency_ms\.p50"):
        gate(run(), "latency.p50 <= +1%")


def test_times_without_a_reference_are_compared_as_they_are_and_that_is_said() -> None:
    row = {**json.loads(INT8.read_text())["optimized"], "baseline_samples_s": []}
    found = gate(run(optimized=row), "latency_ms.p50 <= +5%", base=[run(optimized=row)])
    assert any("a busy machine does not cancel" in note for note in found.notes)


def test_a_baseline_comes_back_with_all_that_is_judged(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "gate.json"
    baseline.write(file, STEADY)
    text = "latency_ms.p50 <= +5%"
    (stored_,), (fresh,) = (gate(run(candidate=1.04), text, base=base).findings for base in (baseline.read(file), STEADY))
    assert stored_ == fresh
    assert file.stat().st_size < 3 * INT8.stat().st_size / 2
    (alone,) = baseline.read(BF16)
    assert alone.recipe["name"] == "llama_bf16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ('{"kind": "optforge gate baseline", "schema_version": 9, "runs": [1]}', "schema_version 9"),
        ("[]", "schema_version None"),
    ],
)
def test_a_damaged_baseline_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "gate.json"
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        baseline.read(file)


def _judgement(*, strict: bool = False) -> Judgement:
    return gate(run(candidate=1.05), "latency_ms.p50 <= +1%", "latency_ms.p50 <= +5%", "weight_bytes <= +1%", strict=strict)


@pytest.mark.parametrize(("strict", "failures", "skipped"), [(False, 1, 1), (True, 2, 0)])
def test_junit_counts_what_fails(strict: bool, failures: int, skipped: int) -> None:
    suite = ElementTree.fromstring(documents.junit(_judgement(strict=strict)).encode()).find("testsuite")
    assert suite is not None
    assert [suite.get(key) for key in ("tests", "failures", "skipped")] == ["3", str(failures), str(skipped)]
    assert len(suite.findall(".//failure")) == failures and len(suite.findall(".//skipped")) == skipped
    assert [case.get("name") for case in suite.findall("testcase")] == [
        "latency_ms.p50 <= +1%",
        "latency_ms.p50 <= +5%",
        "weight_bytes <= +1%",
    ]


def test_junit_survives_control_characters() -> None:
    finding = judge.Finding(limit="a <= 1", verdict=MISSED, found="\x1b[31m<&\x00")
    suite = ElementTree.fromstring(documents.junit(Judgement(title="\x07", findings=[finding])).encode())
    failure = suite.find(".//failure")
    assert failure is not None and failure.get("message") == "?[31m<&?"


def test_markdown_has_a_row_per_limit() -> None:
    text = documents.markdown(_judgement())
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row.split("|")[1].strip() for row in rows] == ["**missed**", "undecided", "passed"]
    assert text.startswith("## gate: 1 missed, 1 undecided, 1 passed of 3 limits")
