"""The Triton kernels compile for every GPU family of the hardware profiles, on a machine without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("cross_compiled.py")


@pytest.mark.parametrize(
    "arch", ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow), pytest.param("gfx950", marks=pytest.mark.slow), "gfx942"]
)
def test_kernels_compile_for(arch: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT), arch], capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("compiled") == 2 * 3 * 2, done.stdout
