"""`optforge kernels`, as far as a machine without a GPU goes."""

from __future__ import annotations

import json

import pytest

from optforge.cli import kernels
from optforge.errors import ConfigError, MissingDependency
from optforge.kernels import checking
from optforge.kernels.configurations import SHIPPED


def test_the_list_has_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.list_command(as_json=True) == 0
    assert [row["operator"] for row in json.loads(capsys.readouterr().out)] == list(checking.OPERATORS)


def test_an_unknown_operator_is_told_with_near_names() -> None:
    with pytest.raises(ConfigError, match="did you mean argmax"):
        kernels.check_command(["argmx"], as_json=False)


def test_a_wrong_kernel_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"operator": "argmax", "label": "3 x 5", "error": float("inf"), "worst": 0.0, "passed": False}
    monkeypatch.setattr(checking, "check", lambda names: ("here", [row]))
    assert kernels.check_command(["argmax"], as_json=False) == 1
    assert "wrong: argmax: 3 x 5" in capsys.readouterr().out


@pytest.mark.case("B100")
def test_b100_nothing_is_timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MissingDependency, match="nothing is timed under an interpreter"):
        kernels.bench_command([], rows=1, context=512)
    with pytest.raises(MissingDependency, match="no GPU"):
        kernels.tune_command([], rows=1, context=512, budget_s=1)


def test_what_is_shipped_says_that_nobody_measured_it() -> None:
    arches = json.loads(SHIPPED.read_text(encoding="utf-8"))["arches"]
    assert set(arches) == {"sm_90"} and all(entry["untuned"] is True for entry in arches["sm_90"].values())
