"""What the engine does when a run goes wrong or a compile half works: the report says so, whatever ends the run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import QUICK, Heavy, OutOfRoom, Repeat, report_of, run_of
from torch import Tensor, nn

from optforge import artifact, engine
from optforge.artifact import write
from optforge.errors import ModelError, OutputError
from optforge.spec import Quality
from optforge.transforms.compile import Compile
from optforge.transforms.precision import Precision

APPLIED: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Noted(Repeat):
    """Remembers that it was applied for real."""

    times: int = 2

    def apply(self, model: nn.Module, ctx: Any) -> Any:
        if not ctx.planning:
            APPLIED.append(ctx.step)
        return super().apply(model, ctx)


def written(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text()))


@pytest.mark.case("B84")
def test_b84_too_little_space_is_told_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    APPLIED.clear()
    plan = engine.plan(run_of(("less", Noted()), save=True))
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match=r"needs .* but only 4\.0 KiB are free on its volume; .*save=false"):
        engine.execute(plan, folder=tmp_path)
    report = written(tmp_path)
    assert (report["status"], report["error"]["type"], report["baseline"]) == ("failed", "OutputError", None)
    assert APPLIED == []


@pytest.mark.case("B84")
def test_b84_a_volume_that_fills_while_saving_leaves_the_report_and_no_part_of_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "save_file", full)
    plan = engine.plan(run_of(("less", Repeat(times=2)), save=True))
    with pytest.raises(OutputError, match=r"artifact: cannot be written.*needs [\d,]+ bytes, [\d,]+ bytes are free"):
        engine.execute(plan, folder=tmp_path)
    assert not any("artifact" in path.name for path in tmp_path.iterdir())
    report = written(tmp_path)
    assert (report["status"], report["artifact"]) == ("failed", None)
    assert report["steps"][0]["measured"]["latency_ms"]["n"] > 0, "what was measured is kept"


@pytest.mark.case("B22")
@pytest.mark.case("B79")
def test_b22_what_cannot_be_saved_is_told_before_the_first_step(tmp_path: Path) -> None:
    APPLIED.clear()
    model = Heavy()
    model.register_buffer("graph", torch.eye(3, dtype=torch.complex128))
    plan = engine.plan(run_of(("less", Noted()), model=model, save=True))
    with pytest.raises(ModelError, match="graph"):
        engine.execute(plan, folder=tmp_path)
    assert APPLIED == []
    assert written(tmp_path)["baseline"] is None


KILLED = """\
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_engine import Repeat, run_of
from optforge import engine
from optforge.artifact import write
real = write.save_file
def die(tensors, path):
    real(tensors, path)
    os.kill(os.getpid(), signal.SIGKILL)
write.save_file = die
engine.execute(engine.plan(run_of(("less", Repeat(times=2)), save=True)), folder=Path(sys.argv[1]))
"""


@pytest.mark.case("B82")
def test_b82_a_run_killed_while_it_saves_has_an_incomplete_report_and_the_old_artifact(tmp_path: Path) -> None:
    engine.execute(engine.plan(run_of(save=True)), folder=tmp_path)
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
    report = written(tmp_path)
    assert (report["status"], report["verdict"]) == ("incomplete", "incomplete")
    assert report["steps"][0]["measured"]["latency_ms"]["n"] > 0
    assert artifact.load_into(Heavy(), tmp_path).times == 8
    engine.execute(engine.plan(run_of(save=True)), folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"artifact", "report.json", "report.md", "report.html"}


@pytest.mark.case("B108")
def test_b108_the_report_says_with_which_batch_and_peak_and_the_next_run_goes_on(tmp_path: Path) -> None:
    run = run_of(("grow", OutOfRoom()))
    run = replace(run, workload=replace(run.workload, options={"batch_size": 64}))
    report = report_of(run, tmp_path / "first")
    assert report.error["workload"] == {"batch_size": 64}
    assert report.error["memory"]["process"] > 0
    assert report_of(run_of(("less", Repeat(times=2))), tmp_path / "second").status == "complete"


class Sizes(nn.Module):
    """A layer that is called with twelve sizes in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[1](self.layers[0](x[:size])).sum(0) for size in range(2, 14)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.fixture
