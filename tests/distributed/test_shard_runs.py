"""`optforge run` of recipes with a shard step, from the command line to the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
RECIPE = """
name: spread
description: a test
goal: throughput
steps:
  shard: {use: shard/mesh, %s}
%s
"""


def run(
    folder: Path,
    degrees: str,
    *words: str,
    more: str = "",
    factory: str = "tiny",
    workload: str = "forward",
    env: dict[str, str] | None = None,
    start: tuple[str, ...] = (),
) -> Any:
    (folder / "spread.yaml").write_text(RECIPE % (degrees, more))
    command = [sys.executable, *start, "-m", "optforge", "run", "recipe=./spread.yaml", "hardware=cpu", f"hydra.run.dir={folder / 'out'}"]
    command += ["model=module", f"model.factory=shard_models:{factory}", "data=inputs", "model.dtype=fp32"]
    command += [f"workload={workload}", "measure.max_s=0.3", *words]
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=200, check=False, env=variables)


def report(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    return values


@pytest.mark.slow
def test_a_compiled_run_over_two_devices_has_one_folder_one_report_and_the_baselines_outputs(tmp_path: Path) -> None:
    more = "  compile: {use: compile/inductor}"
    done = run(tmp_path, "tensor: 2, fsdp: 1", "hardware.devices=2", more=more)
    assert done.returncode == 0, done.stderr
    found = report(tmp_path)
    assert (found["status"], found["reason"].count("baseline")) == ("complete", 1)
    shard = next(step for step in found["steps"] if step["name"] == "shard")
    assert shard["quality"]["relative_error"] < 1e-5
    assert (shard["measured"]["devices"], shard["measured"]["batches"]) == (2, 1)
    assert shard["measured"]["weight_bytes"] < 0.6 * found["baseline"]["weight_bytes"]
    assert not [warning for warning in found["warnings"] if "differs" in warning]
    assert sorted(path.name for path in (tmp_path / "out" / "ranks" / "0").iterdir()) == ["0", "1"]
    assert not list((tmp_path / "out" / "ranks").glob("*.pickle"))


@pytest.mark.slow
def test_a_training_over_two_devices_has_the_losses_of_one(tmp_path: Path) -> None:
    done = run(tmp_path, "fsdp: 2, tensor: 1", "workload.steps=6", "workload.learning_rate=1e-3", factory="learner", workload="train")
    assert done.returncode == 0, done.stderr
    found = report(tmp_path)
    (step,) = found["steps"]
    training = step["quality"]["training"]
    assert training["own"]["losses"] == pytest.approx(training["baseline"]["losses"], rel=1e-5)
    assert len(training["own"]["losses"]) == 6 and training["own"]["losses"][-1] < training["own"]["losses"][0]
    parts, whole = step["measured"]["memory_parts"], found["baseline"]["memory_parts"]
    assert parts["optimizer"] < 0.6 * whole["optimizer"] and parts["weights"] < 0.6 * whole["weights"]


@pytest.mark.slow
@pytest.mark.case("B108")
def test_b108_a_rank_without_memory_is_told_as_that(tmp_path: Path) -> None:
    done = run(tmp_path, "tensor: 2, fsdp: 1", factory="hungry")
    assert done.returncode == 1
    found = report(tmp_path)
    assert (found["status"], found["verdict"]) == ("oom", "oom")
    assert "rank 1 of 2" in found["reason"] and "no room for 40 GB" in found["error"]["message"]


@pytest.mark.slow
def test_what_another_job_left_over_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "tensor: 2, fsdp: 1", env={"WORLD_SIZE": "4"})
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(lines) == 1
    assert "WORLD_SIZE=4 is set but not RANK" in lines[0] and "unset WORLD_SIZE" in lines[0]


@pytest.mark.slow
@pytest.mark.case("B111")
def test_b111_degrees_that_do_not_divide_start_no_process(tmp_path: Path) -> None:
    done = run(tmp_path, "tensor: 3, fsdp: 1")
    assert done.returncode == 2 and "the number of attention heads 4 is not divisible by tensor=3" in done.stderr
    assert not (tmp_path / "out" / "ranks").exists()


@pytest.mark.slow
def test_under_torchrun_the_processes_that_are_there_are_joined(tmp_path: Path) -> None:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run(tmp_path, "tensor: 2, fsdp: 1", start=start)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1
    found = report(tmp_path)
    assert (found["status"], found["steps"][0]["measured"]["devices"]) == ("complete", 2)
    assert found["steps"][0]["quality"]["relative_error"] < 1e-5
    assert not (tmp_path / "out" / "ranks").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["out", "spread.yaml"]
