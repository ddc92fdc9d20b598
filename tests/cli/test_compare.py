"""`optforge compare` as a stranger calls it: exit codes, what goes where, and the messages."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from commandline import Optforge, command, environment

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
INT8, BF16 = (RESULTS / "cpu" / f"2026-11-30_smollm2_prefill_llama_{name}.json" for name in ("int8", "bf16"))
ON_H200 = RESULTS / "h200" / "2026-11-30_smollm2_prefill_llama_fp8.json"
MODULE = """\
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), torch.zeros(4, 32)
"""
CAST = "name: {name}\ndescription: A cast\ngoal: latency\nsteps:\n  cast: {{use: precision/{name}}}\n"


def test_two_reports_make_a_table_and_a_page(optforge: Optforge, tmp_path: Path) -> None:
    done = optforge("compare", str(INT8), str(BF16))
    assert done.returncode == 0, done.stderr
    assert "Measured" in done.stdout and "llama_int8" in done.stdout
    (page,) = (tmp_path / "outputs" / "comparisons").rglob("compare.html")
    assert done.stdout.splitlines()[-1] == f"page: {page.relative_to(tmp_path)}"
    assert page.read_text(encoding="utf-8").lstrip().startswith("<!doctype html>")


def test_files_go_where_they_are_told(optforge: Optforge, tmp_path: Path) -> None:
    done = optforge("compare", str(INT8), str(BF16), "--markdown", "a.md", "--csv", "b/c.csv", "--json", "d.json", "--html", "e.html")
    assert done.returncode == 0, done.stderr
    assert "| llama\\_int8 |" in (tmp_path / "a.md").read_text(encoding="utf-8")
    assert [line["run"] for line in csv.DictReader((tmp_path / "b/c.csv").open(encoding="utf-8"))] == ["llama_int8", "llama_bf16"]
    assert json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))["schema_version"] == 1
    assert "</html>" in (tmp_path / "e.html").read_text(encoding="utf-8")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("kind", ["json", "csv", "markdown"])
def test_a_dash_prints_that_and_nothing_else(optforge: Optforge, tmp_path: Path, kind: str) -> None:
    done = optforge("compare", str(INT8), str(BF16), f"--{kind}", "-")
    assert done.returncode == 0, done.stderr
    assert {"json": json.loads, "csv": lambda text: list(csv.reader(io.StringIO(text))), "markdown": str.splitlines}[kind](done.stdout)
    assert done.stdout.startswith({"json": "{", "csv": "run,", "markdown": "# Comparison"}[kind])
    assert list(tmp_path.iterdir()) == []


def test_different_conditions_are_exit_code_2_and_anyway_is_0(optforge: Optforge) -> None:
    done = optforge("compare", str(INT8), str(ON_H200))
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert {line.split(":")[1].strip() for line in lines} >= {"device", "versions", "device software", "workload"}
    assert all(line.endswith("compare them apart, or add --anyway") for line in lines)
    assert done.stdout == ""
    done = optforge("compare", str(INT8), str(ON_H200), "--anyway")
    assert done.returncode == 0, done.stderr
    assert "warning: device differs: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "error: optforge compare: needs to know what to compare; give folders of runs"),
        (("llama_int8",), "error: llama_int8: the recipe has no run under outputs/llama_int8; type optforge run recipe=llama_int8"),
        ((str(INT8), "--by", "speed"), "error: --by: there is no figure 'speed'"),
        ((str(INT8), "--csv", "-", "--json", "-"), "error: --csv and --json: cannot both be written to stdout"),
        ((str(INT8), "--html", "/proc/here/page.html"), "error: /proc/here/page.html: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(optforge: Optforge, arguments: tuple[str, ...], said: str) -> None:
    done = optforge("compare", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(said)


def test_a_recipes_name_takes_its_newest_run_and_says_so(optforge: Optforge, tmp_path: Path) -> None:
    for name in ("2026-01-01", "2026-02-02"):
        folder = tmp_path / "outputs/llama_int8/cpu" / name
        folder.mkdir(parents=True)
        tree = json.loads(INT8.read_text(encoding="utf-8"))
        (folder / "report.json").write_text(json.dumps({**tree, "started": f"{name}T00:00:00+00:00"}), encoding="utf-8")
    done = optforge("compare", "llama_int8")
    assert done.returncode == 0, done.stderr
    assert "note: recipe llama_int8: took outputs/llama_int8/cpu/2026-02-02" in done.stdout
    assert "left out 1 older or unfinished run" in done.stdout


@pytest.mark.case("B143")
def test_comparisons_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(command("compare", str(INT8)), cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL)
        for _ in range(4)
    ]
    assert [process.wait(timeout=120) for process in started] == [0] * 4
    assert len(list((tmp_path / "outputs" / "comparisons").rglob("compare.html"))) == 4


def test_nothing_heavy_is_loaded(optforge: Optforge, tmp_path: Path) -> None:
    shutil.copy(INT8, tmp_path / "report.json")
    done = optforge("compare", "report.json", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "jinja2" in loaded and not {"torch", "transformers", "triton", "numpy"} & loaded


@pytest.mark.slow
def test_runs_made_here_compare_by_name_and_cost(optforge: Optforge, tmp_path: Path) -> None:
    """Two real runs with a price: what run prints, and what compare makes of their reports."""
    (tmp_path / "tiny_module.py").write_text(MODULE, encoding="utf-8")
    tiny = ("model=module", "model.factory=tiny_module:build", "workload=forward", "data=inputs", "measure.max_s=0.5")
    price = ("hardware=auto", "hardware.price_per_hour=7.2", "hardware.currency=EUR")
    for name in ("bf16", "fp16"):
        (tmp_path / f"{name}.yaml").write_text(CAST.format(name=name), encoding="utf-8")
        done = optforge("run", f"recipe=./{name}.yaml", *tiny, *price, COLUMNS="200")
        assert "cost per M items" in done.stdout, done.stdout + done.stderr
    reports = {path.parts[-4]: json.loads(path.read_text()) for path in (tmp_path / "outputs").rglob("report.json")}
    done = optforge("compare", "bf16", "fp16", "--by", "cost", "--json", "-", "--anyway")  # whether a test machine is shared differs
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads(done.stdout)["rows"] if row["figures"] == "measured"]
    assert {row["recipe"] for row in rows} == {"bf16", "fp16"}
    for row in rows:
        rate = reports[row["recipe"]]["optimized"]["items_per_s"]
        assert row["cost_per_million"] == pytest.approx(7.2 * 1e6 / (rate * 3600))
        assert row["currency"] == "EUR"
        assert row["settings"]["measure.max_s"] == "0.5"
