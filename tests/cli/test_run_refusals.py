"""Runs that must end before anything is loaded: exit code 2, one line that says what to type, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import Optforge


def _one_line(stderr: str) -> str:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("recipe=llama_fp7", "llama_fp8"),
        ("hardware=a101", "a100"),
        ("workload.batchsize=3", "batch_size"),
        ("downgrade=alow", "allow"),
        ("steps.compile.use=compile/inducter", "compile/inductor"),
    ],
)
def test_a_wrong_name_is_told_with_a_near_one(optforge: Optforge, recipe: str, override: str, hint: str) -> None:
    given = [override] if override.startswith("recipe=") else [recipe, override]
    done = optforge("run", *given)
    assert done.returncode == 2
    assert hint in _one_line(done.stderr)
    assert done.stdout == ""


def test_all_mistakes_are_told_at_once(optforge: Optforge, recipe: str) -> None:
    done = optforge("run", recipe, "workload.batchsize=3", "downgrade=alow", "nonsense=1")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3 or "nonsense" in done.stderr


def test_no_recipe_is_told_with_what_to_type(optforge: Optforge) -> None:
    done = optforge("run")
    assert done.returncode == 2
    assert "recipe=" in _one_line(done.stderr)


def test_debug_adds_the_traceback(optforge: Optforge) -> None:
    done = optforge("run", "recipe=llama_fp7", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_a_sweep_is_checked_before_its_first_job(optforge: Optforge, recipe: str, tmp_path: Path) -> None:
    done = optforge("run", "-m", recipe, "hardware=a100,a101")
    assert done.returncode == 2
    assert "a101" in _one_line(done.stderr)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.case("B88")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["hydra.run.dir=/proc/x"], ["/proc/x", "give hydra.run.dir="]),
        (["hydra.run.dir=taken/x"], ["taken/x", "give hydra.run.dir="]),
        (["output_dir=/proc/x"], ["/proc/x", "give output_dir="]),
        (["output_dir=taken"], ["taken", "give output_dir="]),
        (["-m", "hydra.sweep.dir=/proc/x", "hardware=cpu,a100"], ["/proc/x", "give hydra.sweep.dir="]),
        (["-m", "output_dir=/proc/x", "hardware=cpu,a100"], ["/proc/x", "give output_dir="]),
    ],
)
def test_b88_a_folder_that_cannot_be_written(
    optforge: Optforge, recipe: str, tmp_path: Path, arguments: list[str], told: list[str]
) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    done = optforge("run", recipe, *arguments)
    assert done.returncode == 2
    line = _one_line(done.stderr)
    assert all(part in line for part in told), line
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "a file"
    assert not (tmp_path / "outputs").exists()


def test_what_hydra_is_asked_makes_no_folder(optforge: Optforge, recipe: str, tmp_path: Path) -> None:
    done = optforge("run", recipe, "--cfg", "job", "seed=5")
    assert done.returncode == 0, done.stderr
    assert "seed: 5" in done.stdout.splitlines()
    assert not (tmp_path / "outputs").exists()
