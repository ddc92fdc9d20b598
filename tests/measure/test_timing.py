"""Timing in alternating rounds, and the statistics on it, against hand arithmetic and synthetic noise."""

from __future__ import annotations

import gc
import math
import time

import numpy as np
import pytest
import torch
from torch import nn

from optforge.backends.base import Candidate
from optforge.measure import timing
from optforge.spec import Measure, Measurement, Ratio

QUICK = Measure(warmup=1, min_rounds=4, max_s=0.2, batch_ms=0.0)


class FakeDevice:
    """Work returns at once and finishes 20 ms later; only `synchronize` waits for it."""

    LATENCY_S = 0.02

    def __init__(self) -> None:
        self.done_at = 0.0
        self.log: list[str] = []

    def run(self) -> None:
        self.log.append("run")
        self.done_at = max(self.done_at, time.perf_counter()) + self.LATENCY_S

    def synchronize(self) -> None:
        self.log.append("sync")
        time.sleep(max(0.0, self.done_at - time.perf_counter()))


@pytest.mark.case("B97")
def test_b97_asynchronous_work_is_timed_to_its_end() -> None:
    device = FakeDevice()
    samples = timing.time_rounds(Candidate(name="a", call=device.run), None, synchronize=device.synchronize, options=QUICK)
    assert min(samples.samples_s) >= device.LATENCY_S


@pytest.mark.case("B97")
def test_b97_the_device_is_idle_before_each_start_and_before_each_stop() -> None:
    device = FakeDevice()
    timing.time_rounds(Candidate(name="a", call=device.run), None, synchronize=device.synchronize, options=QUICK)
    timed = device.log[QUICK.warmup :]
    assert timed == ["sync", "run", "sync"] * (len(timed) // 3)


def test_rounds_alternate_and_swap_their_order() -> None:
    order: list[str] = []
    a = Candidate(name="a", call=lambda: order.append("a"))
    b = Candidate(name="b", call=lambda: order.append("b"))
    options = Measure(warmup=0, min_rounds=4, max_s=0.0, batch_ms=0.0)
    samples = timing.time_rounds(a, b, synchronize=lambda: None, options=options)
    # one probe call each finds how many calls fill a batch; then A B, B A, A B, B A
    assert "".join(order) == "ab" + "abbaabba"
    assert len(samples.samples_s) == len(samples.baseline_samples_s) == 4


def test_short_calls_are_batched_and_a_sample_is_one_call() -> None:
    calls = 0

    def nap() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.001)

    options = Measure(warmup=1, min_rounds=3, max_s=0.0, batch_ms=10.0)
    samples = timing.time_rounds(Candidate(name="nap", call=nap), None, synchronize=lambda: None, options=options)
    assert calls > 3 * 5, "3 rounds of at least 10 ms hold many calls of about 1 ms"
    assert all(0.001 <= sample < 0.005 for sample in samples.samples_s)


def test_no_garbage_is_collected_between_clock_reads_and_collection_comes_back() -> None:
    states = []
    assert gc.isenabled()
    timing.time_rounds(Candidate(name="a", call=lambda: states.append(gc.isenabled())), None, synchronize=lambda: None, options=QUICK)
    assert gc.isenabled()
    assert not any(states[-QUICK.min_rounds :])


def test_a_noisy_row_stops_at_its_limit_and_says_so() -> None:
    rng = np.random.default_rng(0)
    call = Candidate(name="noisy", call=lambda: time.sleep(float(rng.uniform(0.0005, 0.01))))
    options = Measure(warmup=0, min_rounds=4, max_s=0.3, batch_ms=0.0, steady=0.001)
    begin = time.perf_counter()
    samples = timing.time_rounds(call, None, synchronize=lambda: None, options=options)
    assert not samples.steady
    assert 0.3 <= time.perf_counter() - begin < 1.5


def test_a_steady_row_stops_early() -> None:
    options = Measure(warmup=0, min_rounds=4, max_s=30.0, batch_ms=0.0, steady=0.2)
    begin = time.perf_counter()
    samples = timing.time_rounds(Candidate(name="a", call=lambda: time.sleep(0.01)), None, synchronize=lambda: None, options=options)
    assert samples.steady
    assert time.perf_counter() - begin < 5


def test_ratio_is_the_median_of_the_rounds_ratios_by_hand() -> None:
    # per round 2, 3, 4: the median is 3; the ratio of the medians would be 6 / 3 = 2
    found = timing.ratio([3.0, 3.0, 1.0], [6.0, 9.0, 4.0])
    assert found.value == 3.0
    assert 2.0 <= found.low <= found.value <= found.high <= 4.0


def test_ratio_without_noise_has_no_width() -> None:
    assert timing.ratio([0.5] * 8, [1.0] * 8) == Ratio(value=2.0, low=2.0, high=2.0)


def test_ratio_is_the_same_each_time() -> None:
    rng = np.random.default_rng(1)
    own, base = rng.uniform(1, 2, 20).tolist(), rng.uniform(1, 2, 20).tolist()
    assert timing.ratio(own, base) == timing.ratio(own, base)


