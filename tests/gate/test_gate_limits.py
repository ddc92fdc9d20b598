"""What is written as a limit, what it means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from optforge.errors import ConfigError
from optforge.gate import limits
from optforge.gate.limits import ABSOLUTE, DIFFERENCE, RELATIVE


@pytest.mark.parametrize(
    ("text", "path", "upper", "bound", "kind"),
    [
        ("latency_ms.p50 <= +3%", "latency_ms.p50", True, 0.03, RELATIVE),
        ("latency_ms.p50<=+3%", "latency_ms.p50", True, 0.03, RELATIVE),
        ("tokens_per_s >= -2.5 %", "tokens_per_s", False, -0.025, RELATIVE),
        ("quality.kl <= +0.01", "quality.kl", True, 0.01, DIFFERENCE),
        ("quality.top1 >= -.005", "quality.top1", False, -0.005, DIFFERENCE),
        ("peak_memory_bytes <= 2e9", "peak_memory_bytes", True, 2e9, ABSOLUTE),
        ("quality.perplexity_increase <= 3%", "quality.perplexity_increase", True, 0.03, ABSOLUTE),
        ("speedup.vs_compiled_baseline >= 1.2", "speedup.vs_compiled_baseline", False, 1.2, ABSOLUTE),
    ],
)
def test_a_limit_means_what_it_says(text: str, path: str, upper: bool, bound: float, kind: str) -> None:
    limit = limits.parse(text)
    assert (limit.path, limit.upper, limit.kind) == (path, upper, kind)
    assert limit.bound == pytest.approx(bound)


@pytest.mark.parametrize(
    "text",
    ["", "latency_ms.p50", "latency_ms.p50 < 3", "latency_ms.p50 <= 3 ms", "<= 3%", "a.b <= nan", "a <= 1e999", "a <= ++3%", "a b <= 3"],
)
def test_what_is_no_limit_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        limits.parse(text)
    (problem,) = caught.value.problems
    assert repr(text) in problem.what and limits.EXAMPLE in problem.fix


def test_a_file_and_the_command_line_add_up(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("limits:\n  - latency_ms.p50 <= +3%\n  - quality.kl <= +0.01\nrun_to_run: 1.5%\nrequire_target: false\n")
    rules = limits.rules(file, ["weight_bytes <= +0%"])
    assert [limit.text for limit in rules.limits] == ["latency_ms.p50 <= +3%", "quality.kl <= +0.01", "weight_bytes <= +0%"]
    assert rules.run_to_run == pytest.approx(0.015)
    assert not rules.require_target
    assert limits.rules(None, ["a <= 1"]).require_target


def test_everything_wrong_with_a_file_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("limits: [a <= 1, nonsense]\nlimit: []\nrun_to_run: 7\nrequire_target: maybe\n")
    with pytest.raises(ConfigError) as caught:
        limits.rules(file, ["a <= 1", "b"])
    told = "\n".join(map(str, caught.value.problems))
    for part in ("'nonsense' is no limit", "limit: unknown key; did you mean limits?", "run_to_run: must be", "require_target: must be"):
        assert part in told
    assert "'a <= 1' stands there twice" in told and "--limit: 'b' is no limit" in told


def test_no_limit_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no limit to hold; give --limits FILE, or --limit 'latency_ms\.p50 <= "):
        limits.rules(None, [])
