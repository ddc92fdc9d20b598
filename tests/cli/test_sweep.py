"""Whole sweeps: failures that stay with their job, limits, interruptions, resume, and other launchers.

A job imports torch, which takes seconds, so each sweep here has few jobs and answers several questions.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from commandline import Optforge, command, environment

from optforge.sweep import store
from optforge.sweep.store import Job, Sweep

MODULE = """\
import os, sys, time
import torch
from torch import nn

def build(does="run", size=32, note=""):
    if torch.empty(0).device.type != "meta":
        if does == "crash":
            raise RuntimeError("this factory is broken")
        if does == "exit":
            sys.exit(3)
        if does == "kill":
            os.kill(os.getpid(), 9)
        if does == "oom":
            raise torch.OutOfMemoryError("tried to allocate 80.00 GiB")
        if does == "hang":
            time.sleep(600)
        if does == "spoil":
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(7)
            nn.Linear.forward = lambda self, x: torch.zeros(*x.shape[:-1], self.out_features, dtype=x.dtype)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 8)), torch.ones(4, size)

def visible(module, loaded):
    return float(os.environ["CUDA_VISIBLE_DEVICES"])
"""
RECIPE = "name: cast\ndescription: A cast\ngoal: latency\nsteps:\n  cast: {use: precision/bf16}\n"
TINY = ("recipe=./cast.yaml", "hardware=cpu", "model=module", "model.factory=sweep_module:build", "workload=forward", "data=inputs")
QUICK = ("measure.max_s=0.3", "measure.min_rounds=2")


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Overrides of a run that takes little more than importing torch."""
    (tmp_path / "sweep_module.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "cast.yaml").write_text(RECIPE, encoding="utf-8")
    return [*TINY, *QUICK]


def _does(*what: str) -> str:
    return f"model.arguments={','.join('{does: ' + each + '}' for each in what)}"


def _folder(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "outputs/sweeps").iterdir()
    return folder


def _sweep(tmp_path: Path) -> Sweep:
    return store.read(_folder(tmp_path))


def _report(folder: Path, job: Job) -> dict[str, Any]:
    return dict(json.loads((folder / job.folder / "report.json").read_text(encoding="utf-8")))


def _started(tmp_path: Path, arguments: Sequence[str], *, when: Callable[[Sweep], bool]) -> subprocess.Popen[str]:
    """The command line in a process of its own, as soon as its sweep is as far as `when` says."""
    log = (tmp_path / "out.txt").open("w", encoding="utf-8")
    process = subprocess.Popen(command(*arguments), cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=log, text=True)
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        found = list((tmp_path / "outputs/sweeps").glob("*/sweep.json"))
        if found and when(store.read(found[0])):
            return process
        time.sleep(0.05)
    process.kill()
    pytest.fail((tmp_path / "out.txt").read_text(encoding="utf-8"))


def _runs(index: int) -> Callable[[Sweep], bool]:
    return lambda sweep: sweep.jobs[index].status == store.RUNNING


# --- refused before anything starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["seed=0,x"], "seed [++seed=x]: must be a whole number"),
        (["seed=0,1", "sweep.on_error=maybe"], "sweep.on_error: cannot be 'maybe', one of continue, stop"),
        (["seed=0,1", "sweep.timeout_s=0"], "sweep.timeout_s: must be above 0"),
        (["seed=0,1", "sweep.devices=2"], "sweep.devices: must be a list, got the number 2; write sweep.devices=[2]"),
        (["seed=0,1", "sweep.timeout_s=1,2"], "sweep: is the same for all jobs of a sweep"),
        (["seed=0,1", "hydra.sweep.subdir=x"], "hydra.sweep.subdir: job folders are named after their number"),
        (["seed=0,1", "sweep.resume=nowhere"], "nowhere/sweep.json: there is no such record"),
        (["seed=0,1", "hydra/launcher=basic", "sweep.timeout_s=9"], "sweep.timeout_s: is read by OptForge's own launcher alone"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_told_before_the_first_job(
    optforge: Optforge, tmp_path: Path, overrides: list[str], said: str
) -> None:
    done = optforge("run", "-m", "recipe=baseline", "hardware=cpu", *overrides)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "outputs/sweeps").exists()


@pytest.mark.case("B145")
def test_b145_resume_refuses_other_jobs_and_a_sweep_that_runs(tiny: list[str], optforge: Optforge, tmp_path: Path) -> None:
    process = _started(tmp_path, ["run", "-m", *tiny, "seed=0,1"], when=lambda sweep: True)
    try:
        folder = _folder(tmp_path)
        busy = optforge("run", "-m", f"sweep.resume={folder}")
        assert busy.returncode == 2
        assert f"{folder}: this sweep is running in another process" in busy.stderr
        other = optforge("run", "-m", *tiny, "seed=0,5", "quality.tokens=64", f"sweep.resume={folder}")
        assert other.returncode == 2
        assert [line.split(" in the sweep")[0] for line in other.stderr.splitlines()] == [
            "error: sweep.resume: quality.tokens is 64 in job 0 and was 4096",
            "error: sweep.resume: seed is 5 in job 1 and was 1",
        ]
    finally:
        process.kill()
        process.wait()


# --- failures stay with their job ----------------------------------------------------------------------------------------


def test_a_failure_is_told_when_it_happens_and_ends_only_its_job(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("run", "-m", *tiny, _does("crash", "run"))
    assert done.returncode == 1, done.stderr
    crashed, good = _sweep(tmp_path).jobs
    assert (crashed.status, crashed.exit_code, crashed.error) == ("failed", 1, "RuntimeError: this factory is broken")
    assert (good.status, good.exit_code, good.verdict is not None) == ("done", 0, True)
    assert [crashed.folder, good.folder] == ["0_arguments-does-crash", "1_arguments-does-run"]
    lines = done.stderr.splitlines()
    assert lines.index("        RuntimeError: this factory is broken") < next(i for i, line in enumerate(lines) if "start   2/2" in line)
    assert done.stdout.splitlines()[-1] == "2 jobs: 1 failed, 1 done"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.case("B107")
@pytest.mark.case("B108")
@pytest.mark.case("B138")
@pytest.mark.case("B139")
def test_b138_every_way_to_fail_leaves_its_record_and_the_next_job_runs(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("run", "-m", *tiny, _does("exit", "kill", "oom", "run"))
    assert done.returncode == 1, done.stderr
    folder, jobs = _folder(tmp_path), _sweep(tmp_path).jobs
    assert [(job.status, job.exit_code) for job in jobs] == [("failed", 1), ("failed", -9), ("oom", 1), ("done", 0)]
    assert [store.read_status(folder / job.folder) for job in jobs] == jobs
    assert "sys.exit(3)" in str(jobs[0].error)
    assert jobs[1].error == "the process was killed by SIGKILL (9)"
    report = _report(folder, jobs[2])
    assert (report["status"], report["error"]["type"]) == ("oom", "OutOfMemoryError")
    assert {"memory", "workload"} <= set(report["error"])
    for job in jobs[::2]:
        assert "Traceback" in (folder / job.folder / "optforge.log").read_text(encoding="utf-8") or job.status == "oom"
    for job in jobs:
        assert "Plan for cpu" in (folder / job.folder / "job.log").read_text(encoding="utf-8")
    rows = [line.split()[1] for line in done.stdout.splitlines() if line[:2] in ("0_", "1_", "2_", "3_")]
    assert rows == [job.status for job in jobs]


@pytest.mark.slow
@pytest.mark.case("B141")
def test_b141_stop_leaves_later_jobs_as_not_started(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("run", "-m", *tiny, _does("crash", "run", "exit"), "sweep.on_error=stop")
    assert done.returncode == 1
    assert [job.status for job in _sweep(tmp_path).jobs] == ["failed", "not_started", "not_started"]
    assert [store.read_status(path.parent).status for path in sorted(_folder(tmp_path).glob("*/status.json"))] == [
        "failed",
        "not_started",
        "not_started",
    ]
    assert "job 0 failed, and sweep.on_error is stop" in done.stderr


# --- interrupted and resumed ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_sweep_ends_its_job_and_prints_its_table(tiny: list[str], tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = _started(tmp_path, ["run", "-m", *tiny, _does("hang", "run")], when=_runs(0))
    report = _folder(tmp_path) / "0_arguments-does-hang/report.json"
    deadline = time.monotonic() + 200
    while not report.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    sweep = _sweep(tmp_path)
    assert [job.status for job in sweep.jobs] == ["interrupted", "not_started"]
    assert _report(_folder(tmp_path), sweep.jobs[0])["status"] == "incomplete"
    assert "2 jobs: 1 interrupted, 1 not started" in (tmp_path / "out.txt").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.case("B145")
def test_b145_only_whole_results_are_kept(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    """Killed after the second of three jobs, whose result is then cut off as a full disk would."""
    process = _started(tmp_path, ["run", "-m", *tiny, "seed=0,1,2"], when=_runs(2))
    process.kill()
    process.wait()
    folder, jobs = _folder(tmp_path), _sweep(tmp_path).jobs
    first, second = (folder / job.folder / "report.json" for job in jobs[:2])
    second.write_bytes(second.read_bytes()[:1000])
    kept = first.read_bytes()
    done = optforge("run", "-m", f"sweep.resume={folder}")
    assert done.returncode == 0, done.stderr
    assert "job 1 runs again: it has no report that can be read" in done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines() if line.startswith(("kept", "start"))] == ["kept", "start", "start"]
    assert first.read_bytes() == kept
    sweep = _sweep(tmp_path)
    assert [job.status for job in sweep.jobs] == ["done"] * 3
    assert [_report(folder, job)["status"] for job in sweep.jobs] == ["complete"] * 3


def _survivors() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks/sweep_survives.py"
    spec = importlib.util.spec_from_file_location("sweep_survives", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.case("B145")
@pytest.mark.case("B144")
def test_b145_twelve_jobs_four_failures_killed_in_the_middle_and_resumed(tmp_path: Path) -> None:
    script, folder = _survivors(), tmp_path / "killed"
    script.prepare(tmp_path)
    script.killed_in_the_middle(script.sweep_words(60), tmp_path, folder)
    before = store.read(folder).jobs
    assert {"running", "waiting"} <= {job.status for job in before}
    kept = {job.index: (folder / job.folder / "report.json").read_bytes() for job in before if job.status == "done"}
    assert script.start(["run", "-m", f"sweep.resume={folder}", "sweep.timeout_s=60"], tmp_path).wait() == 1
    jobs = store.read(folder).jobs
    ok, bad = "done", "failed"
    assert [job.status for job in jobs] == [ok, bad, ok, ok, bad, ok, ok, "oom", ok, "timeout", ok, ok]
    assert all((folder / jobs[index].folder / "report.json").read_bytes() == report for index, report in kept.items())
    assert "x" * 300 in json.dumps(_report(folder, jobs[5])["command"])
    assert max(len(path.name.encode()) for path in folder.iterdir()) <= 80


# --- jobs do not know of each other --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.case("B146")
def test_b146_what_a_job_spoils_does_not_reach_the_next(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    alone = optforge("run", *tiny, _does("run"), "hydra.run.dir=alone")
    assert alone.returncode == 0, alone.stderr
    assert optforge("run", "-m", *tiny, _does("spoil", "run")).returncode == 0
    after = _report(_folder(tmp_path), _sweep(tmp_path).jobs[1])
    spoiled = _report(_folder(tmp_path), _sweep(tmp_path).jobs[0])
    expected = json.loads((tmp_path / "alone/report.json").read_text(encoding="utf-8"))
    assert after["model"]["digest"] == expected["model"]["digest"]
    assert after["quality"] == expected["quality"]
    assert spoiled["quality"] != expected["quality"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.case("B102")
def test_b102_the_order_of_jobs_does_not_change_their_memory(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    assert optforge("run", "-m", *tiny, "model.arguments={size: 4096},{size: 32}").returncode == 0
    folder = _folder(tmp_path)
    large, small = (_report(folder, job)["optimized"]["peak_memory_bytes"] for job in _sweep(tmp_path).jobs)
    assert optforge("run", *tiny, "model.arguments={size: 32}", "hydra.run.dir=alone").returncode == 0
    alone = json.loads((tmp_path / "alone/report.json").read_text(encoding="utf-8"))["optimized"]["peak_memory_bytes"]
    weights = 4096 * 4096 * 2  # bytes of the larger model in bf16, which only its own job may count
    assert small < alone + weights / 2
    assert large > small + weights / 2


@pytest.mark.slow
@pytest.mark.case("B143")
def test_b143_sweeps_started_at_once_have_folders_of_their_own(tiny: list[str], tmp_path: Path) -> None:
    """The folders are made before the first job, so the sweeps need not end."""
    processes = [
        subprocess.Popen(
            command("run", "-m", *tiny, "seed=0,1"),
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(4)
    ]
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("outputs/sweeps/*/sweep.json"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
    assert len(list(tmp_path.glob("outputs/sweeps/*/sweep.json"))) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parallel_jobs_each_see_their_own_device(tiny: list[str], tmp_path: Path) -> None:
    """Two places, three jobs; the metric of each is the device that its environment shows."""
    code = """if True:
        import sys
        from pathlib import Path
        from optforge.spec import SweepOptions
        from optforge.sweep import schedule, session
        from optforge.sweep.devices import Slot
        from optforge.sweep.display import Display
        from optforge.sweep.store import Sweep
        folder = Path("swept").absolute()
        folder.mkdir()
        sweep = Sweep()
        slots = [Slot(name=name, variables={"CUDA_VISIBLE_DEVICES": name}) for name in ("4", "6")]
        held = session.Session(folder=folder, sweep=sweep, options=SweepOptions(), display=Display(sweep, folder, slots=2), slots=slots)
        with session.opened(held):
            schedule.run(held, held.batch([[*sys.argv[1:], f"seed={seed}"] for seed in range(3)], 0))
    """
    arguments = [*tiny, "quality.metric=sweep_module:visible"]
    env = environment(tmp_path)
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, env=env, check=True, timeout=800)
    folder, jobs = tmp_path / "swept", store.read(tmp_path / "swept").jobs
    assert [job.status for job in jobs] == ["done"] * 3
    assert [str(int(_report(folder, job)["quality"]["metric"])) for job in jobs] == [job.device for job in jobs]
    assert {job.device for job in jobs} == {"4", "6"}
    assert str(jobs[0].started) <= str(jobs[1].started) <= str(jobs[2].started)


# --- other launchers and sweepers ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("package", "launcher"),
    [
        ("joblib", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
        ("submitit", ["hydra/launcher=submitit_local"]),
        ("hydra", ["hydra/launcher=basic"]),
    ],
)
def test_other_launchers_run_the_same_jobs(optforge: Optforge, tiny: list[str], tmp_path: Path, package: str, launcher: list[str]) -> None:
    pytest.importorskip(package)
    done = optforge("run", "-m", *tiny, _does("crash", "run"), *launcher)
    assert done.returncode == 1, done.stderr
    folder, sweep = _folder(tmp_path), _sweep(tmp_path)
    assert [(job.index, job.status, job.error) for job in sweep.jobs] == [
        (0, "failed", "RuntimeError: this factory is broken"),
        (1, "done", None),
    ]
    assert _report(folder, sweep.jobs[1])["status"] == "complete"
    assert "2 jobs: 1 failed, 1 done" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_optuna_searches_and_a_failed_job_is_the_worst(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    grid = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    done = optforge("run", "-m", *tiny, "model.arguments.does=choice(crash,run)", *grid)
    assert done.returncode == 1, done.stderr
    sweep = _sweep(tmp_path)
    assert sorted(job.status for job in sweep.jobs) == ["done", "failed"]
    good = next(job for job in sweep.jobs if job.status == "done")
    assert good.objective is not None
    assert good.objective == pytest.approx(1 / _report(_folder(tmp_path), good)["speedup"]["vs_baseline"]["value"])
    results = yaml.safe_load((_folder(tmp_path) / "optimization_results.yaml").read_text(encoding="utf-8"))
    assert results["best_params"] == {"++model.arguments.does": "run"}
    assert results["best_value"] == pytest.approx(good.objective, abs=1e-6)


def test_the_launcher_is_hydras_default_for_sweeps() -> None:
    done = subprocess.run(
        command("run", "recipe=baseline", "--cfg", "hydra"), capture_output=True, text=True, check=True, timeout=120, env=dict(os.environ)
    )
    assert "_target_: hydra_plugins.optforge_launcher.launcher.OptForgeLauncher" in done.stdout
