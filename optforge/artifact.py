"""Saves an optimized model so that it loads bit for bit, and loads it.

    <folder>/artifact/
      artifact.json        format_version, tensors, aliases, receipts, sha256 of every file
      model.safetensors    plain tensors only (several files when large)
      run.yaml             the resolved run: names the model whose structure is rebuilt

Loading builds the structure on meta, replays the receipts (no decision is made twice), assigns the tensors and ties
what was tied. The old artifact stays whole until the new one is: everything is written into a temporary folder beside
it, flushed and renamed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from optforge import __version__, atomic, registry
from optforge.cache import sha256_of
from optforge.errors import ModelError, Problem
from optforge.progress import Progress, SilentProgress
from optforge.spec import Json, Run
from optforge.statetable import Alias, Entry, Table, assign, table
from optforge.transforms.base import Context, Phase, Receipt, Touched, Transform

FORMAT_VERSION = 1
NAME = "artifact"
PREVIOUS = ".artifact.previous"
"""Where the old artifact lies between the two renames that replace it; whole if a kill falls between them."""
SHARD_BYTES = 4 * 1024**3
"""Most bytes of tensors in one file; a larger model is split, and only one file's tensors are in memory twice."""
RESERVE_BYTES = 1024**2
"""Room kept for headers, artifact.json and the file system."""
SAFE_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def save(
    model: nn.Module,
    folder: Path,
    *,
    run_yaml: str,
    receipts: Sequence[Mapping[str, Json]],
    progress: Progress | None = None,
    ties_before: Mapping[str, str] | None = None,
) -> dict[str, Json]:
    """Writes `folder/artifact`, replacing an older one whole or not at all.

    `receipts` are `{step, use, options, receipt}` in the order applied; `ties_before` are the ties of the model as
    loaded (`statetable.ties`), to say which of them a step broke.

    Returns what the report keeps: path, bytes, bytes_before, files, tensors, aliases, warnings.

    Raises:
        ModelError: a tensor cannot be stored; nothing was written.
        OutputError: the folder cannot be written or its volume is full; nothing partial is left.
    """
    stored = table(model)
    needed = stored.nbytes + len(run_yaml) + RESERVE_BYTES
    target, temporary = folder / NAME, folder / f".{NAME}{atomic.TEMPORARY}{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recover(folder)
        atomic.remove_stale(folder, NAME)
        if atomic.free_bytes(folder) < needed:
            raise atomic.cannot_write(target, needed, OSError("no space left on the volume"))
        temporary.mkdir()
        manifest = _write(temporary, stored, run_yaml, receipts, progress or SilentProgress())
        _replace(temporary, target)
    except (OSError, SafetensorError) as error:
        raise atomic.cannot_write(target, needed, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _summary(target, stored, manifest, receipts, ties_before)


def _write(folder: Path, stored: Table, run_yaml: str, receipts: Sequence[Mapping[str, Json]], progress: Progress) -> dict[str, Json]:
    """Writes and flushes every file of an artifact into `folder`; returns its manifest."""
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
        "receipts": [dict(receipt) for receipt in receipts],
        "tensors": tensors,
    }
    (folder / "artifact.json").write_text(json.dumps(manifest, indent=1, allow_nan=False), encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as file_handle:
            os.fsync(file_handle.fileno())
    atomic.sync_folder(folder)
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


def _replace(temporary: Path, target: Path) -> None:
    """Renames `temporary` to `target`. A full folder cannot be renamed over, so the old one steps aside first."""
    previous = target.with_name(PREVIOUS)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    os.rename(temporary, target)
    atomic.sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def recover(folder: Path) -> None:
    """Puts the old artifact back where a kill between the two renames left it aside."""
    if (folder / PREVIOUS).exists() and not (folder / NAME).exists():
        os.rename(folder / PREVIOUS, folder / NAME)


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


def load(run_dir: Path | str, *, compile: bool = False, trust: bool = False, device: torch.device | str | None = None) -> nn.Module:
    """The optimized model of a run saved with `save: true`, in eval mode; gives the same outputs bit for bit.

    `run_dir` is the run's folder or the artifact's own. With `compile=True` the compile step is applied too, and
    outputs are then as exact as the compiler's.

    Raises:
        ModelError: the artifact is missing, truncated, changed, of a newer format, or does not fit its model.
        TrustError: its run names code of the user's own and `trust` is not set.
    """
    from optforge import config

    saved = _Saved.read(_artifact_folder(Path(run_dir)))
    run = config.run_from_yaml(saved.checked("run.yaml"), trust=trust)
    place = torch.device(device or "cpu")
    module = saved.fill(run.model.source.skeleton().module, place)
    if compile:
        _compile(module, run, place)
    return module


def _compile(module: nn.Module, run: Run, device: torch.device) -> None:
    """Applies the run's compile steps for the device that the module is on."""
    backend = registry.get("backends", "nvidia" if device.type == "cuda" else device.type)()
    workload = run.workload.source
    for step in run.recipe.steps:
        if step.transform.phase is Phase.COMPILE:
            facts = backend.detect() or run.hardware
            ctx = Context(
                step=step.name,
                target=run.hardware,
                device=facts,
                backend=backend,
                workload=run.workload.kind,
                uses_cache=workload.uses_cache,
                seed=run.seed,
            )
            step.transform.apply(module, ctx)


def load_into(model: nn.Module, run_dir: Path | str, *, device: torch.device | str | None = None) -> nn.Module:
    """Like `load`, for a model that came from Python: `model` is a fresh one, before any step, possibly on meta.

    Changes `model` in place and returns it.
    """
    return _Saved.read(_artifact_folder(Path(run_dir))).fill(model, torch.device(device or "cpu"))


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One replayable step: the registered kind, its options as written, and what it decided."""

    step: str
    use: str
    options: Mapping[str, Json]
    receipt: Receipt

    def transform(self) -> Transform:
        from optforge.config import schema

        kind = self.use.split("/", 1)[0]
        problems: list[Problem] = []
        cls = registry.get("transforms", kind)
        found = schema.build(cls, self.options, "", f"transform {kind}", problems, lambda key: f"artifact.json: step {self.step}: {key}")
        if problems:
            raise ModelError(*problems)
        transform: Transform = found
        return transform


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """An artifact's manifest, its form checked. Nothing in it is trusted further than that."""

    folder: Path
    files: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Entry]
    file_of: Mapping[str, str]
    aliases: Mapping[str, Alias]
    steps: Sequence[_Step]

    @classmethod
    def read(cls, folder: Path) -> _Saved:
        """Reads `folder/artifact.json`.

        Raises:
            ModelError: it is no JSON, of a newer format, or lacks what an artifact has.
        """
        path = folder / "artifact.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _damaged(path, f"cannot be read ({error})") from error
        version = manifest.get("format_version") if isinstance(manifest, dict) else None
        if not isinstance(version, int):
            raise _damaged(path, "has no format_version")
        if version > FORMAT_VERSION:
            what = f"has format_version {version}; this OptForge ({__version__}) reads up to {FORMAT_VERSION}"
            raise ModelError(Problem(where=str(path), what=what, fix="upgrade OptForge"))
        try:
            return cls._parsed(folder, manifest)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _damaged(path, f"cannot be understood ({type(error).__name__}: {error})") from error

    @classmethod
    def _parsed(cls, folder: Path, manifest: Mapping[str, Any]) -> _Saved:
        tensors = {name: dict(values) for name, values in manifest["tensors"].items()}
        file_of = {name: str(values.pop("file")) for name, values in tensors.items()}
        entries = {name: Entry(**values) for name, values in tensors.items()}
        aliases = {name: Alias(**values) for name, values in manifest["aliases"].items()}
        lost = sorted({alias.of for alias in aliases.values()} - set(entries))
        if lost:
            raise ValueError(f"aliases of tensors that are not there: {', '.join(lost)}")
        steps = [_Step(step=s["step"], use=s["use"], options=s["options"], receipt=_receipt(s["receipt"])) for s in manifest["receipts"]]
        return cls(folder=folder, files=dict(manifest["files"]), tensors=entries, file_of=file_of, aliases=aliases, steps=steps)

    def fill(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Replays the steps on `model` and gives it the stored tensors, on `device`."""
        values = self._values(device)
        for step in self.steps:
            step.transform().replay(model, step.receipt)
        try:
            assign(model, self.tensors, self.aliases, values)
        except ModelError as error:
            raise ModelError(*(dataclasses.replace(p, where=f"{self.folder}: {p.where}") for p in error.problems)) from error
        return model.eval()

    def _values(self, device: torch.device) -> dict[str, Tensor]:
        """Every stored tensor, read from files whose sha256 was checked."""
        by_file: dict[str, list[str]] = {}
        for name, file in self.file_of.items():
            by_file.setdefault(file, []).append(name)
        found: dict[str, Tensor] = {}
        for file, names in by_file.items():
            path = self.checked(file)
            try:
                with safe_open(path, framework="pt", device=str(device)) as reader:
                    found.update({name: reader.get_tensor(name) for name in names})
            except SafetensorError as error:
                raise _damaged(path, f"cannot be read ({error})") from error
        return found

    def checked(self, file: str) -> Path:
        """The path of one of the artifact's files, its size and sha256 held against the manifest."""
        if not SAFE_FILE.fullmatch(file):
            raise _damaged(self.folder / "artifact.json", f"names a file outside the artifact: {file!r}")
        path, expected = self.folder / file, self.files.get(file)
        if expected is None or not path.is_file():
            raise _damaged(path, "is missing")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise _damaged(path, f"has {size:,} bytes instead of {expected['bytes']:,}")
        if sha256_of(path) != expected["sha256"]:
            raise _damaged(path, "was changed after it was saved (its sha256 differs)")
        return path


def _receipt(values: Mapping[str, Any]) -> Receipt:
    return Receipt(**{**values, "touched": [Touched(**item) for item in values["touched"]]})


def _artifact_folder(run_dir: Path) -> Path:
    """The folder that holds artifact.json; the old artifact's, where a kill left it aside."""
    for folder in (run_dir / NAME, run_dir, run_dir / PREVIOUS):
        if (folder / "artifact.json").is_file():
            return folder
    raise ModelError(Problem(where=str(run_dir), what="holds no artifact", fix="run again with save=true"))


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(Problem(where=str(path), what=what, fix="take another copy, or run again with save=true"))
