"""Writes an artifact whole or not at all, and says what it holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from optforge import __version__, atomic
from optforge.artifact.layout import FORMAT_VERSION, NAME
from optforge.artifact.table import Table, table
from optforge.cache import sha256_of
from optforge.progress import Progress, SilentProgress
from optforge.spec import Json

SHARD_BYTES = 4 * 1024**3
"""Most bytes of tensors in one file; a larger model is split, and only one file's tensors are in memory twice."""
RESERVE_BYTES = 1024**2
"""Room kept for headers, artifact.json and the file system."""


def save(
    model: nn.Module,
    folder: Path,
    *,
    run_yaml: str,
    receipts: Sequence[Mapping[str, Json]],
    progress: Progress | None = None,
    ties_before: Mapping[str, str] | None = None,
    verdict: str | None = None,
) -> dict[str, Json]:
    """Writes `folder/artifact`, replacing an older one whole or not at all.

    `receipts` are `{step, use, options, receipt}` in the order applied; `ties_before` are the ties of the model as
    loaded (`table.ties`), to say which of them a step broke. `verdict` is the run's: it marks an artifact whose quality
    was not held, which `load` then says.

    Returns what the report keeps: path, bytes, bytes_before, files, tensors, aliases, warnings.

    Raises:
        ModelError: a tensor cannot be stored; nothing was written.
        OutputError: the folder cannot be written or its volume is full; nothing partial is left.
    """
    stored = table(model)
    facts = {"verdict": verdict, "receipts": [dict(receipt) for receipt in receipts]}
    needed, target = room(stored.nbytes) + len(run_yaml), folder / NAME
    with atomic.folder(target, needed) as temporary:
        try:
            manifest = _write(temporary, stored, run_yaml, facts, progress or SilentProgress())
        except SafetensorError as error:
            raise atomic.cannot_write(target, needed, error) from error
    return _summary(target, stored, manifest, receipts, ties_before)


def room(weight_bytes: int) -> int:
    """Bytes that must be free for an artifact of so many bytes of weights."""
    return weight_bytes + RESERVE_BYTES


def require_storable(model: nn.Module) -> None:
    """Finds out before the first step what `save` would refuse after the last.

    Raises:
        ModelError: as `save`.
    """
    table(model)


def _write(folder: Path, stored: Table, run_yaml: str, facts: Mapping[str, Json], progress: Progress) -> dict[str, Json]:
    """Writes every file of an artifact into `folder`; returns its manifest, which holds `facts` too."""
    tensors = {name: dataclasses.asdict(entry) for name, entry in stored.entries.items()}
    shards = list(_shards(stored.tensors))
    with progress.stage("saving the artifact", total=len(shards)):
        for index, names in enumerate(shards):
            file = "model.safetensors" if len(shards) == 1 else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file({name: stored.tensors[name].detach().cpu().contiguous() for name in names}, folder / file)
            for name in names:
                tensors[name]["file"] = file
            progress.advance()
    (folder / "run.yaml").write_text(run_yaml, encoding="utf-8")
    manifest = {
        "format_version": FORMAT_VERSION,
        "optforge": __version__,
        "torch": torch.__version__,
        "files": {path.name: {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())},
        "aliases": {name: dataclasses.asdict(alias) for name, alias in stored.aliases.items()},
        **facts,
        "tensors": tensors,
    }
    (folder / "artifact.json").write_text(json.dumps(manifest, indent=1, allow_nan=False), encoding="utf-8")
    return manifest


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of the tensors of each file, in order, filled up to `SHARD_BYTES`."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if names and size + nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _summary(
    target: Path,
    stored: Table,
    manifest: Mapping[str, Any],
    receipts: Sequence[Mapping[str, Json]],
    ties_before: Mapping[str, str] | None,
) -> dict[str, Json]:
    """What the report keeps of a saved artifact; one that is not smaller than the model was says so, and why."""
    before = (receipts[0]["receipt"].get("total_bytes") or None) if receipts else None
    now = {name: alias.of for name, alias in stored.aliases.items() if alias.same == "object"}
    broken = [f"{name} no longer is {first}" for name, first in (ties_before or {}).items() if now.get(name) != first]
    warnings = []
    quantized = any(str(receipt["use"]).startswith("quantize/") for receipt in receipts)
    if quantized and before is not None and stored.nbytes >= before:
        reason = f": tie broken: {'; '.join(broken)}" if broken else ""
        warnings.append(f"the artifact is not smaller than the model was ({stored.nbytes:,} bytes, {before:,} before){reason}")
    return {
        "path": str(target),
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "weight_bytes": stored.nbytes,
        "bytes_before": before,
        "files": sorted(manifest["files"]),
        "tensors": len(stored.entries),
        "aliases": {name: alias.of for name, alias in stored.aliases.items()},
        "ties_broken": broken,
        "warnings": warnings,
    }