@pytest.mark.parametrize(("own", "base"), [([], []), ([1.0], [1.0, 2.0])])
def test_ratio_refuses_rounds_that_do_not_pair(own: list[float], base: list[float]) -> None:
    with pytest.raises(ValueError, match="paired rounds"):
        timing.ratio(own, base)


@pytest.mark.parametrize("rounds", [8, 25])
def test_the_interval_covers_the_truth_about_95_times_in_100(rounds: int) -> None:
    rng = np.random.default_rng(7)
    hits = 0
    trials = 300
    for _ in range(trials):
        # heavy-tailed noise, as timings have; the median of base/own is 1.25 by symmetry on the logarithm
        own = np.exp(0.05 * rng.standard_t(4, rounds))
        base = 1.25 * np.exp(0.05 * rng.standard_t(4, rounds))
        found = timing.ratio(own.tolist(), base.tolist())
        hits += found.low <= 1.25 <= found.high
    assert 0.90 <= hits / trials <= 0.995


def test_a_drift_that_both_share_cancels() -> None:
    drift = np.linspace(1.0, 3.0, 20)
    found = timing.ratio((0.5 * drift).tolist(), drift.tolist())
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def measured(own: list[float], base: list[float]) -> Measurement:
    return Measurement(samples_s=own, baseline_samples_s=base)


def test_compare_divides_both_by_the_baseline_of_their_own_rounds() -> None:
    # the machine was half as fast while b was timed: raw medians say b is slower, the shared baseline says 1.5 times faster
    a = measured([1.0] * 6, [2.0] * 6)
    b = measured([4.0 / 3.0] * 6, [4.0] * 6)
    found = timing.compare(a, b)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_compare_without_a_baseline_takes_the_medians() -> None:
    assert timing.compare(measured([3.0] * 5, []), measured([2.0] * 4, [])).value == pytest.approx(1.5)


def test_compare_is_wider_than_either_ratio() -> None:
    rng = np.random.default_rng(3)

    def noisy() -> list[float]:
        return np.exp(0.05 * rng.standard_normal(12)).tolist()

    a, b = measured(noisy(), noisy()), measured(noisy(), noisy())
    widths = [math.log(r.high / r.low) for r in (timing.ratio(m.samples_s, m.baseline_samples_s) for m in (a, b))]
    both = timing.compare(a, b)
    assert math.log(both.high / both.low) > max(widths)


@pytest.mark.case("B45")
@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1.021, 1.3, "ok"), (1.02, 1.3, "no_gain"), (0.9, 1.1, "no_gain"), (0.5, 0.98, "no_gain"), (0.5, 0.979, "regression")],
)
def test_b45_the_verdict_is_passed_on_the_interval(low: float, high: float, word: str) -> None:
    assert timing.verdict(Ratio(value=(low + high) / 2, low=low, high=high)) == word


@pytest.mark.case("B45")
def test_b45_latency_after_above_latency_before_is_a_regression() -> None:
    rng = np.random.default_rng(5)
    before = 10e-3 * np.exp(0.01 * rng.standard_normal(12))
    after = 21e-3 * np.exp(0.01 * rng.standard_normal(12))
    found = timing.ratio(after.tolist(), before.tolist())
    assert found.value == pytest.approx(10 / 21, rel=0.02)
    assert timing.verdict(found) == "regression"


class SlowInt8Linear(nn.Module):
    """Dynamic int8 as it should not be done: the weight is dequantized and the activations quantized in every call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = (linear.weight.detach() / self.scale).round().to(torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_scale = x.abs().amax(-1, keepdim=True) / 127
        quantized = (x / x_scale).round().clamp(-127, 127) * x_scale
        return quantized @ (self.weight.float() * self.scale).t()


@pytest.mark.case("B104")
def test_b104_int8_that_is_slower_is_a_regression() -> None:
    linear = nn.Linear(64, 64, bias=False)
    slow, x = SlowInt8Linear(linear), torch.randn(1, 64)
    with torch.no_grad():
        assert (slow(x) - linear(x)).norm() < 0.02 * linear(x).norm(), "it computes the same product"
        samples = timing.time_rounds(
            Candidate(name="int8", call=lambda: slow(x)),
            Candidate(name="fp32", call=lambda: linear(x)),
            synchronize=lambda: None,
            options=Measure(warmup=3, min_rounds=12, max_s=0.5, batch_ms=5.0),
        )
    found = timing.ratio(samples.samples_s, samples.baseline_samples_s)
    assert found.high < 0.98
    assert timing.verdict(found) == "regression"


def test_summary_by_hand() -> None:
    # 1..5 ms: median 3, p90 by linear interpolation at position 0.9 * 4 = 3.6 -> 4.6, variance (4+1+0+1+4)/4
    found = timing.summary([0.001, 0.002, 0.003, 0.004, 0.005])
    assert found == pytest.approx({"p50": 3.0, "p90": 4.6, "mean": 3.0, "stdev": math.sqrt(2.5), "n": 5})


def test_summary_of_one_sample_has_no_spread() -> None:
    assert timing.summary([0.002])["stdev"] is None


def test_summary_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        timing.summary([])
