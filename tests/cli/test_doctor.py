"""The doctor: what is missing is said with its cost and its command, and no probe can take the doctor down."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import pytest
from commandline import Optforge
from typer.testing import CliRunner

from optforge.cli import doctor
from optforge.cli.app import app

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="module")
def findings() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "optforge", "doctor", "--json"], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode in (0, 2), done.stderr
    return list(json.loads(done.stdout))


def _named(findings: list[dict[str, Any]], section: str) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in findings if finding["section"] == section}


def test_versions_are_the_installed_ones(findings: list[dict[str, Any]]) -> None:
    found = _named(findings, "versions")
    assert found["torch"]["value"] == version("torch")
    assert found["hydra-core"]["value"] == version("hydra-core")


def test_what_is_missing_has_a_cost_and_a_command(findings: list[dict[str, Any]]) -> None:
    for finding in findings:
        if finding["state"] != "ok":
            assert finding["cost"], finding
            assert finding["fix"], finding


def test_a_compiler_that_is_named_and_not_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    finding = doctor._compiler("C++")
    assert (finding.state, finding.fix) == ("missing", "unset CXX")
    assert "/nonexistent" in finding.value


def test_every_extra_is_looked_for() -> None:
    declared = set(metadata("optforge").get_all("Provides-Extra") or [])
    assert set(doctor.EXTRAS) == declared


def test_an_extra_brings_what_pyproject_says() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    for extra, requirements in project["optional-dependencies"].items():
        names = sorted(re.split(r"[<>=\[]", requirement)[0].lower() for requirement in requirements)
        assert sorted(requirement.name.lower() for requirement in doctor.extra_requirements(extra)) == names


def _die() -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "unreachable"


def test_a_probe_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that takes its process down must not take the doctor's."""
    monkeypatch.setattr(doctor, "probe_torch", _die)
    finding = doctor._torch()
    assert finding.state == "broken"
    assert "SIGSEGV" in finding.value
    assert finding.required


def test_output_is_plain_when_piped() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code in (0, 2)
    assert "\x1b" not in result.stdout
    assert any(line.split()[:2] == ["torch", "ok"] for line in result.stdout.splitlines())


def test_one_thread_is_not_counted_in_the_plural(optforge: Optforge) -> None:
    assert ", 1 thread\n" in optforge("doctor", OMP_NUM_THREADS="1").stdout
