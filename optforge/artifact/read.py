"""Reads an artifact: the structure on meta, the receipts replayed, the tensors assigned, the ties tied.

Nothing in an artifact is trusted: files are held against their sha256, names may not leave the folder, steps are built
from registered transforms with checked options, and a run that names code needs `trust`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from optforge import __version__, registry, safe_yaml
from optforge.artifact.layout import FORMAT_VERSION, GIVEN, NAME, PREVIOUS
from optforge.artifact.table import Alias, Entry, assign
from optforge.cache import sha256_of
from optforge.errors import ModelError, Problem
from optforge.models.base import Loaded
from optforge.spec import Json, Run
from optforge.transforms.base import Context, Phase, Receipt, Touched, Transform

STEP_KEYS = ("use", "after", "before", "keep")
"""Keys of a step that its transform never sees."""
SAFE_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def load(run_dir: Path | str, *, compile: bool = False, trust: bool = False, device: torch.device | str | None = None) -> nn.Module:
    """The optimized model of a run saved with `save: true`, in eval mode; gives the same outputs bit for bit.

    `run_dir` is the run's folder or the artifact's own. With `compile=True` the compile step is applied too, and
    outputs are then as exact as the compiler's.

    Raises:
        ModelError: the artifact is missing, truncated, changed, of a newer format, or does not fit its model.
        TrustError: its run names code of the user's own and `trust` is not set.
    """
    described = load_described(run_dir, trust=trust, device=device)
    if compile:
        _compile(described.loaded.module, described.saved, torch.device(device or "cpu"))
    return described.loaded.module


@dataclass(frozen=True, kw_only=True)
class Described:
    """A loaded artifact and what its run says of it."""

    run: Run
    loaded: Loaded
    """The optimized module, uncompiled, with what the model's source knows without its weights."""
    saved: _Saved

    @property
    def folder(self) -> Path:
        """The artifact's own folder."""
        return self.saved.folder

    @property
    def verdict(self) -> str | None:
        """The run's."""
        return self.saved.verdict


def load_described(run_dir: Path | str, *, trust: bool = False, device: torch.device | str | None = None) -> Described:
    """The optimized model of a run, uncompiled, together with the run. Raises as `load`."""
    from optforge import config

    saved = _Saved.read(_artifact_folder(Path(run_dir)))
    saved.require_described()
    run = config.run_from_yaml(saved.checked("run.yaml"), trust=trust)
    loaded: Loaded = run.model.source.skeleton()
    loaded.module = saved.fill(loaded.module, torch.device(device or "cpu"))
    return Described(run=run, loaded=loaded, saved=saved)


def load_into(model: nn.Module, run_dir: Path | str, *, compile: bool = False, device: torch.device | str | None = None) -> nn.Module:
    """Like `load`, for a model that came from Python: `model` is a fresh one, before any step, possibly on meta.

    Changes `model` in place and returns it.
    """
    saved, place = _Saved.read(_artifact_folder(Path(run_dir))), torch.device(device or "cpu")
    module = saved.fill(model, place)
    if compile:
        _compile(module, saved, place)
    return module


def _compile(module: nn.Module, saved: _Saved, device: torch.device) -> None:
    """Applies the run's compile step, if its recipe has one, for the device that the module is on."""
    backend = registry.get("backends", "nvidia" if device.type == "cuda" else device.type)()
    facts = backend.detect()
    tree = saved.run()
    workload = registry.get("workloads", tree["workload"]["kind"])
    for name, values in tree["recipe"]["steps"].items():
        options = {key: value for key, value in values.items() if key not in STEP_KEYS}
        transform = _Step(step=name, use=values["use"], options=options, receipt=Receipt()).transform()
        if transform.phase is Phase.COMPILE:
            ctx = Context(step=name, target=facts, device=facts, backend=backend, workload=workload.kind, uses_cache=workload.uses_cache)
            transform.apply(module, ctx)


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
        cls = registry.transform(self.use)
        origin = f"artifact.json: step {self.step}: "
        found = schema.build(cls, self.options, "", kind=f"transform {kind}", problems=problems, where=lambda key: origin + key)
        if problems:
            raise ModelError(*problems)
        transform: Transform = found
        return transform


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """An artifact's manifest, its form checked. Nothing in it is trusted further than that."""

    folder: Path
    files: Mapping[str, Mapping[str, Any]]
    verdict: str | None
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
        return cls(
            folder=folder,
            files=dict(manifest["files"]),
            verdict=manifest.get("verdict"),
            tensors=entries,
            file_of=file_of,
            aliases=aliases,
            steps=steps,
        )

    def run(self) -> dict[str, Any]:
        """The resolved run as plain data: nothing in it is built or imported."""
        tree: dict[str, Any] = safe_yaml.read(self.checked("run.yaml"))
        return tree

    def require_described(self) -> None:
        """Refuses an artifact whose model no file describes: that of `optforge.optimize(model, ...)`.

        Raises:
            ModelError: says the class of the module to give.
        """
        described = self.run().get("model") or {}
        if described.get("kind") is None and described.get("name") == GIVEN:
            what = f"was made from a module of a Python program ({described.get('class')}), which no file describes"
            fix = "give a fresh module of that class: optforge.load(folder, model=module)"
            raise ModelError(Problem(where=str(self.folder), what=what, fix=fix))

    def fill(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Replays the steps on `model` and gives it the stored tensors, on `device`."""
        if self.verdict == "failed_quality":
            warnings.warn(f"{self.folder}: the run that saved this model missed its limits of quality (failed_quality)", stacklevel=4)
        values = self._values(device)
        for step in self.steps:
            transform = step.transform()
            try:
                transform.replay(model, step.receipt)
            except AttributeError as error:
                what = f"step {step.step} does not fit the {type(model).__name__} that was given ({error})"
                raise ModelError(
                    Problem(where=str(self.folder), what=what, fix="give a fresh module of the class that was optimized")
                ) from error
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
