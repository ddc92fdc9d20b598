"""Exports of runs: what `export: [...]` does within one, and what `optforge export` does with a saved one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from optforge import artifact
from optforge.errors import ModelError
from optforge.export.base import Subject
from optforge.export.formats import FORMATS, require
from optforge.export.inputs import Inputs, inputs_for
from optforge.export.portable import portable
from optforge.export.write import export
from optforge.models.base import Companions, Loaded
from optforge.pretrained import torch_dtype
from optforge.progress import Progress
from optforge.spec import Json, Run

FOLDER = "export"
"""Folder of a run's exports, below the run's own; one per format in it."""
PATHS = ("path", "checkpoint", "weights", "tokenizer")
"""Options of models that may name a folder."""


def foresee(run: Run, planned: Loaded) -> None:
    """Finds out before a run what would end its exports after it. `planned` is the model on meta with every step applied.

    Raises:
        MissingDependency: a package or a compiler is not there.
        ModelError: a format cannot hold something of the model; names all.
    """
    require(run.export)
    inputs = Inputs(tensors={}, constants={}, axes={})
    subject = Subject(module=planned.module, family=planned.family, dtype=torch_dtype(run.model.source.dtype), inputs=inputs)
    subject, _ = portable(subject)
    problems = [problem for name in run.export for problem in FORMATS[name].refusals(subject)]
    if problems:
        raise ModelError(*dict.fromkeys(problems))


def subject_of(run: Run, loaded: Loaded, device: torch.device, *, facts: Mapping[str, Json], sources: Sequence[Path] = ()) -> Subject:
    """The optimized `loaded.module` of a run, as the formats take it. `facts` go into export.json."""
    beside = _companions(run.model.source)
    named = [Path(str(run.model.options[key])).expanduser() for key in PATHS if run.model.options.get(key)]
    dtype = torch_dtype(run.model.source.dtype)
    return Subject(
        module=loaded.module,
        family=loaded.family,
        dtype=dtype,
        inputs=inputs_for(loaded, dtype, device),
        tokenizer=loaded.tokenizer or beside.tokenizer,
        generation_config=beside.generation_config,
        sources=(*sources, *(path for path in named if path.exists())),
        facts={"model": run.model.name, "recipe": run.recipe.name, "hardware": run.hardware.name, **facts},
    )


def export_saved(run_dir: Path, name: str, out: Path | None, *, trust: bool = False, progress: Progress | None = None) -> dict[str, Json]:
    """Exports the artifact of a run that was saved with `save: true`; a report beside it gets the export's record.

    Args:
        out: the folder to write; None is `export/<format>` in the run's folder.

    Raises:
        ModelError, TrustError: the artifact cannot be loaded; see `artifact.load`.
        ConfigError, MissingDependency, OutputError, ExportError: see `export`.
    """
    require([name])
    device = _device()
    described = artifact.load_described(run_dir, trust=trust, device=device)
    folder = described.folder
    subject = subject_of(described.run, described.loaded, device, facts={"verdict": described.verdict}, sources=[folder])
    run_folder = folder.parent if folder.name == artifact.NAME else folder
    record = export(subject, name, out if out is not None else run_folder / FOLDER / name, progress)
    _report(run_folder, record)
    return record


def recorded(exports: Sequence[dict[str, Json]], record: dict[str, Json]) -> list[dict[str, Json]]:
    """The list of a report with one more record, which takes the place of an older one of the same folder."""
    return [*(other for other in exports if other.get("path") != record["path"]), record]


def _report(run_folder: Path, record: dict[str, Json]) -> None:
    from optforge.report import store

    if (run_folder / "report.json").is_file():
        report = store.read(run_folder)
        store.write(replace(report, exports=recorded(report.exports, record)), run_folder)


def _companions(source: Any) -> Companions:
    find = getattr(source, "companions", None)
    return Companions() if find is None else find()


def _device() -> torch.device:
    """The best device of this machine that programs can be exported for."""
    from optforge import registry

    found = registry.get("backends", "nvidia")().detect() if "nvidia" in registry.names("backends") else None
    return torch.device("cpu") if found is None else torch.device("cuda")
