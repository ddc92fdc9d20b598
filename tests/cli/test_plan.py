"""`optforge plan` as a stranger calls it: what it prints, what it writes, and when it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
from commandline import Optforge

from optforge.report import schema

SMALL = ("model=llama3_1b", "model.layers=2")
"""Two layers of a published shape."""


def _plans(folder: Path) -> list[Path]:
    return sorted(path.parent for path in (folder / "outputs").rglob("plan.json"))


def _said(stdout: str, label: str) -> str:
    """The text beside a label of the verdict, its wrapped lines joined."""
    found = [line.removeprefix(label).strip() for line in stdout.splitlines() if line.startswith(label)]
    assert found, stdout
    return found[-1]


def test_one_plan_is_printed_and_written(optforge: Optforge, tmp_path: Path) -> None:
    done = optforge("plan", "recipe=llama_fp8", "hardware=h100", *SMALL, "workload=decode", COLUMNS="160")
    assert done.returncode == 0, done.stderr
    heads = [line[:2] for line in done.stdout.splitlines() if line[:2] in ("1 ", "2 ", "3 ", "4 ", "5 ")]
    assert heads == ["1 ", "2 ", "3 ", "4 ", "5 "]
    assert _said(done.stdout, "fits").startswith("yes: ")
    assert "against the compiled baseline" in _said(done.stdout, "gain")
    assert "bound: " in _said(done.stdout, "bound")
    assert _said(done.stdout, "downgraded") == "nothing: every step runs as written"
    assert _said(done.stdout, "next") == "optforge run recipe=llama_fp8 hardware=h100 model=llama3_1b model.layers=2 workload=decode"
    (folder,) = _plans(tmp_path)
    assert folder.parent == tmp_path / "outputs/plans/llama_fp8/h100"
    assert done.stdout.splitlines()[-1] == f"plan: {folder}"
    document = json.loads((folder / "plan.json").read_text(encoding="ascii"))
    jsonschema.validate(document, schema.plan_schema())
    (plan,) = document["plans"]
    assert plan["command"] == "optforge plan recipe=llama_fp8 hardware=h100 model=llama3_1b model.layers=2 workload=decode"
    assert plan["kernels"]["rows"] and plan["kernels"]["rows"][0]["arch"] == "sm_90"
    markdown = (folder / "plan.md").read_text(encoding="utf-8")
    assert plan["verdict"]["command"] in markdown and "## Memory, predicted" in markdown
    assert "Traceback" not in done.stderr and "Failed to load" not in done.stderr


def test_wrong_input_is_exit_code_2_whatever_else_could_be_planned(optforge: Optforge, tmp_path: Path) -> None:
    done = optforge("plan", "recipe=llama_fp8", "hardware=a100,a101", "workload.batchsize=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a101" in done.stderr and not (tmp_path / "outputs").exists()


def test_a_flag_of_hydras_is_refused(optforge: Optforge) -> None:
    done = optforge("plan", "recipe=llama_fp8", "--cfg", "job")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: --cfg: does not go with plan, which runs nothing; leave it out, or use optforge run"]
