"""Decisions of a search, each against a result worked out by hand."""

from __future__ import annotations

import math

import pytest

from optforge.spec import Measurement, QualityResult, Ratio, Report
from optforge.tune import final, judge
from optforge.tune.candidate import HAND_WRITTEN, MEASURED, MISSED, SEARCHED, Candidate, Figures, Foreseen, Result
from optforge.tune.options import Limits, TuneOptions


def _candidate(name: str, speed: float, *, rung: int = 0, memory: int = 0, origin: str = SEARCHED, state: str = MEASURED) -> Candidate:
    figures = Figures(ratio=Ratio(value=speed, low=speed, high=speed), latency_ms=100 / speed, peak_memory_bytes=memory)
    results = [Result(rung=each, job=0, figures=figures) for each in range(rung + 1)]
    return Candidate(name=name, origin=origin, steps={}, results=results, tried=rung, state=state)


def _names(candidates: list[Candidate]) -> list[str]:
    return [one.name for one in candidates]


def test_the_ratio_of_a_compiled_row_is_the_product_of_both_of_its_rounds() -> None:
    report = Report(
        baseline=Measurement(samples_s=[8.0] * 9),
        compiled_baseline=Measurement(samples_s=[4.0] * 9, baseline_samples_s=[8.0] * 9),
        optimized=Measurement(samples_s=[2.0] * 9, baseline_samples_s=[3.0] * 9),
    )
    found = judge.time_ratio(report)
    assert found is not None
    assert found.value == pytest.approx(2.0 * 1.5)


def test_a_recipe_that_only_compiles_is_the_compiled_baseline_and_counts_once() -> None:
    compiled = Measurement(samples_s=[4.0] * 9, baseline_samples_s=[8.0] * 9)
    found = judge.time_ratio(Report(baseline=Measurement(samples_s=[8.0] * 9), compiled_baseline=compiled, optimized=compiled))
    assert found is not None
    assert found.value == pytest.approx(2.0)


def test_fronts_and_ranks() -> None:
    fast = _candidate("fast", 4.0, memory=40)
    small = _candidate("small", 1.0, memory=10)
    between = _candidate("between", 2.0, memory=20)
    beaten = _candidate("beaten", 1.5, memory=30)
    out = _candidate("out", 9.0, memory=1, state=MISSED)
    objectives = ("latency", "memory")
    assert set(_names(judge.front_of([fast, small, between, beaten], objectives))) == {"fast", "small", "between"}
    assert _names(judge.ranked([beaten, out, small, between, fast], objectives)) == ["fast", "between", "small", "beaten"]
    assert _names(judge.ranked([beaten, out, small], ("latency",))) == ["beaten", "small"]


def test_successive_halving_promotes_the_best_third_once() -> None:
    two = [_candidate("a", 1.0), _candidate("b", 3.0)]
    assert judge.promoted(two, ("latency",), eta=3, rungs=2) is None
    three = [*two, _candidate("c", 2.0)]
    chosen = judge.promoted(three, ("latency",), eta=3, rungs=2)
    assert chosen is not None
    assert chosen.name == "b"
    went_on = [three[0], _candidate("b", 3.0, rung=1), three[2]]
    assert judge.promoted(went_on, ("latency",), eta=3, rungs=2) is None


def test_a_promotion_that_did_not_end_in_time_is_not_started_again() -> None:
    three = [_candidate("a", 1.0), _candidate("b", 3.0), _candidate("c", 2.0)]
    three[1].tried = 1
    assert judge.promoted(three, ("latency",), eta=3, rungs=2) is None


def test_the_best_hand_written_recipe_is_always_a_finalist() -> None:
    found = [_candidate(name, speed) for name, speed in (("a", 5.0), ("b", 4.0), ("c", 3.0))]
    written = _candidate("team", 2.0, origin=HAND_WRITTEN)
    assert _names(judge.finalists([*found, written], ("latency",), 3)) == ["a", "b", "team"]
    assert _names(judge.finalists(found, ("latency",), 2)) == ["a", "b"]


def test_limits_on_figures_and_on_quality() -> None:
    figures = Figures(latency_ms=12.0, tokens_per_s=80.0, peak_memory_bytes=100)
    limits = Limits(figures={"max_latency_ms": 10.0, "min_tokens_per_s": 90.0, "max_peak_memory_bytes": 100.0, "max_weight_bytes": 5.0})
    assert judge.missed(figures, QualityResult(missed=["KL of logits 0.2 is over max_kl 0.1"]), limits) == [
        "KL of logits 0.2 is over max_kl 0.1",
        "latency in ms 12 is over max_latency_ms 10",
        "tokens/s 80 is under min_tokens_per_s 90",
        "weight bytes could not be measured here, and max_weight_bytes is set",
    ]
    assert judge.missed(Figures(), None, Limits(quality={"max_kl": 0.1})) == ["KL of logits could not be measured here, and max_kl is set"]
    assert judge.missed(Figures(), None, Limits(quality={"max_kl": 0.1}), judged=False) == []


@pytest.mark.parametrize(
    ("foreseen", "ruled_out"),
    [
        (Foreseen(latency_ms=60.0, low_ms=55.0, high_ms=70.0), True),
        (Foreseen(latency_ms=60.0, low_ms=45.0, high_ms=70.0), False),
        (Foreseen(latency_ms=60.0), False),
        (Foreseen(fits=False, total_bytes=3e9, memory_bytes=2_000_000_000), True),
        (Foreseen(weight_bytes=11), True),
    ],
)
def test_the_plan_rules_out_what_cannot_win(foreseen: Foreseen, ruled_out: bool) -> None:
    best = _candidate("best", 2.0)  # 50 ms
    assert bool(judge.why_not(foreseen, best, TuneOptions(), Limits(figures={"max_weight_bytes": 10.0}))) is ruled_out


def test_a_slow_candidate_may_win_in_memory() -> None:
    slow = Foreseen(latency_ms=60.0, low_ms=55.0, high_ms=70.0)
    assert judge.why_not(slow, _candidate("best", 2.0), TuneOptions(objectives=("latency", "memory")), Limits()) == ""


def test_the_strictest_limits() -> None:
    assert judge.strictest([{"max_kl": 0.1, "min_agreement": 0.9}, {"max_kl": 0.05, "min_agreement": 0.8}]) == {
        "max_kl": 0.05,
        "min_agreement": 0.9,
    }


def test_the_final_round_names_the_fastest() -> None:
    result = {"samples_s": {"found": [1.0] * 12, "team": [2.0] * 12}, "baseline_samples_s": [4.0] * 12}
    assert {name: ratio.value for name, ratio in final.ratios(result).items()} == {"found": 4.0, "team": 2.0}
    assert final.winner(result, ["team"])[0] == "found"


def test_a_hand_written_recipe_wins_where_noise_alone_tells_them_apart() -> None:
    team = [2.0 + 0.1 * math.sin(3 * index) for index in range(24)]
    found = [2.0 + 0.1 * math.sin(3 * index + 2) - 0.01 for index in range(24)]
    result = {"samples_s": {"found": found, "team": team}, "baseline_samples_s": [4.0] * 24}
    speeds = final.ratios(result)
    assert speeds["found"].value > speeds["team"].value
    name, why = final.winner(result, ["team"])
    assert name == "team"
    assert "hand-written" in why
