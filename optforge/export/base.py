"""What every export format keeps to: what it is given, what it refuses, what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from optforge.errors import Problem
from optforge.export.inputs import Inputs
from optforge.spec import Json

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An optimized model that is to be exported. Nothing in it is changed."""

    module: nn.Module
    """In eval mode, uncompiled, on the device that it is exported for."""
    family: str
    dtype: torch.dtype
    """Of the model before any quantization."""
    inputs: Inputs
    tokenizer: Any = None
    generation_config: Any = None
    sources: tuple[Path, ...] = ()
    """Folders that the export reads, which it must not write over."""
    facts: Mapping[str, Json] = field(default_factory=dict)
    """What export.json keeps of the run: model, recipe, verdict."""

    @property
    def device(self) -> torch.device:
        import torch

        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a format has put into the folder, and how the reload check is to load it."""

    engine: str
    """Key of `reload.ENGINES`."""
    module: nn.Module
    """What the artifact is compared with: the optimized model in the dtype that the engine runs it in."""
    dtype: torch.dtype
    options: Mapping[str, Json] = field(default_factory=dict)
    """Of the engine's loader."""
    sizes: tuple[tuple[int, int], ...]
    """Batch and tokens of each comparison."""
    facts: Mapping[str, Json] = field(default_factory=dict)
    """What export.json says of the content."""
    notes: tuple[str, ...] = ()


class Format(Protocol):
    """One format. Instances hold no state."""

    name: ClassVar[str]
    loads: ClassVar[str]
    """Who loads it, in words."""
    packages: ClassVar[tuple[str, ...]]
    """What must be importable to write and to check it, beyond what OptForge needs anyway; the extra `export` brings them."""

    def machine(self) -> Iterator[Problem]:
        """What this machine lacks for it, apart from packages."""
        ...

    def refusals(self, subject: Subject) -> Iterator[Problem]:
        """What of the model the format cannot hold, each by its name. Nothing has been written yet."""
        ...

    def nbytes(self, subject: Subject) -> int:
        """Bytes that it will take on the disk, about."""
        ...

    def write(self, subject: Subject, folder: Path) -> Written:
        """Writes into the empty `folder`.

        Raises:
            ModelError: the format cannot express what the model does; says what.
        """
        ...
