"""Starts the functions of `ranks.py` and `light_ranks.py` in processes, and reads what they found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from optforge.distributed.launch import launch

HERE = Path(__file__).parent


def start(address: str, folder: Path, *args: Any, count: int, **options: Any) -> None:
    """Runs `address` with `folder` and `args` in `count` processes, which find this folder and the one above it."""
    saved = list(sys.path)
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    try:
        launch(address, str(folder), *args, count=count, folder=folder / "ranks", env={"OMP_NUM_THREADS": "1"}, **options)
    finally:
        sys.path[:] = saved


def found(folder: Path, rank: int) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / f"found_{rank}.json").read_text())
    return values