def eager_engine(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    """Dynamo traces and guards as always; only the code it makes is PyTorch's own, so that a compile takes no time."""
    from optforge import compiling

    real = compiling._arguments
    monkeypatch.setattr(
        compiling,
        "_arguments",
        lambda options, more: {**real(replace(options, mode="default", options={}), {}), "backend": "eager", "mode": None},
    )


@pytest.mark.case("B90")
def test_b90_the_report_says_that_the_limit_was_hit_and_with_which_sizes(eager_engine: None, tmp_path: Path) -> None:
    report = report_of(run_of(("compile", Compile(dynamic=False)), model=Sizes()), tmp_path)
    (step,) = report.steps
    assert step.measured.recompile_limit_hit and step.measured.compiles == 8
    assert list(step.measured.sizes_seen.values()) == [[2, 3, 4, 5, 6, 7, 8, 9, 10]]
    (warning,) = [line for line in report.warnings if "recompile limit" in line]
    assert warning.startswith("compiled baseline: ") and "2, 3, 4, 5, 6, 7, 8, 9, 10" in warning
    assert warning in written(tmp_path)["warnings"]
    assert warning in (tmp_path / "report.md").read_text()


@pytest.mark.case("B90")
def test_b90_the_default_takes_few_compiles_and_warns_of_nothing(eager_engine: None) -> None:
    report = report_of(run_of(("compile", Compile()), model=Sizes()))
    assert report.steps[0].measured.compiles <= 3
    assert not any("recompile limit" in line for line in report.warnings)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.sum().item() > 0:
            return x + 1
        return x - 1


@pytest.mark.case("B91")
def test_b91_the_report_counts_graphs_and_breaks_and_says_where(eager_engine: None, tmp_path: Path) -> None:
    report_of(run_of(("compile", Compile()), model=Branches()), tmp_path)
    measured = written(tmp_path)["steps"][0]["measured"]
    assert (measured["compiles"], measured["graph_breaks"]) == (2, 1)
    (reason,) = measured["graph_break_reasons"]
    assert "test_engine_failures.py:" in reason


def test_a_compile_step_without_gain_is_dropped_and_the_plan_stays_as_it_was(eager_engine: None) -> None:
    run = run_of(("less", Repeat(times=2)), ("compile", Compile()), keep_compile="if_faster")
    plan = engine.plan(run)
    outcome = engine.run(plan)
    compiled = outcome.report.steps[0]
    if compiled.verdict == "ok":
        pytest.skip("noise made the eager engine faster than no compile at all")
    assert compiled.kept is False
    assert any(line.startswith("step compile was dropped (keep: if_faster)") for line in outcome.report.warnings)
    assert outcome.report.compiled_baseline is None and outcome.report.optimized is outcome.report.steps[1].measured
    assert [step.name for step in plan.steps] == ["less", "compile"]
    assert outcome.module._compiled_call_impl is None


def test_leave_one_out_covers_the_compile_step(eager_engine: None) -> None:
    run = run_of(("less", Repeat(times=2)), ("compile", Compile()), measure=replace(QUICK, attribution="leave_one_out"))
    compiled, less = report_of(run).steps
    assert less.without.low < less.without.value < less.without.high
    assert compiled.without.low < compiled.without.value < compiled.without.high
    assert compiled.without.value != compiled.vs_baseline.value, "measured under the whole recipe, not on the model as loaded"


class OnlyWhenTraced(Heavy):
    """Gives NaN under the compiler alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * float("nan") if torch.compiler.is_compiling() else y


def test_a_compiled_row_that_gives_nan_is_warned_of(eager_engine: None) -> None:
    report = report_of(run_of(("compile", Compile()), model=OnlyWhenTraced(), quality=Quality(enabled=False)))
    assert any("the compiled output differs from the uncompiled one" in line for line in report.warnings)


@pytest.mark.case("B68")
@pytest.mark.case("B71")
def test_b68_the_written_order_of_compile_does_not_change_the_artifact(eager_engine: None, tmp_path: Path) -> None:
    steps = [("compile", Compile()), ("cast", Precision())]
    for name, ordered in (("first", steps), ("last", steps[::-1])):
        report = report_of(run_of(*ordered, save=True), tmp_path / name)
        assert [step["name"] for step in report.plan["order"]] == ["cast", "compile"]
    first, last = (json.loads((tmp_path / name / "artifact/artifact.json").read_text()) for name in ("first", "last"))
    assert first["files"]["model.safetensors"]["sha256"] == last["files"]["model.safetensors"]["sha256"]
