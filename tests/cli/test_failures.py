"""What the user sees when something goes wrong, and with which code the command ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from optforge.cli import failures
from optforge.cli.job import Outcome, exit_code
from optforge.errors import ConfigError, OutOfMemory, Problem, StepError

TWO = ConfigError(
    Problem(where="recipe", what="unknown recipe 'lama'", fix="did you mean llama_fp8?"),
    Problem(where="steps.weights.bits", what="must be\n  a number"),
)


def _code(error: BaseException, *, debug: bool = False) -> int:
    with pytest.raises(typer.Exit) as caught, failures.guard(debug=debug):
        raise error
    return caught.value.exit_code


def test_each_problem_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert _code(TWO) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error: recipe: unknown recipe 'lama'; did you mean llama_fp8?",
        "error: steps.weights.bits: must be a number",
    ]


def test_a_traceback_appears_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    _code(TWO)
    assert "Traceback" not in capsys.readouterr().err
    _code(TWO, debug=True)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (StepError("step fuse lied"), 1, "error: step fuse lied"),
        (OutOfMemory("12 GiB"), 1, "error: 12 GiB"),
        (ZeroDivisionError("division by zero\nsecond line"), 1, "error: ZeroDivisionError: division by zero"),
        (RuntimeError(), 1, "error: RuntimeError: no message"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _code(error) == code
    assert capsys.readouterr().err.splitlines()[0] == line


def test_a_crash_names_its_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert failures.tell(RuntimeError("x"), debug=False, logfile=tmp_path / "optforge.log") == 1
    assert capsys.readouterr().err.splitlines()[1] == f"details: {tmp_path}/optforge.log"


def test_a_long_list_is_cut_and_the_cut_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _code(ConfigError(*(f"problem {number}" for number in range(50))))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == failures.MAX_LINES + 1
    assert lines[-1] == "error: and 30 more problems"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_the_command_through_its_cleanup(number: signal.Signals, code: int, tmp_path: Path) -> None:
    program = f"""
import os, sys, typer
from optforge.cli.failures import guard
app = typer.Typer()
@app.command()
def work():
    with guard(debug=False):
        try:
            os.kill(os.getpid(), {int(number)})
            import time; time.sleep(20)
        finally:
            open({str(tmp_path / "closed")!r}, "w").close()
app()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert (tmp_path / "closed").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("codes", "expected"), [([], 0), ([0, 0], 0), ([0, 3], 3), ([3, 2], 2), ([0, 3, 1, 2], 1), ([2, 0], 2)])
def test_a_sweep_ends_with_the_worst_of_its_jobs(codes: list[int], expected: int) -> None:
    assert exit_code([Outcome(folder=Path(os.curdir), code=code, verdict="ok") for code in codes]) == expected
