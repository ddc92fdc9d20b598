"""Times two calls against each other, and says how sure the difference is.

A machine drifts: clocks rise and fall, neighbours come and go. Two rows that are timed one after the other differ by
that drift as much as by what was changed. So the baseline and the candidate run in turns, each round gives one ratio,
and the drift that both share cancels in it. The median of those ratios is reported with a 95% interval, and a verdict
is passed on the interval, never on the median alone.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from optforge.backends.base import Candidate
from optforge.distributed.world import agree
from optforge.spec import Measure, Measurement, Ratio

GAIN, LOSS = 1.02, 0.98
"""A ratio whose whole interval lies above GAIN is a gain, below LOSS a regression."""
RESAMPLES = 2000
LEAST_ROUNDS = 3
"""Rounds below which a median has no interval at all; run even where `min_rounds` is less. A verdict wants 8 or more."""
CHECK_EVERY = 4
"""Rounds between two looks at the interval; each look costs a bootstrap."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Seconds of one call, a sample per round; the two lists are paired by round (the baseline's is empty without one)."""

    samples_s: list[float]
    baseline_samples_s: list[float]
    steady: bool


def time_rounds(candidate: Candidate, baseline: Candidate | None, *, synchronize: Callable[[], None], options: Measure) -> Samples:
    """Times `candidate` in rounds that alternate with `baseline`.

    Within a round the order is swapped each time (A B, B A, ...), so that a steady drift hits both alike. Calls
    shorter than `options.batch_ms` are run several at a time and a sample is their mean; otherwise the clock and the
    wait for the device would weigh in. `synchronize` is called before each clock read: without it an asynchronous
    device is timed at its launches. Rounds go on until the interval is within `options.steady` of the median, or
    until `options.max_s` seconds; `options.min_rounds` (at least 3) are always run. Collecting garbage is left for between
    rows.
    """
    candidates = [candidate] if baseline is None else [candidate, baseline]
    samples, steady = time_together(candidates, synchronize=synchronize, options=options)
    return Samples(samples_s=samples[0], baseline_samples_s=samples[1] if len(samples) > 1 else [], steady=steady)


def time_together(candidates: Sequence[Candidate], *, synchronize: Callable[[], None], options: Measure) -> tuple[list[list[float]], bool]:
    """Times several calls in the same rounds, each round forwards or backwards in turn; see `time_rounds`.

    Returns each candidate's samples in seconds, paired by round, and whether all are steady: each one's ratio to the
    last, or the median of a single one.
    """
    runners = [_Runner(candidate, synchronize) for candidate in candidates]
    for runner in runners:
        runner.warm_up(options)
    least = max(options.min_rounds, LEAST_ROUNDS)
    begun = time.perf_counter()
    steady = False
    rounds = 0
    with no_collection():
        while rounds < least or not agree(steady or time.perf_counter() - begun >= options.max_s):
            for runner in runners if rounds % 2 == 0 else reversed(runners):
                runner.sample()
            rounds += 1
            if rounds >= least and (rounds - least) % CHECK_EVERY == 0:
                steady = _steady([runner.samples for runner in runners], options.steady)
    return [runner.samples for runner in runners], steady


class _Runner:
    """One call, how many of it make a sample, and the samples so far."""

    def __init__(self, candidate: Candidate, synchronize: Callable[[], None]) -> None:
        self.call, self.synchronize = candidate.call, synchronize
        self.calls = 1
        self.samples: list[float] = []

    def warm_up(self, options: Measure) -> None:
        """Runs the call untimed, then finds how many calls fill `batch_ms`."""
        for _ in range(options.warmup):
            self.call()
        batch_s = options.batch_ms / 1e3
        # doubling, since one short call reads as mostly clock and synchronization
        while (seconds := agree(self._seconds())) < batch_s:
            self.calls = min(2 * self.calls, math.ceil(1.1 * self.calls * batch_s / max(seconds, 1e-9)))

    def _seconds(self) -> float:
        """Wall time of `calls` calls, from an idle device to an idle device."""
        self.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(self.calls):
            self.call()
        self.synchronize()
        return (time.perf_counter_ns() - begin) / 1e9

    def sample(self) -> None:
        self.samples.append(self._seconds() / self.calls)


@contextmanager
def no_collection(*, first: bool = True) -> Iterator[None]:
    """Keeps the garbage collector out: one pass over a large model's objects takes longer than many calls. `first`: it runs once
    before."""
    enabled = gc.isenabled()
    if first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _steady(samples: list[list[float]], within: float) -> bool:
    """Whether half the 95% interval of each one's ratio to the last (of the median of a single one) is within a fraction."""
    *others, last = (np.asarray(one) for one in samples)
    return all(_narrow(last / other, within) for other in others) if others else _narrow(last, within)


