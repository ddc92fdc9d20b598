"""The formats by name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from optforge.errors import ConfigError, MissingDependency, Problem, near
from optforge.export.aot_inductor import AotInductor
from optforge.export.base import Format
from optforge.export.compressed_tensors import CompressedTensors
from optforge.export.huggingface import HuggingFace
from optforge.export.onnx import Onnx
from optforge.export.torch_export import TorchExport

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (CompressedTensors(), HuggingFace(), TorchExport(), AotInductor(), Onnx())}
"""Name -> format. `spec.EXPORT_FORMATS` holds the names for readers of configs; a test holds them equal."""


def require(names: Iterable[str]) -> None:
    """Refuses formats that do not exist, and those that this machine lacks something for.

    Raises:
        ConfigError: no such format.
        MissingDependency: a package or a compiler is not there; says what brings it. All are told together.
    """
    wanted = list(names)
    unknown = [name for name in wanted if name not in FORMATS]
    if unknown:
        raise ConfigError(
            *(
                Problem(where="export", what=f"{name!r} is no format", fix=near(name, FORMATS) or f"one of {', '.join(FORMATS)}")
                for name in unknown
            )
        )
    problems = []
    for fmt in map(FORMATS.__getitem__, wanted):
        absent = [package for package in fmt.packages if find_spec(package) is None]
        if absent:
            what = f"needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed"
            problems.append(Problem(where=f"export {fmt.name}", what=what, fix="pip install 'optforge[export]'"))
        problems += fmt.machine()
    if problems:
        raise MissingDependency(*problems)
