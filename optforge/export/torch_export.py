"""A `.pt2` that `torch.export.load` reads: the whole program, weights as stored, no code of OptForge's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch

from optforge.errors import Problem
from optforge.export import program
from optforge.export.base import Subject, Written
from optforge.export.held import held
from optforge.measure.size import weight_bytes

FILE = "model.pt2"


class TorchExport:
    """Quantized products are traced as their plain PyTorch reference, since a kernel of ours exists only where OptForge does."""

    name: ClassVar[str] = "torch_export"
    loads: ClassVar[str] = "torch.export.load"
    packages: ClassVar[tuple[str, ...]] = ()

    def machine(self) -> Iterator[Problem]:
        yield from ()

    def refusals(self, subject: Subject) -> Iterator[Problem]:
        yield from ()

    def nbytes(self, subject: Subject) -> int:
        return weight_bytes(subject.module)

    def write(self, subject: Subject, folder: Path) -> Written:
        made = program.program(subject)
        with held(folder / FILE) as file:
            torch.export.save(made.exported, file)  # type: ignore[arg-type]  # any binary file will do
        return Written(
            engine="torch_export",
            module=subject.module,
            dtype=subject.dtype,
            options={"file": FILE, "device": str(subject.device)},
            sizes=subject.inputs.sizes(made.dynamic),
            facts={"file": FILE, **program.facts(made, subject)},
            notes=made.notes,
        )