def _narrow(values: NDArray[np.float64], within: float) -> bool:
    low, high = np.quantile(_medians(values, seed=0, resamples=500), _tails(len(values)))
    return bool((high - low) / 2 <= within * np.median(values))


def _medians(values: NDArray[np.float64], seed: int, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """Medians of `resamples` draws with replacement from `values`, shape [resamples]."""
    draws = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    return np.asarray(np.median(values[draws], axis=1))


def ratio(samples_s: Sequence[float], baseline_samples_s: Sequence[float], *, seed: int = 0, unit: str = "latency") -> Ratio:
    """How many times faster the samples are than the baseline's from the same rounds.

    The value is the median of baseline/candidate per round. Its 95% interval comes from the percentile bootstrap over
    rounds, with tails widened for few rounds (see `_tails`); it is the same for the same seed.

    Raises:
        ValueError: there are no rounds, or the two do not pair.
    """
    if not samples_s or len(samples_s) != len(baseline_samples_s):
        raise ValueError(f"ratio needs paired rounds, got {len(samples_s)} samples and {len(baseline_samples_s)} of the baseline")
    values = np.asarray(baseline_samples_s, dtype=np.float64) / np.asarray(samples_s, dtype=np.float64)
    return _interval(float(np.median(values)), _medians(values, seed), len(values), unit)


def compare(a: Measurement, b: Measurement, *, seed: int = 0) -> Ratio:
    """How many times faster `b` is than `a`, when each was timed in rounds of its own.

    Where both carry samples of one baseline, each is first divided by it, so that the drift between the two sets of
    rounds cancels. Where one does not (the baseline does not fit the device), the medians are divided as they are, and
    drift stays in the value. The two bootstraps are independent in either case.

    Raises:
        ValueError: one of them has no samples.
    """
    if not a.samples_s or not b.samples_s:
        raise ValueError("compare needs samples of both rows")
    own_a, own_b = np.asarray(a.samples_s), np.asarray(b.samples_s)
    if a.baseline_samples_s and b.baseline_samples_s:
        over, under = np.asarray(b.baseline_samples_s) / own_b, np.asarray(a.baseline_samples_s) / own_a
    else:
        over, under = own_a, own_b
    value = float(np.median(over) / np.median(under))
    return _interval(value, _medians(over, seed) / _medians(under, seed + 1), min(len(over), len(under)), "latency")


def _interval(value: float, resampled: NDArray[np.float64], rounds: int, unit: str) -> Ratio:
    low, high = np.quantile(resampled, _tails(rounds))
    return Ratio(value=value, low=float(low), high=float(high), unit=unit)


def _tails(count: int) -> tuple[float, float]:
    """The two quantiles of a bootstrap over `count` samples that make a 95% interval.

    The plain 2.5% and 97.5% are too narrow for few samples (8 rounds of heavy-tailed noise: they hold the truth 89
    times in 100). Hesterberg's expanded percentile interval (What Teachers Should Know About the Bootstrap, The American
    Statistician 69, 2015, section 4.6) puts the tails where Student's t with the spread's n/(n-1) would.
    """
    z, freedom = NormalDist().inv_cdf(0.975), max(count - 1, 1)
    # Student's quantile as the normal one's expansion in 1/freedom (Abramowitz and Stegun, 26.7.5)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    tail = NormalDist().cdf(-t * math.sqrt(1 + 1 / freedom))
    return tail, 1 - tail


def verdict(ratio: Ratio) -> str:
    """`ok` when the whole interval lies above 1.02, `regression` when it lies below 0.98, else `no_gain`."""
    if ratio.low > GAIN:
        return "ok"
    return "regression" if ratio.high < LOSS else "no_gain"


def summary(samples_s: Sequence[float]) -> dict[str, float | int | None]:
    """`p50`, `p90`, `mean`, `stdev` in milliseconds and the count `n`; stdev is None for a single sample.

    Raises:
        ValueError: there are no samples.
    """
    if not samples_s:
        raise ValueError("summary needs at least one sample")
    values = 1e3 * np.asarray(samples_s, dtype=np.float64)
    p50, p90 = np.quantile(values, (0.5, 0.9))
    return {
        "p50": float(p50),
        "p90": float(p90),
        "mean": float(values.mean()),
        "stdev": float(values.std(ddof=1)) if len(values) > 1 else None,
        "n": len(values),
    }
