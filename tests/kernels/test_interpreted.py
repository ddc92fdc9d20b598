"""The Triton kernels under Triton's interpreter on the CPU, against float64. A process of its own, because the
interpreter is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("interpreted.py")


@pytest.mark.parametrize("storage", ["int8", "fp8", "fp8_fnuz", "fp8_tensor", "int4", "int4_symmetric", "int4_channel"])
def test_a_kernel_under_the_interpreter_is_the_float64_product(storage: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT), storage], capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == 10, done.stdout
