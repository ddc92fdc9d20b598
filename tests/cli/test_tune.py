"""`optforge tune` from outside: refusals before anything runs, and whole searches over tiny models."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from commandline import Optforge, command, environment

from optforge.sweep import store

MODULE = """\
import os
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

    def forward(self, x):
        if os.environ.get("OOM_IN_BF16") and self.first.weight.dtype == torch.bfloat16 and not x.is_meta:
            raise torch.OutOfMemoryError("tried to allocate 80.00 GiB")
        return self.second(torch.relu(self.first(x)))

def build():
    return Wide(), torch.ones(64, 1024)
"""
CAST = "name: cast\ngoal: latency\nsteps:\n  cast: {use: precision/bf16}\n"
SMALL = "name: small\ngoal: latency\nsteps:\n  weights: {use: quantize/int8_weight}\n"
TINY = ("hardware=cpu", "model=module", "model.factory=tune_module:build", "workload=forward", "data=inputs", "measure.max_s=0.5")
GIVEN = ("recipe=./cast.yaml,./small.yaml", "tune.sampler=none")
HAS_OPTUNA = importlib.util.find_spec("optuna") is not None


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Words of a search whose jobs take little more than importing torch."""
    (tmp_path / "tune_module.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "cast.yaml").write_text(CAST, encoding="utf-8")
    (tmp_path / "small.yaml").write_text(SMALL, encoding="utf-8")
    return list(TINY)


def _folder(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "outputs/tunes").iterdir()
    return folder


def _tune(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "tune.json").read_text(encoding="ascii")))


def _states(found: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in found["candidates"]}


# --- refused before anything runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tune.budgets_s=9"], "tune.budgets_s: unknown key 'budgets_s' in tune; did you mean budget_s?"),
        (["tune.budget_s=0"], "tune.budget_s: must be above 0, got 0; type tune.budget_s=900"),
        (["tune.eta=1"], "tune.eta: must be 2 or more, got 1; type tune.eta=2"),
        (
            ["tune.sampler=grid"],
            "tune.sampler: cannot be 'grid', one of tpe, nsga2, random, none; write tune.sampler=tpe|nsga2|random|none",
        ),
        (["tune.objectives=[speed]"], "tune.objectives: an item cannot be 'speed'"),
        (["tune.objectives=[memory,memory]"], "tune.objectives: cannot be [memory,memory]; name some of latency, memory, size, quality"),
        (["limits.max_kll=0.1"], "limits.max_kll: unknown limit 'max_kll'; did you mean max_kl"),
        (["limits.max_kl=low"], "limits.max_kl: must be a number, got 'low'; type limits.max_kl=0.01"),
        (["limits.max_kl=0.1", "quality.enabled=false"], "limits.max_kl: needs quality to be measured, and quality.enabled is false"),
        (["steps.weights.group_size=64"], "steps.weights.group_size=64: changes a step, which is what tune searches"),
        (["-m"], "-m: does not go with tune; leave it out"),
        (["sweep.devices=all"], "sweep.devices=all: is a key of a sweep or of Hydra, and tune runs its jobs itself"),
        (["recipe=nothing_like_it"], "recipe: unknown recipe 'nothing_like_it'"),
        (["recipe=baseline"], "recipe: there is no recipe with steps to start from; name recipes that have steps"),
        (["tune.resume=./nowhere"], "tune.resume: there is no search in"),
        (["modle=smollm2_135m"], "unknown key 'modle'; did you mean model"),
    ],
)
def test_wrong_words_are_one_line_each(optforge: Optforge, words: list[str], line: str, tmp_path: Path) -> None:
    done = optforge("tune", "hardware=cpu", "tune.sampler=none" if "tune.sampler=grid" not in words else "tune.seed=0", *words)
    assert done.returncode == 2, done.stderr
    (told,) = done.stderr.splitlines()
    assert told.startswith("error: ")
    assert line in told
    assert not (tmp_path / "outputs").exists()


def test_all_problems_at_once(optforge: Optforge) -> None:
    done = optforge("tune", "tune.budget_s=x", "limits.nothing=1", "steps.a.b=1")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3


def test_help_says_what_it_does(optforge: Optforge) -> None:
    done = optforge("tune", "--help")
    assert done.returncode == 0
    assert "best.yaml" in done.stdout
    assert "tune-final" not in optforge("--help").stdout


