"""Two versions in one session: how many pairs are run."""

from __future__ import annotations

from optforge.gate import ab, judge, limits
from optforge.gate import statistics as estimates


def _pairs(ratios: list[float]) -> int:
    """Pairs that are run until `<= +1%` is decided, of five at first."""
    limit = limits.parse("latency_ms.p50 <= +1%")

    def decided(found: list[float]) -> bool:
        return judge.hold(limit, estimates.of_pairs(found)).verdict != judge.UNDECIDED

    return len(ab.until_decided(ratios.__getitem__, 5, decided))


def test_pairs_go_on_while_a_limit_is_undecided_and_end_at_twice_as_many() -> None:
    steady = [1.03, 1.031, 1.029, 1.03, 1.03]
    assert _pairs([*steady, *steady]) == 5
    assert _pairs([1.03, 1.0, 1.06, 1.01, 1.05, *steady]) in range(6, 10)
    assert _pairs([1.0, 1.02] * 5) == 10


def test_more_pairs_are_wanted_only_where_they_could_tell() -> None:
    def judged(*verdicts: str) -> judge.Judgement:
        findings = [judge.Finding(limit="latency_ms.p50 <= +1%", verdict=verdict, found="") for verdict in verdicts]
        return judge.Judgement(title="gate --ab", findings=findings)

    assert ab._undecided(judged(judge.PASSED, judge.UNDECIDED))
    assert not ab._undecided(judged(judge.PASSED)), "all is decided"
    assert not ab._undecided(judged(judge.MISSED, judge.UNDECIDED)), "the gate fails whatever the others say"
