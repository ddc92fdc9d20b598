"""Profiles of one's own: `hardware=./mine.yaml` from a stranger's file, and `optforge hardware measure` on this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from commandline import Optforge

PROFILE = """\
name: my_card
description: A card of mine
backend: nvidia
arch: sm_90
peak_flops: {bf16: 500.0e+12, fp8: 1.0e+15}
memory_bytes: 96000000000
bandwidth_bytes_per_s: 3.0e+12
fp8_format: e4m3fn
sources: {bf16: measured on 2026-12-01 with torch 2.13.0}
"""


def test_a_profile_file_is_the_target_of_a_run(optforge: Optforge, tmp_path: Path, recipe: str) -> None:
    (tmp_path / "mine.yaml").write_text(PROFILE)
    done = optforge("show", recipe, "hardware=./mine.yaml", "hardware.memory_bytes=80000000000")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)["hardware"]
    assert (shown["name"], shown["peak_flops"], shown["bandwidth_bytes_per_s"]) == ("my_card", {"bf16": 5e14, "fp8": 1e15}, 3e12)
    assert shown["memory_bytes"] == 80_000_000_000
    assert shown["link"] is None
    origins = optforge("show", recipe, "hardware=./mine.yaml", "--origins").stdout
    assert re.search(r"hardware\.arch +sm_90 +\S*mine\.yaml", origins)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (("memory_bytes:", "memory_byte:"), "unknown key 'memory_byte'"),
        (("500.0e+12", "-5.0"), "must be above 0"),
        (("500.0e+12", "fast"), "must be a finite number"),
        (("3.0e+12", "4.8"), "no device's"),
        (("backend: nvidia", "backend: nvidea"), "unknown backend"),
        (("bf16: 500", "bf17: 500"), "unknown dtype"),
        (("name: my_card", "name: ../my_card"), "names a folder"),
        (("arch: sm_90\n", ""), "is required"),
        ((PROFILE, "- a\n- list\n"), "is no hardware profile"),
        (("name: my_card", "name: !!python/object:os.system my_card"), "has the tag"),
        (("name: my_card", "name: ${oc.env:HOME}"), "interpolation"),
    ],
)
def test_a_wrong_profile_is_one_line_and_exit_2(optforge: Optforge, tmp_path: Path, recipe: str, wrong: tuple[str, str], what: str) -> None:
    old, new = wrong
    assert old in PROFILE
    (tmp_path / "mine.yaml").write_text(PROFILE.replace(old, new, 1))
    done = optforge("show", recipe, "hardware=./mine.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and what in lines[0] and "mine.yaml" in lines[0]


def test_a_profile_that_is_not_there_is_one_line_and_exit_2(optforge: Optforge, recipe: str) -> None:
    done = optforge("show", recipe, "hardware=./nobody.yaml")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "nobody.yaml" in done.stderr


def test_the_command_is_told_by_help(optforge: Optforge) -> None:
    done = optforge("hardware", "--help")
    assert done.returncode == 0 and "measure" in done.stdout


@pytest.mark.slow
def test_a_measured_profile_is_possible_and_comes_back(optforge: Optforge, tmp_path: Path, recipe: str) -> None:
    cache = str(tmp_path / "cache")
    done = optforge("hardware", "measure", OPTFORGE_CACHE=cache)
    assert done.returncode == 0, done.stderr
    assert "memory bandwidth" in done.stderr
    profile = yaml.safe_load(done.stdout)
    assert all("measured on " in source and " with torch " in source for source in profile["sources"].values())
    assert 1e9 < profile["bandwidth_bytes_per_s"] < 2e13
    assert all(1e9 < rate < 1e17 for rate in profile["peak_flops"].values())
    (tmp_path / "mine.yaml").write_text(done.stdout)
    shown = optforge("show", recipe, "hardware=./mine.yaml", OPTFORGE_CACHE=cache)
    assert shown.returncode == 0, shown.stderr
    assert yaml.safe_load(shown.stdout)["hardware"] == profile
