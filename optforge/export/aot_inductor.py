"""A package compiled ahead of time: machine code for this kind of machine, loaded by `torch._inductor.aoti_load_package`, also from C++."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from optforge import toolchain
from optforge.errors import Problem
from optforge.export import program
from optforge.export.base import Subject, Written
from optforge.export.held import held
from optforge.measure.size import weight_bytes

FILE = "model.pt2"


class AotInductor:
    """The program of `torch_export`, compiled. It runs on the device, and the kind of processor, that it was compiled for."""

    name: ClassVar[str] = "aot_inductor"
    loads: ClassVar[str] = "torch._inductor.aoti_load_package, C++"
    packages: ClassVar[tuple[str, ...]] = ()

    def machine(self) -> Iterator[Problem]:
        """Inductor calls a C++ compiler, on every device."""
        for problem in toolchain.missing(toolchain.cxx_compiler(), "C++"):
            yield replace(problem, where="export aot_inductor", fix="install one, or export: [torch_export]")

    def refusals(self, subject: Subject) -> Iterator[Problem]:
        yield from ()

    def nbytes(self, subject: Subject) -> int:
        return 2 * weight_bytes(subject.module)  # the weights lie in the working folder and in the package

    def write(self, subject: Subject, folder: Path) -> Written:
        made = program.program(subject)
        with torch.no_grad(), held(folder / FILE) as file:
            torch._inductor.aoti_compile_and_package(made.exported, package_path=file)  # type: ignore[arg-type]  # any binary file will do
        return Written(
            engine="aot_inductor",
            module=subject.module,
            dtype=subject.dtype,
            options={"file": FILE, "device": str(subject.device)},
            sizes=subject.inputs.sizes(made.dynamic),
            facts={"file": FILE, **program.facts(made, subject)},
            notes=made.notes,
        )
