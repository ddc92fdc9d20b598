"""Whole runs of a module small enough for seconds: folders, exit codes, what is left behind when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from commandline import Optforge, command, environment

MODULE = """\
import time
import torch
from torch import nn

def build(broken=False, slow=False):
    if torch.empty(0).device.type != "meta":
        if slow:
            time.sleep(60)
        if broken:
            raise RuntimeError("this factory is broken")
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), torch.zeros(4, 32)
"""
EAGER = "name: eager\ndescription: A cast\ngoal: latency\nsteps:\n  cast: {use: precision/bf16}\n"
TINY = ("hardware=cpu", "model=module", "model.factory=tiny_module:build", "workload=forward", "data=inputs", "measure.max_s=0.5")


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Overrides of a run that takes no time but that of importing torch."""
    (tmp_path / "tiny_module.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "eager.yaml").write_text(EAGER, encoding="utf-8")
    return ["recipe=./eager.yaml", *TINY]


def _on_a100(overrides: list[str]) -> list[str]:
    return [text.replace("hardware=cpu", "hardware=a100") for text in overrides]


def _folders(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "outputs").rglob("report.json"))


def _report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text(encoding="utf-8")))


def test_a_run_leaves_its_folder_and_says_where(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("run", *tiny, "--verbose")
    assert done.returncode == 0, done.stderr
    (folder,) = _folders(tmp_path)
    assert folder.parent == tmp_path / "outputs/eager/cpu"
    assert {"run.yaml", "plan.md", "environment.json", "report.json", "report.md", "report.html", "optforge.log", ".hydra"} <= {
        path.name for path in folder.iterdir()
    }
    report = _report(folder)
    assert report["status"] == "complete"
    assert report["command"].split()[:3] == ["optforge", "run", "recipe=./eager.yaml"]
    assert str(folder) in done.stdout.replace("\n", "")


@pytest.mark.slow
def test_run_yaml_repeats_the_run_from_elsewhere(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    assert optforge("run", *tiny, "hydra.run.dir=first").returncode == 0
    (tmp_path / "eager.yaml").unlink()
    done = optforge("run", "--config", "first/run.yaml", "hydra.run.dir=second", "trust=true")
    assert done.returncode == 0, done.stderr
    first, second = (_report(tmp_path / name) for name in ("first", "second"))
    for key in ("recipe", "target", "model", "workload", "data"):
        assert {**second[key], "source": ""} == {**first[key], "source": ""}
    assert [step["use"] for step in second["steps"]] == [step["use"] for step in first["steps"]]


def test_a_limit_that_is_missed_is_exit_code_3(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("run", *_on_a100(tiny), "fail_on=[stand_in]")
    assert done.returncode == 3, done.stderr
    report = _report(_folders(tmp_path)[0])
    assert (report["status"], report["device"]["is_target"]) == ("complete", False)


def test_a_crash_is_one_line_and_a_log(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("run", *tiny, "model.arguments={broken: true}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (folder,) = _folders(tmp_path)
    lines = done.stderr.splitlines()
    assert "error: RuntimeError: this factory is broken" in lines
    assert lines[-1] == f"details: {folder}/optforge.log"
    assert "in build" in (folder / "optforge.log").read_text(encoding="utf-8")
    assert _report(folder)["status"] == "failed"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_an_incomplete_report(tiny: list[str], tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        command("run", *tiny, "model.arguments={slow: true}"), cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not _folders(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1.0)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert _report(_folders(tmp_path)[0])["status"] == "incomplete"


def test_a_plan_that_refuses_is_exit_code_2_and_is_recorded(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("run", *_on_a100(tiny), "require_target=true")
    assert done.returncode == 2, done.stderr
    assert "a100" in done.stderr
    (folder,) = _folders(tmp_path)
    assert _report(folder)["status"] == "failed"
    assert _report(folder)["baseline"] is None


@pytest.mark.case("B92")
def test_b92_no_compiler_is_told_before_anything_is_loaded(optforge: Optforge, tiny: list[str], recipe: str) -> None:
    """The factory would fail if it were asked for weights."""
    done = optforge("run", recipe, *tiny[1:], "model.arguments={broken: true}", CXX="/nonexistent", PATH="")
    assert done.returncode == 2, done.stderr
    assert "compile needs a C++ compiler (looked for CXX=/nonexistent)" in done.stderr
    assert "broken" not in done.stderr


@pytest.mark.case("B92")
def test_b92_on_missing_skip_runs_uncompiled_and_says_so(optforge: Optforge, tiny: list[str], recipe: str, tmp_path: Path) -> None:
    done = optforge("run", recipe, *tiny[1:], "steps.compile.on_missing=skip", CXX="/nonexistent", PATH="")
    assert done.returncode == 0, done.stderr
    report = _report(_folders(tmp_path)[0])
    assert any("compile was left out" in warning for warning in report["warnings"])
    assert report["compiled_baseline"] is None


@pytest.mark.case("B89")
def test_b89_a_run_without_writable_caches_uses_its_own(optforge: Optforge, tiny: list[str], recipe: str, tmp_path: Path) -> None:
    nowhere = {"HOME": "/proc/nobody", "TRITON_CACHE_DIR": "/proc/x", "TORCHINDUCTOR_CACHE_DIR": "/proc/y"}
    done = optforge("run", recipe, *tiny[1:], "hydra.run.dir=out", **nowhere)
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / "out/.cache/torchinductor").iterdir())
    assert any("/proc/y" in warning for warning in _report(tmp_path / "out")["warnings"])


@pytest.mark.slow
@pytest.mark.case("B143")
def test_b143_four_runs_at_once_leave_four_reports(tiny: list[str], tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            command("run", *tiny), cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(4)
    ]
    assert [process.wait(timeout=280) for process in processes] == [0, 0, 0, 0]
    assert len(_folders(tmp_path)) == 4
    assert os.listdir(tmp_path / "outputs/eager") == ["cpu"]
