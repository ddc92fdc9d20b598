"""`optforge gate` as a CI job calls it: exit codes, lines, files, and two versions in turns."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commandline import Optforge, command, environment

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "cpu"
INT8, BF16 = (RESULTS / f"2026-11-30_smollm2_prefill_llama_{name}.json" for name in ("int8", "bf16"))
LATENCY = ("--limit", "latency_ms.p50 <= +5%")
CAST = "name: cast\ndescription: A cast\ngoal: latency\nsteps:\n  cast: {use: precision/bf16}\n"
MODULE = """\
import sys
import torch
from torch import nn

def build():
    if torch.empty(0).device.type != "meta":
        {does}
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, {width}), nn.ReLU(), nn.Linear({width}, 8)), torch.zeros(4, 32)
"""
RUN = ("recipe=./cast.yaml", "hardware=cpu", "model=module", "model.factory=versioned:build", "workload=forward", "data=inputs")
QUICK = (*RUN, "measure.max_s=0.3", "quality.enabled=false")


def worktree(folder: Path, *, width: int = 64, does: str = "pass") -> Path:
    """A version of a project: the same names, another content."""
    folder.mkdir()
    (folder / "versioned.py").write_text(MODULE.format(width=width, does=does), encoding="utf-8")
    (folder / "cast.yaml").write_text(CAST, encoding="utf-8")
    return folder


def test_a_run_passes_against_itself_and_a_slower_one_is_missed(optforge: Optforge, tmp_path: Path) -> None:
    done = optforge("gate", str(INT8), "--baseline", "ci/gate.json", "--update")
    assert (done.returncode, done.stdout) == (0, "ci/gate.json: the baseline is 1 run from now on\n"), done.stderr
    same = optforge("gate", str(INT8), "--baseline", "ci/gate.json", *LATENCY)
    assert same.returncode == 0, same.stderr
    assert same.stdout.splitlines()[-1] == "gate: 1 passed of 1 limit"
    files = ("--junit", "out/gate.xml", "--markdown", "out/gate.md")
    slower = optforge("gate", str(BF16), "--baseline", "ci/gate.json", *LATENCY, "--limit", "weight_bytes <= 1e9", *files)
    assert slower.returncode == 3
    missed = [line for line in slower.stdout.splitlines() if line.startswith("missed")]
    assert len(missed) == 1 and "latency_ms.p50 <= +5%: +" in missed[0] and "95% interval" in missed[0]
    assert ElementTree.parse(tmp_path / "out/gate.xml").find(".//failure") is not None
    assert "| **missed** | latency" in (tmp_path / "out/gate.md").read_text(encoding="utf-8")


def test_a_folder_and_a_limits_file(optforge: Optforge, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(INT8, tmp_path / "run" / "report.json")
    (tmp_path / "gate.yaml").write_text("limits:\n  - quality.perplexity <= +1%\n  - peak_memory_bytes <= +5%\n", encoding="utf-8")
    done = optforge("gate", "run", "--baseline", "run", "--limits", "gate.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "gate: 2 passed of 2 limits"


def test_strict_fails_what_is_undecided(optforge: Optforge) -> None:
    limit = ("--limit", "latency_ms.p50 <= +0.5%")
    assert optforge("gate", str(INT8), "--baseline", str(INT8), *limit).returncode == 0
    assert optforge("gate", str(INT8), "--baseline", str(INT8), *limit, "--strict").returncode == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ["optforge gate: needs a run to judge", "--baseline: is needed"]),
        ((str(INT8), "--baseline", "no.json", *LATENCY), ["--baseline: there is no no.json; write it with optforge gate RUN"]),
        ((str(INT8), "--baseline", str(INT8)), ["optforge gate: has no limit to hold"]),
        ((str(INT8), "--baseline", str(INT8), "--limit", "fast"), ["--limit: 'fast' is no limit"]),
        ((str(INT8), "--baseline", str(INT8), *LATENCY, "--dir-a", "x"), ["--dir-a: is a side of --ab"]),
        ((str(INT8), "--baseline", str(INT8), *LATENCY, "--junit", "/proc/here/a.xml"), ["/proc/here/a.xml: cannot be written"]),
        (("--ab", "recipe=x", *LATENCY), ["--ab: both sides are the same"]),
        (("--ab", "recipe=x", *LATENCY, "--a", "seed=1", "--update"), ["--update: has no meaning with --ab"]),
        (("--ab", *LATENCY, "--env-a", "nowhere", "--dir-b", "gone"), ["--env-a: there is no interpreter", "--dir-b: there is no folder"]),
        (("--ab", *LATENCY, "--a", "seed=1", "--pairs", "2"), ["--pairs: 2 is too few"]),
    ],
)
def test_what_is_wrong_is_one_line_each_and_exit_code_2(optforge: Optforge, arguments: tuple[str, ...], said: list[str]) -> None:
    done = optforge("gate", *arguments)
    assert done.returncode == 2, done.stdout
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == len(said)
    for line, part in zip(errors, said, strict=True):
        assert part in line


def test_no_torch_is_loaded_to_judge(optforge: Optforge) -> None:
    done = optforge("gate", str(INT8), "--baseline", str(INT8), *LATENCY, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "optforge.gate.judge" in loaded and not {"torch", "transformers", "triton"} & loaded


@pytest.mark.parametrize(
    ("does", "said"),
    [
        pytest.param("raise RuntimeError('broken on purpose')", "RuntimeError: broken on purpose", marks=pytest.mark.case("B138")),
        pytest.param("sys.exit(3)", "code of the run's own called sys.exit(3)", marks=pytest.mark.case("B139")),
        pytest.param("raise torch.OutOfMemoryError('tried 80 GiB')", "cpu ran out of memory", marks=pytest.mark.case("B108")),
    ],
)
@pytest.mark.case("B141")
def test_a_side_that_fails_ends_the_gate_with_its_words(optforge: Optforge, tmp_path: Path, does: str, said: str) -> None:
    """Side A fails: it is told with its log, B is not started, and the exit code says crash."""
    bad, good = worktree(tmp_path / "bad", does=does), worktree(tmp_path / "good")
    done = optforge("gate", "--ab", *QUICK, "--dir-a", str(bad), "--dir-b", str(good), *LATENCY)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: side A: ") and said in line
    (pair,) = (tmp_path / "outputs" / "gates").glob("*/pair_1")
    assert [path.name for path in pair.iterdir()] == ["a"]
    assert "Traceback" in (pair / "a" / "side.log").read_text(encoding="utf-8")
    assert json.loads((pair / "a" / "report.json").read_text())["status"] == ("oom" if "memory" in said else "failed")


def test_a_side_that_is_refused_is_exit_code_2(optforge: Optforge, tmp_path: Path) -> None:
    tree = str(worktree(tmp_path / "tree"))
    done = optforge("gate", "--ab", *QUICK, "--dir-a", tree, "--dir-b", tree, "--a", "workload.batch=2", *LATENCY)
    assert done.returncode == 2
    assert "error: side A: workload.batch: " in done.stderr


@pytest.mark.case("B143")
def test_gates_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    from optforge import preflight

    code = "from pathlib import Path; from optforge import preflight; print(preflight.gate_folder(Path('outputs')))"
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment(tmp_path))
        for _ in range(4)
    ]
    folders = {process.communicate(timeout=60)[0].strip() for process in started} | {str(preflight.gate_folder(tmp_path / "outputs"))}
    assert len(folders) == 5


@pytest.mark.slow
@pytest.mark.case("B102")
@pytest.mark.case("B146")
def test_two_worktrees_and_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """B is much wider; A patches a class of torch, which B must not see; B's own interpreter says that it was used."""
    spoils, looks = "nn.Linear.spoilt = True", "assert not hasattr(nn.Linear, 'spoilt')"
    before, after = worktree(tmp_path / "before", width=64, does=spoils), worktree(tmp_path / "after", width=4096, does=looks)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho used >> {tmp_path}/used\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    limits = ("--limit", "latency_ms.p50 <= +1%", "--limit", "weight_bytes <= +1%")
    sides = ("--dir-a", str(before), "--dir-b", str(after), "--env-b", str(python), "--pairs", "3")
    done = subprocess.run(
        command("gate", "--ab", *QUICK, *sides, *limits),
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    told = done.stdout.splitlines()[-1]  # on a busy machine the second limit may stay undecided
    assert told in ("gate --ab: 2 missed of 2 limits", "gate --ab: 1 missed, 1 undecided of 2 limits")
    assert (tmp_path / "used").read_text().split() == ["used"] * 3
    (folder,) = (tmp_path / "outputs" / "gates").iterdir()
    reports = {
        (pair, side): json.loads((folder / f"pair_{pair}" / side / "report.json").read_text()) for pair in (1, 2, 3) for side in "ab"
    }
    for side, width in (("a", 64), ("b", 4096)):
        weights = 2 * (32 * width + width + 8 * width + 8)  # two linears in bf16, by hand
        assert {reports[pair, side]["optimized"]["weight_bytes"] for pair in (1, 2, 3)} == {weights}
        # A starts first in pair 1, B in pair 2: each measures in a process of its own, so the order does not matter
        peaks = [reports[pair, side]["optimized"]["peak_memory_bytes"] for pair in (1, 2, 3)]
        assert max(peaks) / min(peaks) < 1.03
    kept = json.loads((folder / "gate.json").read_text())
    assert len(kept["pairs"]) == 3 and all(len(pair["a_s"]) == len(pair["b_s"]) >= 8 for pair in kept["pairs"])
    assert kept["facts"]["B"].startswith(f"{python}, {after}")