# --- whole searches ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_names_a_winner_that_runs_and_resumes_without_a_job(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("tune", *GIVEN, *tiny)
    assert done.returncode == 0, done.stderr
    folder = _folder(tmp_path)
    found = _tune(folder)
    assert set(_states(found).values()) == {"measured"}
    assert set(found["final_round"]["samples_s"]) == {"cast", "small"}
    rounds = {len(samples) for samples in [*found["final_round"]["samples_s"].values(), found["final_round"]["baseline_samples_s"]]}
    assert len(rounds) == 1, "all were timed in the same rounds"
    assert found["winner"] in ("cast", "small", "as_loaded")
    assert f"winner: {found['winner']}" in done.stdout
    sweep = store.read(folder)
    assert [job.status for job in sweep.jobs] == ["done", "done"]
    assert store.read_status(folder / "final").status == "done"
    run = optforge("run", f"recipe={folder / 'best.yaml'}", *tiny)
    assert run.returncode == 0, run.stderr
    again = optforge("tune", *GIVEN, *tiny, f"tune.resume={folder}")
    assert again.returncode == 0, again.stderr
    assert [job.started for job in store.read(folder).jobs] == [job.started for job in sweep.jobs], "no job ran again"
    other = optforge("tune", *GIVEN, *tiny, "seed=1", f"tune.resume={folder}")
    assert other.returncode == 2
    assert "tune.resume: seed is 1" in other.stderr


@pytest.mark.slow
def test_no_recipe_meets_the_limits(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("tune", *GIVEN, *tiny, "limits.max_latency_ms=1e-6")
    assert done.returncode == 3, done.stderr
    found = _tune(_folder(tmp_path))
    assert set(_states(found).values()) == {"missed"}
    assert found["best"] is None
    assert not (_folder(tmp_path) / "best.yaml").exists()
    assert "no recipe meets the limits" in done.stdout
    assert "cast missed: latency in ms" in done.stdout
    assert "is over max_latency_ms 1e-06" in done.stdout


@pytest.mark.slow
def test_out_of_memory_is_a_record_and_the_search_goes_on(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("tune", *GIVEN, *tiny, OOM_IN_BF16="1")
    assert done.returncode == 0, done.stderr
    found = _tune(_folder(tmp_path))
    assert _states(found) == {"cast": "failed", "small": "measured"}
    (failed,) = [one for one in found["candidates"] if one["name"] == "cast"]
    assert failed["why"].startswith("oom: ")
    assert sorted(job.status for job in store.read(_folder(tmp_path)).jobs) == ["done", "oom"]


@pytest.mark.slow
def test_a_target_that_is_not_here_is_refused(optforge: Optforge, tiny: list[str]) -> None:
    done = optforge("tune", *GIVEN, *(word if word != "hardware=cpu" else "hardware=tpu_v4" for word in tiny))
    assert done.returncode == 2
    assert "require_target is true" in done.stderr


@pytest.mark.slow
def test_interrupted_it_keeps_the_best_so_far(tiny: list[str], tmp_path: Path) -> None:
    words = command("tune", *GIVEN, *tiny)
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 240
    while not list((tmp_path / "outputs").glob("tunes/*/best.yaml")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "best so far" in said
    found = _tune(_folder(tmp_path))
    assert found["ended"] == "it was stopped"
    assert found["winner"] is None
    assert found["best"] is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_OPTUNA, reason="needs the extra sweep")
def test_a_real_search_proposes_and_measures(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    words = [*tiny, "recipe=./cast.yaml", "tune.candidates=3", "tune.budget_s=240", "tune.objectives=[latency,size]"]
    done = optforge("tune", *words)
    assert done.returncode == 0, done.stderr
    folder = _folder(tmp_path)
    found = _tune(folder)
    searched = [one for one in found["candidates"] if one["origin"] == "search"]
    assert searched
    tried = [one for one in found["candidates"] if one["results"] or one["state"] == "failed"]
    assert len(tried) == 3, "tune.candidates"
    assert {path.stem for path in (folder / "pareto").glob("*.yaml")} == set(found["front"])
    assert found["best"] in found["front"]
